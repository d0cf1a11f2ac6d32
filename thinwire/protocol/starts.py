"""The values that clients train from, and the coordinates of those that they trained."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.flat_rows import as_vector
from thinwire.core.tree import Tree, repeat, tmap
from thinwire.protocol.contract import Contract
from thinwire.protocol.state import ClientState, PublicState
from thinwire.schedules.base import Plan


class Group(NamedTuple):
    """Some clients of a cohort that start from the same public state and are trained together."""

    public: PublicState
    plan: Plan
    clients: tuple[int, ...]
    states: tuple[ClientState, ...]


def _starts(group: Group) -> Tree:
    """Stacked initial coordinates: the public ones, plus each client's unsent changes."""
    coords, states = group.public.coords, group.states
    start = repeat(coords, len(states))
    for name in {name for state in states for name in state.unsent}:
        zero = torch.zeros_like(coords[name], device="cpu")
        unsent = torch.stack([state.unsent.get(name, zero) for state in states])
        start[name] = start[name] + unsent.to(coords[name].device)
    return start


def common_start(contract: Contract, group: Group) -> Tensor | None:
    """The values that every client of a group trains from, where they are one vector."""
    own = any(state.unsent for state in group.states)
    return None if own or contract.method.space.reparametrized else as_vector(group.public.coords)


def trained_starts(contract: Contract, group: Group) -> Tree:
    """What clients train at the start of the round: the coordinates, or the values that stand for them."""
    space, public, starts = contract.method.space, group.public, _starts(group)
    if not space.reparametrized:
        return starts
    return space.to_trained(public.base, contract.basis(public.version, public.device), starts)


def coordinates(contract: Contract, group: Group, start: Tree, trained: Tree) -> Tree:
    """The stacked coordinates of trained values; those of values that training did not change stay the same."""
    space, public = contract.method.space, group.public
    if not space.reparametrized:
        return trained
    made = space.from_trained(public.base, contract.basis(public.version, public.device), trained)
    return tmap(lambda now, was, new, old: torch.where(now == was, old, new), trained, start, made, _starts(group))
