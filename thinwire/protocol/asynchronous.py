"""Asynchronous rounds: a version is made of the uploads that arrive first, whatever version they are based on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.core.text import check_numbers
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Asynchronous:
    """How rounds go on without slow clients. Without `concurrency`, a round waits for its whole cohort.

        asked at the start of a round    clients, until concurrency * cohort of them train at the same time
        end of a round                   when `cohort` uploads have arrived; the other clients go on training
        update of client i               (1 + tau_i)^-exponent * (its update),   tau_i = version now - version trained

    Args:
        concurrency: clients that train at the same time, in units of the cohort: 1 or more; 0 for synchronous rounds.
        exponent: how fast the weight of an update falls with its staleness tau; 0 for not at all.
        most_stale: the largest staleness of an upload that is used; 0 for any.

    >>> [round(Asynchronous(2.0).factor(staleness), 3) for staleness in (0, 1, 3)]
    [1.0, 0.707, 0.5]
    >>> Asynchronous(2.0).clients(10, 100), Asynchronous(2.0).clients(10, 15)
    (20, 15)
    """

    concurrency: float = 0.0
    exponent: float = 0.5
    most_stale: int = 0

    def __post_init__(self) -> None:
        check_numbers(self)
        if not (self.concurrency == 0 or 1 <= self.concurrency < math.inf):
            raise ConfigError(
                "asynchronous.concurrency must be 0 (synchronous rounds) or 1 and more, in units of the cohort, "
                f"not {self.concurrency}; write for example 2.0"
            )
        if not 0 <= self.exponent < math.inf:
            raise ConfigError(
                f"asynchronous.exponent must be 0 (no weights) or more, not {self.exponent}; write for example 0.5"
            )
        if self.most_stale < 0:
            raise ConfigError(f"asynchronous.most_stale must be 0 (any) or a number of versions, not {self.most_stale}")

    @property
    def active(self) -> bool:
        """Whether rounds are asynchronous."""
        return self.concurrency > 0

    def clients(self, cohort: int, eligible: int) -> int:
        """The number of clients that train at the same time."""
        return min(round(self.concurrency * cohort), eligible)

    def factor(self, staleness: int) -> float:
        """The factor of an update that is based on a version so many versions ago."""
        return float((1 + staleness) ** -self.exponent)

    def is_too_stale(self, staleness: int) -> bool:
        """Whether an upload is not used, because it is based on a version too long ago."""
        return 0 < self.most_stale < staleness
