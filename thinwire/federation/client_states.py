"""The states of all clients that have taken part, of which a round changes a few.

States go in and come out of a round, so the mapping before it must not change. Copying a million entries to change a
hundred would take longer than a small model's round: entries are kept in shelves of 256, and only shelves with changes
are copied.

>>> before = ClientStates({3: ClientState(1)})
>>> after = before.updated({3: ClientState(2), 700: ClientState(2)}.items())
>>> before[3].version, after[3].version, len(before), len(after), sorted(after)
(1, 2, 1, 2, [3, 700])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from thinwire.protocol.state import ClientState

_SHELF = 256


class ClientStates(Mapping[int, ClientState]):
    """An immutable mapping from client numbers to states."""

    def __init__(self, states: Mapping[int, ClientState] | None = None) -> None:
        self._shelves: dict[int, dict[int, ClientState]] = {}
        for i, state in (states or {}).items():
            self._shelves.setdefault(i // _SHELF, {})[i] = state

    @classmethod
    def of(cls, states: Mapping[int, ClientState]) -> ClientStates:
        """The same states as ClientStates, without a copy if they are that already."""
        return states if isinstance(states, ClientStates) else cls(states)

    def updated(self, states: Iterable[tuple[int, ClientState]]) -> ClientStates:
        """A mapping in which these clients have these states."""
        after = ClientStates()
        after._shelves = dict(self._shelves)
        for i, state in states:
            at = i // _SHELF
            shelf = after._shelves.get(at)
            if shelf is None or shelf is self._shelves.get(at):
                shelf = after._shelves[at] = dict(shelf or ())
            shelf[i] = state
        return after

    def __getitem__(self, i: int) -> ClientState:
        return self._shelves[i // _SHELF][i]

    def __iter__(self) -> Iterator[int]:
        return (i for shelf in self._shelves.values() for i in shelf)

    def __len__(self) -> int:
        return sum(map(len, self._shelves.values()))
