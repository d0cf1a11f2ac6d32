"""SIGTERM ends a server in order: the open round is closed and saved, or abandoned if it takes too long.

A round that is abandoned is not lost: the checkpoint of the round before it is on disk, and clients repeat their
uploads when the run is resumed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from thinwire.errors import ThinwireError

GRACE = 30.0  # seconds; service managers send SIGKILL after 90


class Stopped(ThinwireError):
    """The server was told to stop, and did so in order; the same command continues the run."""


class Shutdown:
    """Handles SIGTERM inside a `with` block.

    Args:
        grace: seconds for the open round.

    `after_round` ends the run after the round in which the signal arrived; when `grace` is over, the open round ends
    with the same `KeyboardInterrupt`. Outside of the main thread, which alone receives signals, nothing happens.

    >>> with Shutdown() as shutdown:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     shutdown.requested
    True
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace, self.requested = grace, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_term)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after_round(self) -> None:
        """Raise KeyboardInterrupt if SIGTERM has arrived; the caller has written the round."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            signal.setitimer(signal.ITIMER_REAL, self.grace)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt
