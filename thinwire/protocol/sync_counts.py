"""How often each block was synchronized, and how many upload bytes it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from thinwire.protocol.contract import Contract
from thinwire.schedules.base import Plan


@dataclass(frozen=True)
class SyncCounts:
    """Counts by block since the first round; blocks that were never synchronized are absent.

    Args:
        syncs: number of rounds in which a block was synchronized.
        bytes_up: bytes that clients uploaded for it, without headers; None where the codec mixes blocks.
    """

    syncs: Mapping[str, int] = field(default_factory=dict)
    bytes_up: Mapping[str, int] | None = field(default_factory=dict)

    def add(self, contract: Contract, plan: Plan, clients: Collection[int]) -> SyncCounts:
        """The counts after a round that was closed with uploads of these clients.

        `close_round` refuses an upload whose blocks have other sizes than `block_bytes` says, so these bytes were sent.
        """
        method, planned = contract.method, contract.coords.restrict(plan.names)
        syncs = {**self.syncs, **{name: self.syncs.get(name, 0) + 1 for name in planned.names}}
        bytes_up = None if self.bytes_up is None else dict(self.bytes_up)
        if not method.sketch.is_identity and method.sketch.spec(planned) != planned:
            bytes_up = None
        tiers = Counter(map(contract.tier, clients)) if method.budget.tiers else {0: len(clients)}
        for tier, uploads in tiers.items():
            sizes = method.ups[tier].block_bytes(planned) if bytes_up is not None else None
            if bytes_up is None or sizes is None:
                return SyncCounts(syncs, None)
            for name, size in sizes.items():
                bytes_up[name] = bytes_up.get(name, 0) + uploads * size
        return SyncCounts(syncs, bytes_up)
