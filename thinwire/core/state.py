"""Optimizer states: named slots, each a tree.

    state["momentum"]["fc.weight"]

The functions here are those of `tree`, slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from thinwire.core.tree import Tree, all_finite, bring, stack, tmap

State: TypeAlias = dict[str, Tree]


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


def select_blocks(state: State, keep: Callable[[str], bool]) -> State:
    """The entries of the blocks whose names satisfy `keep`."""
    return {slot: {name: block for name, block in tree.items() if keep(name)} for slot, tree in state.items()}


def merge_states(old: State, new: State) -> State:
    """`old` with the entries of `new` replaced or added.

    >>> import torch
    >>> one, two = torch.ones(1), torch.zeros(1)
    >>> merge_states({"m": {"a": one, "b": one}}, {"m": {"b": two}})["m"]["b"].item()
    0.0
    """
    return {slot: {**old.get(slot, {}), **new.get(slot, {})} for slot in {**old, **new}}
