"""Transports: what carries messages between a server and its clients, how long a server waits, and for how many.

A transport guarantees nothing: responses may be missing, duplicated, late, or arbitrary bytes. The server (`server.py`)
decides what counts. `client.py` has one in memory, `grid_transport.py` that of Flower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from thinwire.errors import ConfigError
from thinwire.protocol.round import Request, Response

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
        grace: once there is a quorum, the round is closed after this many seconds; None waits for `seconds`.
        over_select: the fraction of the cohort that is asked in addition; the round is closed when as many clients as
            the cohort has have responded.
        wait: how many seconds the first round of a process waits until all clients are connected, and a resumed round
            until those of its recorded cohort are.
    """

    seconds: float = 600.0
    quorum: float = 0.5
    tries: int = 3
    grace: float | None = None
    over_select: float = 0.0
    wait: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise ConfigError(f"quorum must be above 0 and at most 1, not {self.quorum}")
        if not self.seconds > 0 or self.tries < 1:
            raise ConfigError(f"seconds must be above 0 and tries 1 or more, not {self.seconds} and {self.tries}")
        if self.grace is not None and not self.grace >= 0:
            raise ConfigError(f"grace must be 0 or more seconds, or None, not {self.grace}")
        if not 0 <= self.over_select <= 10:
            raise ConfigError(
                f"over_select must be from 0 to 10, such as 0.25 for a quarter more, not {self.over_select}"
            )
        if not 0 <= self.wait < math.inf:
            raise ConfigError(f"wait must be 0 or more seconds, not {self.wait}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RoundPolicy:
        """The policy of a run configuration of Flower; other keys are ignored, a negative `grace` is None.

        >>> RoundPolicy.of({"quorum": 0.8, "grace": -1.0, "over-select": 0.25, "run-dir": ""}).over_select
        0.25
        """
        given = {name: config[key] for key, name in KEYS.items() if key in config}
        try:
            for name, value in given.items():
                given[name] = int(value) if name == "tries" else float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} must be a number, not {value!r}") from error
        if given.get("grace", 0.0) < 0:
            del given["grace"]
        return cls(**given)

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


KEYS = {field.name.replace("_", "-"): field.name for field in fields(RoundPolicy)}  # of a run configuration


TOO_LONG = "its reply was not loaded, since it has more than"  # the error of a reply that was refused for its length


class ClientResponse(NamedTuple):
    """A response, and the client that it is from."""

    client: int
    response: Response


class Transport(Protocol):
    """Brings requests to clients and their responses back."""

    def clients(self) -> Set[int]:
        """The clients that are available now."""
        ...

    def name(self, client: int) -> str:
        """What logs and records call a client."""
        ...

    def sites(self) -> Mapping[int, str]:
        """The name of the site of each client; empty without a roster."""
        ...

    def exchange(self, requests: Mapping[int, Request], deadline: Deadline) -> Iterable[ClientResponse]:
        """The responses that arrive within that time, in the order of arrival; also late ones to earlier requests.

        It ends when all of these requests are answered, or the time is over.

        Args:
            requests: one for each client.
            deadline: when to stop waiting for the last response; it may be brought forward meanwhile.
        """
        ...

    def remaining(self, deadline: Deadline) -> Iterable[ClientResponse]:
        """The responses to earlier requests, in the order of arrival, until all are there or the time is over."""
        ...
