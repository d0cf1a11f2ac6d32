"""States: what everyone knows, what the server keeps, what a client keeps, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from thinwire.core.tree import State, Tree
from thinwire.protocol.ledger import Ledger


class PublicState(NamedTuple):
    """What everyone at a version knows. It is a function of the version: the same on every machine."""

    version: int
    base: Tree  # the weights that the space builds on
    coords: Tree  # the trained coordinates
    shared: Tree  # the public state of the correction
    buffers: Tree  # the model's floating-point buffers (running statistics)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return next(iter(self.base.values())).device


class ServerState(NamedTuple):
    """What the server keeps, the public state included."""

    public: PublicState
    opt: State
    correction: Tree
    schedule: Tree
    codec: Tree  # of the download codec
    ledger: Ledger


@dataclass(frozen=True, eq=False)
class ClientState:
    """What a client keeps between rounds.

    Args:
        version: the last version that it received.
        unsent: the part of its update that was not sent, by block: private blocks, and blocks that are synchronized
            later.
        correction: its state of the correction.
        codec: its state of the upload codec.
        opt: its optimizer state, where it is kept for the next round (`Method.opt_lifetime`).
    """

    version: int = 0
    unsent: Tree = field(default_factory=dict)
    correction: Tree = field(default_factory=dict)
    codec: Tree = field(default_factory=dict)
    opt: State = field(default_factory=dict)


@dataclass(frozen=True)
class SyncCounts:
    """Counts by block since the first round; blocks that were never synchronized are absent.

    Args:
        syncs: number of rounds in which a block was synchronized.
        bytes_up: bytes that clients uploaded for it, without headers; None where the codec mixes blocks.
    """

    syncs: Mapping[str, int] = field(default_factory=dict)
    bytes_up: Mapping[str, int] | None = field(default_factory=dict)


_SHELF = 256


@dataclass(frozen=True, eq=False)
class ClientStates(Mapping[int, ClientState]):
    """An immutable mapping from client numbers to the states of all clients that have taken part.

    States go in and come out of a round, so the mapping before it must not change. Copying a million entries to change
    a hundred would take longer than a small model's round: entries are kept in shelves of 256, and only shelves with
    changes are copied.

    >>> before = ClientStates.updated({}, [(3, ClientState(1))])
    >>> after = ClientStates.updated(before, [(3, ClientState(2)), (700, ClientState(2))])
    >>> before[3].version, after[3].version, len(before), len(after), sorted(after)
    (1, 2, 1, 2, [3, 700])
    """

    _shelves: Mapping[int, Mapping[int, ClientState]] = field(default_factory=dict)

    @classmethod
    def updated(cls, before: Mapping[int, ClientState], states: Iterable[tuple[int, ClientState]]) -> ClientStates:
        """The mapping `before`, in which these clients have these states."""
        if not isinstance(before, ClientStates):
            before, states = cls(), (*before.items(), *states)
        changed: dict[int, dict[int, ClientState]] = {}
        for i, state in states:
            at = i // _SHELF
            if at not in changed:
                changed[at] = dict(before._shelves.get(at, {}))
            changed[at][i] = state
        return cls({**before._shelves, **changed})

    def __getitem__(self, i: int) -> ClientState:
        return self._shelves[i // _SHELF][i]

    def __iter__(self) -> Iterator[int]:
        return (i for shelf in self._shelves.values() for i in shelf)

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))


def hand_over(
    states: Mapping[int, ClientState], cohort: Sequence[int], last: Sequence[int], kept: Mapping[int, ClientState]
) -> dict[int, ClientState]:
    """The states of a cohort, in which each client has the optimizer state of its place (`Method.opt_owner = "place"`).

        opt of cohort_t[p] at the start of round t = opt of cohort_{t-1}[p] at the end of round t - 1

    Programs in which m machines train the m clients of a round have one optimizer for each machine. Its momentum is
    then that of the client which the machine trained before. Cohorts are in the order drawn, so that who follows whom
    is random.

    Args:
        states: the states of its clients.
        cohort: its clients in the order of their places.
        last: those of the round before. Places that were empty then have no optimizer state.
        kept: the states of clients after that round.

    >>> kept = {7: ClientState(1, opt={"momentum": {}})}
    >>> hand_over({4: ClientState(), 7: kept[7]}, (4, 7), (7,), kept)[4].opt
    {'momentum': {}}
    """
    opts = [kept[i].opt if i in kept else {} for i in last]
    opts += [{}] * (len(cohort) - len(opts))
    return {i: replace(states[i], opt=opt) for i, opt in zip(cohort, opts, strict=False)}
