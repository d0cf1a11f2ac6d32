"""The time until which a server waits; it can be brought forward while responses arrive."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock, such as the module `time`."""

    def monotonic(self) -> float:
        """Seconds since a fixed moment."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Return after that time."""
        ...


class Deadline:
    """The end of a wait.

    Args:
        seconds: from now.
        clock: the clock.

    >>> end = Deadline(60.0)
    >>> end.at_most(0.0)
    >>> end.left()
    0.0
    """

    def __init__(self, seconds: float, clock: Clock = time) -> None:
        self.clock = clock
        self.end = clock.monotonic() + seconds

    @classmethod
    def of(cls, seconds: float | Deadline) -> Deadline:
        """The deadline itself, or one in so many seconds."""
        return seconds if isinstance(seconds, Deadline) else cls(seconds)

    def left(self) -> float:
        """The seconds that are left; 0 when the time is over."""
        return max(0.0, self.end - self.clock.monotonic())

    def at_most(self, seconds: float) -> None:
        """Bring the end forward to at most so many seconds from now."""
        self.end = min(self.end, self.clock.monotonic() + seconds)
