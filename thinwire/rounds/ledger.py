"""What each version added, and the cheapest way for a client to catch up.

The ledger holds the newest entries, as the very bytes that are sent. It never needs to hold more than one full state is
long: a client that is further behind is better served by the state.

>>> ledger = Ledger().append(b"aa", frozenset({"w"}), limit=4).append(b"bb", frozenset({"w"}), limit=4)
>>> ledger.since(1), ledger.append(b"cc", frozenset(), limit=4).since(0)
((b'bb',), None)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Ledger:
    """The newest entries, and when each block was last synchronised.

    Args:
        first: the version that the oldest kept entry starts from.
        entries: the bodies of the versions first, first + 1, ...
        synced: the version that the last synchronisation of a block led to; absent means never.
        merged: the version that the last merge into the base led to; 0 means never.
    """

    first: int = 0
    entries: tuple[bytes, ...] = ()
    synced: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0

    @property
    def version(self) -> int:
        """The version that the newest entry leads to."""
        return self.first + len(self.entries)

    def append(self, body: bytes, names: frozenset[str], *, limit: int, merge: bool = False) -> Ledger:
        """A ledger with one more entry, without the oldest ones that make it longer than `limit` bytes.

        The newest entry always stays: it is what a client one round behind receives.
        """
        entries = (*self.entries, body)
        size, keep = 0, 0
        for entry in reversed(entries):
            size += len(entry)
            if keep and size > limit:
                break
            keep += 1
        version = self.version + 1
        return replace(
            self,
            first=version - keep,
            entries=entries[len(entries) - keep :],
            synced={**self.synced, **dict.fromkeys(sorted(names), version)},
            merged=version if merge else self.merged,
        )

    def since(self, version: int) -> tuple[bytes, ...] | None:
        """The entries from that version to now, or None if some are no longer kept."""
        if version < self.first:
            return None
        return self.entries[version - self.first :]

    def touched(self, version: int) -> frozenset[str]:
        """The blocks that were synchronised since that version."""
        return frozenset(name for name, at in self.synced.items() if at > version)
