"""A round of a simulation: what is open, the groups of clients that are trained together, and their results."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from thinwire.federation.clock import Download
from thinwire.federation.lazy import Lazy
from thinwire.protocol.client import Group
from thinwire.protocol.state import ClientState
from thinwire.schedules.base import Plan
from thinwire.training.inputs import Backend
from thinwire.wire.bits import Bytes


class OpenRound(NamedTuple):
    """A round that is open."""

    number: int  # rounds done before it
    plan: Plan
    cohort: tuple[int, ...]
    states: dict[int, ClientState]
    download: Lazy[Download]  # encoded at the first call
    uploads: dict[int, Bytes]  # filled group by group: what was made if the round fails


class GroupTask(NamedTuple):
    """Clients that are trained together, and how: everything that another process needs."""

    number: int  # rounds done before
    backend: Backend
    onednn: bool | None
    group: Group
    cohort: tuple[int, ...]


class GroupResult(NamedTuple):
    """The uploads, next states and training losses of a group."""

    messages: list[Bytes]
    states: list[ClientState]
    loss: Tensor  # (clients,)


class CohortResult(NamedTuple):
    """The uploads, next states and training losses of a cohort, by client."""

    messages: dict[int, Bytes]
    states: dict[int, ClientState]
    losses: dict[int, float]

    @classmethod
    def of(cls, groups: list[tuple[tuple[int, ...], GroupResult]]) -> CohortResult:
        """The results of all groups together."""
        messages = {i: one for clients, group in groups for i, one in zip(clients, group.messages, strict=True)}
        states = {i: one for clients, group in groups for i, one in zip(clients, group.states, strict=True)}
        losses = {i: one for clients, group in groups for i, one in zip(clients, group.loss.tolist(), strict=True)}
        return cls(messages, states, losses)
