"""How long a server waits for clients, and for how many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from thinwire.core.text import NonNegativeFloat, PositiveFloat, PositiveInt, Share, check_settings
from thinwire.errors import ConfigError
from thinwire.runs.files import INVALID, unpack

Log = Callable[[str], None]


class Deadline:
    """The end of a wait.

    Args:
        seconds: from now.
        clock: the clock: the module `time`, or one with its functions `monotonic` and `sleep`.

    >>> end = Deadline(60.0)
    >>> end.at_most(0.0)
    >>> end.left()
    0.0
    """

    def __init__(self, seconds: float, clock: Any = time) -> None:
        self.clock = clock
        self.end: float = clock.monotonic() + seconds

    def left(self) -> float:
        """The seconds that are left; 0 when the time is over."""
        return max(0.0, self.end - float(self.clock.monotonic()))

    def at_most(self, seconds: float) -> None:
        """Bring the end forward to at most so many seconds from now."""
        self.end = min(self.end, self.clock.monotonic() + seconds)


@dataclass(frozen=True)
class RoundPolicy:
    """How long a server waits, and for how many clients.

    Args:
        seconds: time for the responses to one request.
        quorum: the fraction of the cohort that must have responded, above 0 and at most 1.
        tries: how often clients are asked while there is no quorum.
        grace: once there is a quorum, the round is closed after this many seconds; below 0, not before `seconds`.
        over_select: the fraction of the cohort that is asked in addition; the round is closed when as many clients as
            the cohort has have responded.
        wait: how many seconds the first round of a process waits until all clients are connected, and a resumed round
            until those of its recorded cohort are.
    """

    seconds: PositiveFloat = 600.0
    quorum: Share = 0.5
    tries: PositiveInt = 3
    grace: float = -1.0
    over_select: Annotated[float, "[0, 10]"] = 0.0
    wait: NonNegativeFloat = 120.0

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RoundPolicy:
        """The policy of a run configuration of Flower; other keys are ignored.

        >>> RoundPolicy.of({"quorum": 0.8, "over-select": 0.25, "run-dir": ""}).over_select
        0.25
        """
        given = {key.replace("-", "_"): config[key] for key in KEYS if key in config}
        try:
            return unpack(cls, given)  # type: ignore[no-any-return]
        except INVALID as error:
            raise ConfigError(f"{', '.join(given)} must be numbers: {error}") from error

    def needed(self, cohort: int) -> int:
        """The number of responses that a round needs.

        >>> RoundPolicy(quorum=0.5).needed(5)
        3
        """
        return math.ceil(self.quorum * cohort)

    def asked(self, cohort: int) -> int:
        """The number of clients that are asked.

        >>> RoundPolicy(over_select=0.3).asked(10)
        13
        """
        return math.ceil(round((1 + self.over_select) * cohort, 6))  # 1.1 * 10 is above 11


KEYS = tuple(field.name.replace("_", "-") for field in fields(RoundPolicy))  # of a run configuration
TOO_LONG = "its reply was not loaded, since it has more than"  # the error of a reply that was refused for its length
