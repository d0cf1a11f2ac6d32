"""A federation of eight clients with secure aggregation in memory, whose messages can be lost in any phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from tests.flower.in_memory import FlowerServer, InMemory
from tests.flower.test_server import experiment
from thinwire.federation.job import Job
from thinwire.federation.settings import Settings
from thinwire.flower.client import Client, ClientStore
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.round import Request, Response
from thinwire.runs.build import build_job
from thinwire.secure import masks
from thinwire.secure.client import SecureClient, SecureStore
from thinwire.secure.keys import SiteKeys

EIGHT = {"task.clients": 8, "cohort.size": 8, "local.steps": 1, "eval.every": 99, "method.secure_aggregation": True}
Script = dict[tuple[int, str, int], str]  # version, phase and client: "request lost", "response lost"
Change = Callable[[int, Request, Response], Response]


class Lossy(InMemory):
    """A transport that loses messages by a script, and records all of them, as the server sees them."""

    def __init__(
        self, client: Client, script: Script | None = None, keys: Mapping[int, SiteKeys] | None = None
    ) -> None:
        super().__init__(client)
        self.script, self.keys = script or {}, keys or {}
        self.change: Change = lambda client, request, response: response
        self.seen: list[tuple[int, Request, Response]] = []
        self.stop: Callable[[str], bool] = lambda phase: False

    def receive(self, clients, deadline):
        while self.waiting:
            number = next(iter(self.waiting))
            request = self.waiting.pop(number)
            if self.stop(request.phase):
                raise KeyboardInterrupt  # the server is killed
            fault = self.script.get((int.from_bytes(request.data[18:22], "little"), request.phase, number), "")
            if fault == "request lost":
                continue
            response = self.respond(number, request)
            if fault != "response lost":
                response = self.change(number, request, response)
                self.seen.append((number, request, response))
                yield number, response

    def respond(self, number, request):
        if self.client.secure is not None:
            self.client.secure = self.secure(number)
        return super().respond(number, request)

    def secure(self, number: int) -> SecureClient:
        """The phases on a client, with the keys of its site."""
        return replace(self.client.secure, site_keys=self.keys.get(number))

    def kept(self, client: int) -> SecureStore:
        """What a client stores of secure aggregation."""
        return ClientStore.load(self.stored[client], self.client.first).secure

    def sent(self, phase: str) -> dict[int, bytes]:
        """The newest messages that the server received in a phase, by client."""
        return {client: response.data for client, request, response in self.seen if request.phase == phase}


@cache
def prepared(method: str, overrides: tuple) -> tuple[Settings, Job, Client]:
    """Settings, job and client; they do not change."""
    chosen = experiment(method, **{**EIGHT, **dict(overrides)})
    job = build_job(chosen)
    return chosen, job, Client(chosen.engine, job)


class Setup:
    """A server, its transport and its log."""

    def __init__(
        self,
        method: str = "fedavg",
        script: Script | None = None,
        policy: RoundPolicy | None = None,
        keys=None,
        **overrides,
    ):
        self.chosen, self.job, client = prepared(method, tuple(overrides.items()))
        self.transport, self.lines = Lossy(client, script, keys), []
        self.policy = policy or RoundPolicy(seconds=0.01, tries=1)
        self.server = self.restarted()

    def restarted(self) -> FlowerServer:
        """A new server process with the same clients."""
        return FlowerServer(self.chosen.engine, self.job, self.transport, self.policy, self.lines.append)

    @property
    def log(self) -> str:
        """All lines of the log."""
        return "\n".join(self.lines)


def record_words(monkeypatch) -> tuple[dict[tuple[int, int], np.ndarray], list[np.ndarray]]:
    """The plain integers of each client, by version and client, and the sums that the server gets."""
    words: dict[tuple[int, int], np.ndarray] = {}
    sums: list[np.ndarray] = []
    hide, reveal = masks.hide, masks.reveal

    def recorded(values, client, *rest):
        words[rest[1], client] = values
        return hide(values, client, *rest)

    def summed(messages, count):
        total, weight = reveal(messages, count)
        sums.append(total)
        return total, weight

    monkeypatch.setattr(masks, "hide", recorded)
    monkeypatch.setattr(masks, "reveal", summed)
    return words, sums


def plain_sum(words, version: int, clients) -> np.ndarray:
    """The sum of the values of some clients, without masks."""
    return np.sum([words[version, client] for client in clients], axis=0)[:-6]
