"""How long a server waits for responses, and how many it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class RoundPolicy:
    """How long a server waits, and for how many clients.

    Args:
        seconds: time for the responses to one request.
        quorum: the fraction of the cohort that must have responded, above 0 and at most 1.
        tries: how often clients that did not respond are asked while there is no quorum.
    """

    seconds: float = 600.0
    quorum: float = 0.5
    tries: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        if not self.seconds > 0 or self.tries < 1:
            raise ConfigError(f"seconds must be above 0 and tries 1 or more, not {self.seconds} and {self.tries}")

    def needed(self, cohort: int) -> int:
        """The number of responses that a round needs.

        >>> RoundPolicy(quorum=0.5).needed(5)
        3
        """
        return math.ceil(self.quorum * cohort)
