"""How long simulated clients take: the speed model behind the simulated clock of a run.

    seconds of client i = latency + 8 down_bytes / down + step_seconds * steps_i * slowness_i * jitter + 8 up_bytes / up

A synchronous round takes as long as the slowest client of its cohort. An asynchronous one ends when enough uploads have
arrived. The server takes no time. Which clients are slow is drawn once for the whole run, from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from thinwire.core.key import Key
from thinwire.core.text import NonNegativeFloat, Probability, check_settings
from thinwire.training.batches import Local


@dataclass(frozen=True)
class Speed:
    """The speed of clients and links. The defaults: all alike, one second a step, and links that take no time.

    Args:
        step_seconds: seconds of one local step of an ordinary client.
        slow_fraction: the fraction of clients that are slow, from 0 to 1.
        slow_factor: how many times longer a slow client takes for a step.
        spread: how much clients differ: the standard deviation of the logarithm of their slowness.
        jitter: how much one client differs from round to round, in the same unit.
        up_mbps: speed of each client's uploads in megabits a second; 0 for no limit.
        down_mbps: speed of each client's downloads in megabits a second; 0 for no limit.
        latency: seconds between a request and the beginning of its download, of every client.

    >>> clients = ClientSpeeds(Speed(slow_fraction=0.1), Local(steps=3), [40] * 20, Key(0))
    >>> seconds = [clients.seconds(i, version=0, down=0, up=0) for i in range(20)]
    >>> min(seconds), max(seconds), seconds.count(30.0)
    (3.0, 30.0, 2)
    """

    step_seconds: NonNegativeFloat = 1.0
    slow_fraction: Probability = 0.0
    slow_factor: Annotated[float, "[1, inf)"] = 10.0
    spread: Annotated[float, "[0, 5]"] = 0.0
    jitter: Annotated[float, "[0, 5]"] = 0.0
    up_mbps: NonNegativeFloat = 0.0
    down_mbps: NonNegativeFloat = 0.0
    latency: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_settings(self, "speed.")


class ClientSpeeds:
    """The seconds that each client of a run takes.

    Args:
        speed: the model.
        local: how much a client trains in a round.
        sizes: number of examples of each client.
        key: the root of the run's randomness.
    """

    def __init__(self, speed: Speed, local: Local, sizes: Sequence[int], key: Key) -> None:
        self.speed, self.local, self.sizes, self.key = speed, local, sizes, key.fold("speed")

    @cached_property
    def slow(self) -> frozenset[int]:
        """The slow clients."""
        count = round(self.speed.slow_fraction * len(self.sizes))
        return frozenset(map(int, self.key.fold("slow").choice(len(self.sizes), count)))

    def seconds(self, client: int, version: int, down: int, up: int) -> float:
        """How long a client takes from the request to the arrival of its upload.

        Args:
            client: its number.
            version: the version that it trains from.
            down: bytes of its download.
            up: bytes of its upload.
        """
        speed = self.speed
        slowness = speed.slow_factor if client in self.slow else 1.0
        if speed.spread:
            slowness *= math.exp(speed.spread * float(self.key.fold("spread", client).normal(1)))
        if speed.jitter:
            slowness *= math.exp(speed.jitter * float(self.key.fold("jitter", version, client).normal(1)))
        links = ((down, speed.down_mbps), (up, speed.up_mbps))
        sent = sum(8e-6 * size / mbps for size, mbps in links if mbps)
        return speed.latency + sent + speed.step_seconds * self.local.steps_of(self.sizes[client]) * slowness
