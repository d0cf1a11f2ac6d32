"""How often each block was synchronised, and how many bytes of the clients' messages were its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.protocol.state import Contract
from thinwire.schedules.base import Plan


@dataclass(frozen=True)
class SyncCounts:
    """Counts by block since the first round; blocks that never spoke are absent.

    Args:
        syncs: in how many rounds a block was synchronised.
        bytes_up: bytes that clients sent for it, without headers; None where the codec mixes blocks, so that no byte
            belongs to one of them.
    """

    syncs: Mapping[str, int] = field(default_factory=dict)
    bytes_up: Mapping[str, int] | None = field(default_factory=dict)

    def add(self, contract: Contract, plan: Plan, clients: Collection[int]) -> SyncCounts:
        """The counts after a round that was closed with messages of these clients.

        `close_round` refuses a message that is not cut where `shares` says, so these are bytes that were sent.
        """
        method = contract.method
        planned = contract.coords.restrict(plan.names)
        bytes_up = self.bytes_up
        if method.sketch.spec(planned) != planned:
            bytes_up = None
        for tier, messages in Counter(contract.tier(client) for client in clients).items():
            shares = getattr(method.ups[tier], "shares", None)
            if bytes_up is not None:
                own = {name: messages * share for name, share in shares(planned).items()} if shares else None
                bytes_up = None if own is None else _sum(bytes_up, own)
        return SyncCounts(_sum(self.syncs, dict.fromkeys(planned.names, 1)), bytes_up)


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {**a, **{name: a.get(name, 0) + count for name, count in b.items()}}
