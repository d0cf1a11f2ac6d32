"""Functions on nested optimizer states: slot -> block -> tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection

from thinwire.core.tree import Tree
from thinwire.optimizers.base import ALL_BLOCKS, State


def map_slots(fn: Callable[..., Tree], first: State, *rest: State) -> State:
    """Apply a function of trees to every slot; the first state determines which slots.

    >>> import torch
    >>> from thinwire.core.tree import scale
    >>> map_slots(lambda tree: scale(tree, 2.0), {"momentum": {"w": torch.ones(1)}})
    {'momentum': {'w': tensor([2.])}}
    """
    return {slot: fn(tree, *(state[slot] for state in rest)) for slot, tree in first.items()}


def restrict_state(state: State, names: Collection[str]) -> State:
    """Return the state of the named blocks, and values that belong to no single block.

    >>> import torch
    >>> state = {"count": {ALL_BLOCKS: torch.ones(())}, "m": {"a": torch.zeros(1), "b": torch.zeros(1)}}
    >>> restrict_state(state, {"b"})
    {'count': {'*': tensor(1.)}, 'm': {'b': tensor([0.])}}
    """
    return map_slots(lambda tree: {k: v for k, v in tree.items() if k in names or k == ALL_BLOCKS}, state)
