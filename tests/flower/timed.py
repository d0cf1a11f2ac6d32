"""A transport in memory with a simulated clock: clients have a speed, may be offline, and respond late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

from tests.flower.in_memory import InMemory
from thinwire.flower.client import Client
from thinwire.flower.policy import Deadline
from thinwire.protocol.round import Request, Response


class SimulatedClock:
    """A clock that only advances when someone waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Timed(InMemory):
    """Clients that respond after some seconds of a simulated clock, one request after the other.

    Args:
        client: trains.
        seconds: how long each client takes; one second by default.
        offline: the clients that do not respond at a time of the clock.
        listed: the clients that are listed, also if they are offline; by default those that are not.
    """

    def __init__(
        self,
        client: Client,
        seconds: Mapping[int, float] | None = None,
        offline: Callable[[], Set[int]] = frozenset,
        listed: Callable[[], Set[int]] | None = None,
    ) -> None:
        super().__init__(client)
        self.clock = SimulatedClock()
        self.seconds, self.offline, self.listed = seconds or {}, offline, listed
        self.pending: list[tuple[float, int, Request]] = []  # when the client responds
        self.arrivals: list[tuple[float, int]] = []  # of the last exchange
        self.asked: list[tuple[int, ...]] = []
        self.began = self.ended = 0.0

    def clients(self) -> Set[int]:
        return super().clients() - self.offline() if self.listed is None else self.listed()

    def send(self, requests: Mapping[int, Request], seconds: float) -> None:
        self.asked.append(tuple(requests))
        self.began, self.arrivals = self.clock.now, []
        self.waiting |= requests
        for number in requests.keys() - self.offline():
            free = max([self.clock.now, *(at for at, one, _ in self.pending if one == number)])
            self.pending.append((free + self.seconds.get(number, 1.0), number, requests[number]))

    def receive(self, clients: Set[int], deadline: Deadline) -> Iterator[tuple[int, Response]]:
        try:
            while self.waiting.keys() & clients:
                next_one = min(self.pending, key=lambda one: one[:2], default=None)
                if next_one is None or next_one[0] > deadline.end:
                    self.clock.now = max(self.clock.now, deadline.end)
                    return
                self.pending.remove(next_one)
                self.clock.now, number, request = max(self.clock.now, next_one[0]), *next_one[1:]
                if self.waiting.get(number) is request:
                    del self.waiting[number]
                    self.arrivals.append((self.clock.now, number))
                yield number, self.respond(number, request)
        finally:
            self.ended = self.clock.now
