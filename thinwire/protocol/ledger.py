"""The ledger: what each version added, and the shortest bodies with which a client catches up.

Within one basis coordinates add up. So of a past *window* (the rounds of one basis) the ledger keeps the coordinates at
its end, and of its entries only the newest, as far as they are shorter than that. A client that missed ten rounds of a
window downloads one vector, and merges the same bits that the server merged.

    version  0         3         6     8
             |--- e ---|--- e ---| b b       e: the end of a past window;  b: an entry of the open one

All are kept as the bytes that are sent. The ledger never holds more bytes than one full state (but always the newest
entry): to a client that is further behind the server sends the state.

>>> ledger = Ledger().append(b"aa", frozenset({"w"}), limit=9, longest=9)
>>> ledger = ledger.append(b"bb", frozenset({"w"}), limit=9, longest=9, end=b"sum")
>>> ledger.past_way(0), ledger.past_way(1), ledger.past_way(2)
((b'sum',), (b'bb',), ())
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from thinwire.wire.bits import Bytes


class Window(NamedTuple):
    """The rounds of one basis that was replaced."""

    since: int  # its first version
    until: int  # the version at its end
    entries: tuple[Bytes, ...]  # its newest entries, the last one to version `until`
    end: Bytes  # the coordinates at its end; empty if all entries together are not longer

    @property
    def size(self) -> int:
        """The number of bytes kept."""
        return len(self.end) + sum(map(len, self.entries))

    @property
    def first(self) -> int:
        """The oldest version from which a client can continue with it."""
        return self.since if self.end else self.until - len(self.entries)

    def way(self, version: int) -> tuple[Bytes, ...]:
        """The shortest bodies from a version inside the window to its end."""
        missed = self.until - version
        return (self.end,) if self.end and missed > len(self.entries) else self.entries[len(self.entries) - missed :]


@dataclass(frozen=True)
class Ledger:
    """The newest entries, the coordinates at the end of past windows, and when each block was last synchronized.

    Args:
        version: the version after the newest entry.
        opened: the first version of the open window: the last merge, or the first version.
        entries: the newest bodies of the open window, the last one to `version`.
        past: the windows before it, the oldest first, without gaps.
        synced: the version after the last synchronization of a block; absent means never.
        adds_since: the version since which every entry was added without rounding (`sums.py`).
    """

    version: int = 0
    opened: int = 0
    entries: tuple[Bytes, ...] = ()
    past: tuple[Window, ...] = ()
    synced: Mapping[str, int] = field(default_factory=dict)
    adds_since: int = 0

    @property
    def first(self) -> int:
        """The oldest version from which a client can continue with the ledger."""
        return self.past[0].first if self.past else self.opened

    def append(
        self,
        body: Bytes,
        names: frozenset[str],
        *,
        limit: int,
        longest: int,
        end: Bytes | None = None,
        adds_up: bool = False,
    ) -> Ledger:
        """A ledger with one more entry.

        Args:
            body: the entry.
            names: the blocks that it synchronizes.
            limit: the number of bytes that may be kept in all; the oldest windows are dropped first.
            longest: the total length of entries of the open window above which its coordinates are shorter.
            end: closes the window: the body with the coordinates at its end, or its only entry.
            adds_up: whether the entry was added without rounding.
        """
        version = self.version + 1
        synced = {**self.synced, **dict.fromkeys(sorted(names), version)}
        complete = len(self.entries) == self.version - self.opened
        entries = (*self.entries, body)
        if end is None:
            entries = _newest(entries, longest) or (body,)
            past, opened = self.past, self.opened
        else:
            if complete and sum(map(len, entries)) <= len(end):
                end = b""
            else:
                entries = _newest(entries, len(end) - 1)
            past, opened, entries = (*self.past, Window(self.opened, version, entries, end)), version, ()
        size, keep = sum(map(len, entries)), 0
        for window in reversed(past):
            size += window.size
            if size > limit and (keep or entries):
                break
            keep += 1
        return replace(
            self,
            version=version,
            opened=opened,
            entries=entries,
            past=past[len(past) - keep :],
            synced=synced,
            adds_since=self.adds_since if adds_up else version,
        )

    def since(self, version: int) -> tuple[Bytes, ...] | None:
        """The entries of the open window from that version to now, or None if some are no longer kept."""
        missed = self.version - version
        return self.entries[len(self.entries) - missed :] if missed <= len(self.entries) else None

    def past_way(self, version: int) -> tuple[Bytes, ...] | None:
        """The shortest bodies from that version to the beginning of the open window, or None if it is too long ago."""
        if version >= self.opened:
            return ()
        if version < self.first:
            return None
        at = bisect_right(self.past, version, key=lambda window: window.until)
        whole = (body for window in self.past[at + 1 :] for body in window.way(window.since))
        return (*self.past[at].way(version), *whole)

    def synced_since(self, version: int) -> frozenset[str]:
        """The blocks that were synchronized since that version."""
        return frozenset([name for name, at in self.synced.items() if at > version])


def _newest(entries: tuple[Bytes, ...], longest: int) -> tuple[Bytes, ...]:
    """The newest entries whose total length is at most `longest`."""
    size, keep = 0, 0
    for entry in reversed(entries):
        size += len(entry)
        if size > longest:
            break
        keep += 1
    return entries[len(entries) - keep :]
