"""Tiers of clients with different codecs, for clients with different bandwidth."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.codecs.base import Codec
from thinwire.core.key import Key
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Tier:
    """Clients with the same codecs: a density, a number of bits, a rank.

    Args:
        share: how likely a client belongs to this tier, in proportion to the other tiers' shares.
        sampled: whether these clients ever take part; without them a cohort is drawn from the others.
        up: the codec of their uploads; None for the method's.
        down: the codec of downloads to them (full downloads only); None for the method's.
    """

    share: float = 1.0
    sampled: bool = field(default=True, repr=False)  # no message depends on it
    up: Codec | None = None
    down: Codec | None = None


@dataclass(frozen=True)
class Budget:
    """The tier of each client, known to both ends without a message. Without tiers all clients have the same codecs.

        tier(i) = clients[i] where that is given, else drawn once for the whole run with P(tier) = share / sum of shares

    Args:
        tiers: the tiers. In a file: `budget = { tiers = [{ share = 0.5, up = { kind = "topk", density = 0.01 } },
            { share = 0.5 }] }`.
        clients: the tier of each client, by client number; empty draws them from the seed.

    >>> from thinwire.codecs import TopK
    >>> budget = Budget((Tier(0.75, up=TopK(0.01)), Tier(0.25)))
    >>> drawn = [budget.tier(client, Key(0)) for client in range(1000)]
    >>> 700 < drawn.count(0) < 800, drawn == [budget.tier(client, Key(0)) for client in range(1000)]
    (True, True)
    >>> Budget(budget.tiers, clients=(1, 0)).tier(0, Key(0))
    1
    """

    tiers: tuple[Tier, ...] = ()
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for i, tier in enumerate(self.tiers):
            if not 0 < tier.share < float("inf"):
                raise ConfigError(f"the share of tier {i} must be above 0, not {tier.share}")
        if self.tiers and not any(tier.sampled for tier in self.tiers):
            raise ConfigError("no tier of the budget is sampled; remove sampled = false from one of them")
        if self.clients and not self.tiers:
            raise ConfigError("budget.clients gives clients a tier, but there are no budget.tiers")
        for client, own in enumerate(self.clients):
            if not 0 <= own < len(self.tiers):
                last = len(self.tiers) - 1
                raise ConfigError(f"budget.clients puts client {client} into tier {own}; write one from 0 to {last}")

    def check(self, clients: int) -> None:
        """Raise a ConfigError if the list of clients does not have the length of the task's."""
        if self.clients and len(self.clients) != clients:
            raise ConfigError(
                f"budget.clients gives {len(self.clients)} clients a tier, but the task has {clients}; give each one, "
                "or leave the list out to draw tiers by their shares"
            )

    def tier(self, client: int, key: Key) -> int:
        """The number of a client's tier."""
        if len(self.tiers) < 2:
            return 0
        if client < 0 or (self.clients and client >= len(self.clients)):
            raise ConfigError(f"client {client} has no tier; tiers are for the clients from 0 to the last of the task")
        if self.clients:
            return self.clients[client]
        at = float(key.fold(client).uniform(1)) * sum(tier.share for tier in self.tiers)
        for i, tier in enumerate(self.tiers):
            at -= tier.share
            if at < 0:
                return i
        return len(self.tiers) - 1  # a remainder of rounding
