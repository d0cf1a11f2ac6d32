"""Transports: what carries messages between a server and its clients, and one in memory.

A transport guarantees nothing: responses may be missing, duplicated, late, or arbitrary bytes. The server (`server.py`)
decides what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, Protocol

from thinwire.flower.client import Client
from thinwire.flower.client_store import ClientStore, Request, Response
from thinwire.flower.deadline import Deadline

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

    def exchange(self, requests: Mapping[int, Request], seconds: float | Deadline) -> Iterable[ClientResponse]:
        """The responses that arrive within that time, in the order of arrival; also late ones to earlier requests.

        It ends when all of these requests are answered, or the time is over.

        Args:
            requests: one for each client.
            seconds: how long to wait for the last response; a deadline may be brought forward meanwhile.
        """
        ...

    def remaining(self, seconds: float | Deadline) -> Iterable[ClientResponse]:
        """The responses to earlier requests, in the order of arrival, until all are there or the time is over."""
        ...


class InMemory:
    """Clients in the same process. What each stores is serialized, as on a disk."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.stored: dict[int, bytes] = {}
        self.waiting: dict[int, Request] = {}  # requests of exchanges that were ended before their last response

    def clients(self) -> Set[int]:
        """All clients of the task."""
        return frozenset(range(len(self.client.job.task.clients)))

    def name(self, client: int) -> str:
        """Its number: clients in memory have no names."""
        return f"client {client}"

    def sites(self) -> Mapping[int, str]:
        """None: there is no roster in memory."""
        return {}

    def exchange(self, requests: Mapping[int, Request], seconds: float | Deadline) -> Iterable[ClientResponse]:
        """Let one client after the other respond."""
        self.waiting |= requests
        for number, request in requests.items():
            del self.waiting[number]
            yield ClientResponse(number, self.respond(number, request))

    def remaining(self, seconds: float | Deadline) -> Iterable[ClientResponse]:
        """Let the clients respond whose exchange was ended before."""
        while self.waiting:
            number = next(iter(self.waiting))
            yield ClientResponse(number, self.respond(number, self.waiting.pop(number)))

    def respond(self, number: int, request: Request) -> Response:
        """The response of one client."""
        before = self.stored.get(number)
        store = ClientStore.load(before, self.client.first) if before else None
        response, store = self.client.respond(number, request, store)
        self.stored[number] = store.dump(self.client.first)
        return response
