"""The simulated clock: when a round ends, by the speed of its clients and the bytes of their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from thinwire.core.key import Key
from thinwire.federation.job import Job, RunState
from thinwire.federation.speed import ClientSpeeds, Speed
from thinwire.wire.bits import Bytes
from thinwire.wire.message import Pieces


class Download(NamedTuple):
    """The messages that open a round, by client, and their bytes: ordinary ones, and beyond these for catching up."""

    messages: dict[int, Pieces]
    ordinary: int
    catchup: int


class SimulatedClock:
    """The simulated time of a run; it does not advance where no speed is set and rounds are synchronous.

    Args:
        job: has the speed of clients, and whether rounds are asynchronous.
    """

    def __init__(self, job: Job) -> None:
        self.runs = job.speed != Speed() or job.method.asynchronous.active
        clients = job.task.clients
        sizes = [len(clients.client(i)) for i in range(len(clients))] if self.runs else []
        self.speeds = ClientSpeeds(job.speed, job.local, sizes, Key(job.seed))

    def shown(self, state: RunState) -> float | None:
        """The time in the record of a round; None where the clock does not run."""
        return state.clock if self.runs else None

    def after_all(self, state: RunState, download: Callable[[], Download], uploads: Mapping[int, Bytes]) -> float:
        """The time when all clients of a round have responded.

        Args:
            state: the state before the round.
            download: the messages to them.
            uploads: the messages from them.
        """
        return max(self.arrivals(state, download, uploads).values()) if self.runs and uploads else state.clock

    def arrivals(
        self, state: RunState, download: Callable[[], Download], uploads: Mapping[int, Bytes]
    ) -> dict[int, float]:
        """When the upload of each client arrives that was asked at the beginning of a round."""
        version, down = state.server.public.version, download().messages
        return {
            i: state.clock + self.speeds.seconds(i, version, sum(map(len, down[i])), len(upload))
            for i, upload in uploads.items()
        }
