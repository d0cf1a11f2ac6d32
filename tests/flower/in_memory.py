"""A transport to clients in the same process, without Flower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from thinwire.federation.federation import Federation
from thinwire.flower.client import Client
from thinwire.flower.policy import Deadline
from thinwire.flower.server import FlowerClients
from thinwire.protocol.round import Request, Response


class FlowerServer(Federation):
    """A federation whose clients are those of a transport; all arguments but two are those of `FlowerClients`."""

    def __init__(self, engine, job, *options, **named) -> None:
        super().__init__(engine, job, lambda federation: FlowerClients(federation, *options, **named))


class InMemory:
    """Clients in this process. What each stores is serialized, as on a disk."""

    run = ""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.stored: dict[int, bytes] = {}
        self.waiting: dict[int, Request] = {}  # requests without a response

    def clients(self) -> Set[int]:
        """All clients of the task."""
        return frozenset(range(len(self.client.job.task.clients)))

    def name(self, client: int) -> str:
        """Its number: clients in memory have no names."""
        return f"client {client}"

    def known(self) -> Set[int]:
        """None: there is no roster in memory."""
        return frozenset()

    def send(self, requests: Mapping[int, Request], seconds: float) -> None:
        """Keep requests until their responses are received."""
        self.waiting |= requests

    def receive(self, clients: Set[int], deadline: Deadline) -> Iterator[tuple[int, Response]]:
        """Let one client after the other respond."""
        while due := [client for client in self.waiting if client in clients]:
            yield due[0], self.respond(due[0], self.waiting.pop(due[0]))

    def respond(self, number: int, request: Request) -> Response:
        """The response of one client."""
        response, self.stored[number] = self.client.respond(number, request, self.stored.get(number))
        return response
