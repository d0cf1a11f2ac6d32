"""Optimizer states: named slots, each a tree.

    state["momentum"]["fc.weight"]

The functions here are those of `tree`, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from torch import Tensor

from thinwire.core.tree import Tree, all_finite, bring, same, stack, tmap

State: TypeAlias = dict[str, Tree]
"""State of an optimizer: name of a slot -> tree by block, for example `state["momentum"]["fc.weight"]`."""

ALL_BLOCKS = "*"
"""Key of a value that belongs to no single block, for example Adam's step count: `state["count"][ALL_BLOCKS]`."""


def smap(fn: Callable[..., Tensor], first: State, *rest: State) -> State:
    """Apply a function to every block of every slot; the first state determines slots and blocks.

    >>> import torch
    >>> smap(torch.neg, {"momentum": {"w": torch.ones(1)}})["momentum"]["w"].tolist()
    [-1.0]
    """
    return {slot: tmap(fn, tree, *(state[slot] for state in rest)) for slot, tree in first.items()}


def stack_states(states: Sequence[State]) -> State:
    """One stacked state from the states of several clients."""
    return {slot: stack([state[slot] for state in states]) for slot in states[0]}


def state_to_device(state: State, device: object) -> State:
    """The same state on another device."""
    return dict(zip(state, bring(list(state.values()), str(device)), strict=True))


def state_is_finite(state: State) -> bool:
    """Whether no slot contains a NaN or an infinity."""
    return all(map(all_finite, state.values()))


def restrict_state(state: State, names: Collection[str]) -> State:
    """The entries of the named blocks, and values that belong to no single block.

    >>> import torch
    >>> state = {"count": {ALL_BLOCKS: torch.ones(())}, "m": {"a": torch.zeros(1), "b": torch.zeros(1)}}
    >>> restrict_state(state, {"b"})
    {'count': {'*': tensor(1.)}, 'm': {'b': tensor([0.])}}
    """
    return {slot: {n: b for n, b in tree.items() if n in names or n == ALL_BLOCKS} for slot, tree in state.items()}


def same_state(a: State, b: State) -> bool:
    """Whether two states are equal bit for bit, slots and blocks in the same order."""
    return list(a) == list(b) and all(same(a[slot], b[slot]) for slot in a)


def merge_states(old: State, new: State) -> State:
    """`old` with the entries of `new` replaced or added.

    >>> import torch
    >>> one, two = torch.ones(1), torch.zeros(1)
    >>> merge_states({"m": {"a": one, "b": one}}, {"m": {"b": two}})["m"]["b"].item()
    0.0
    """
    return {slot: {**old.get(slot, {}), **new.get(slot, {})} for slot in {**old, **new}}
