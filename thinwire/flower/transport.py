"""What carries messages between a server and its clients, and the shortest one: function calls.

A transport promises nothing: answers may fail to come, come twice, come late, or be anything at all. The server
(`server.py`) decides what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, Protocol

from thinwire.flower.client import Client
from thinwire.flower.client_store import Answer, Ask, ClientStore


class Heard(NamedTuple):
    """An answer, and from whom."""

    client: int
    answer: Answer


class Transport(Protocol):
    """Brings messages to clients and their answers back."""

    def clients(self) -> Set[int]:
        """The clients that can be asked now."""
        ...

    def ask(self, asks: Mapping[int, Ask], seconds: float) -> Iterable[Heard]:
        """What is heard within that time, as it comes.

        Args:
            asks: one for each client that is asked.
            seconds: how long to wait for the last answer.
        """
        ...


class InMemory:
    """Clients in the same process. What each keeps passes through bytes, as it would on a disk."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.kept: dict[int, bytes] = {}

    def clients(self) -> Set[int]:
        """All of them."""
        return frozenset(range(len(self.client.job.task.clients)))

    def ask(self, asks: Mapping[int, Ask], seconds: float) -> Iterable[Heard]:
        """Let one after the other answer."""
        for number, ask in asks.items():
            yield Heard(number, self.answer(number, ask))

    def answer(self, number: int, ask: Ask) -> Answer:
        """What one client answers."""
        before = self.kept.get(number)
        kept = ClientStore.load(before, self.client.first) if before else None
        answer, kept = self.client.answer(number, ask, kept)
        self.kept[number] = kept.dump(self.client.first)
        return answer
