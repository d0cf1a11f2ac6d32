"""How often each block was synchronised, and how many bytes of the clients' messages were its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.rounds.state import Contract
from thinwire.schedules.base import Plan


@dataclass(frozen=True)
class Tally:
    """Counts by block since the first round; blocks that never spoke are absent.

    Args:
        syncs: in how many rounds a block was synchronised.
        bytes_up: bytes that clients sent for it, without headers; None where the codec mixes blocks, so that no byte
            belongs to one of them.
    """

    syncs: Mapping[str, int] = field(default_factory=dict)
    bytes_up: Mapping[str, int] | None = field(default_factory=dict)

    def add(self, contract: Contract, plan: Plan, messages: int) -> Tally:
        """The counts after a round that was closed with that many messages.

        `close_round` refuses a message that is not cut where `shares` says, so these are bytes that were sent.
        """
        method = contract.method
        planned = contract.coords.restrict(plan.names)
        shares = getattr(method.up, "shares", None)
        bytes_up = None
        if shares and self.bytes_up is not None and method.sketch.spec(planned) == planned:
            bytes_up = _sum(self.bytes_up, {name: messages * share for name, share in shares(planned).items()})
        return Tally(_sum(self.syncs, dict.fromkeys(planned.names, 1)), bytes_up)


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {**a, **{name: a.get(name, 0) + count for name, count in b.items()}}
