"""Clients that lie, through the server's real loop: nothing stops, nothing becomes non-finite, honest uploads count.

Every lie is well formed: decoded, changed, encoded again by the method's own codec, with a checksum that fits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.federation import digits_task, perceptron
from thinwire.core.registry import entries
from thinwire.core.tree import Tree, all_finite, tmap
from thinwire.errors import WireError
from thinwire.experiments.combine import join, named
from thinwire.experiments.config import method_from
from thinwire.experiments.parts import build
from thinwire.flower.client import Client
from thinwire.flower.client_store import Answer
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import Heard, InMemory
from thinwire.protocol.fields import noted as schedule_report
from thinwire.protocol.fields import raw, unraw
from thinwire.runtime.job import Job
from thinwire.schedules.base import Plan
from thinwire.simulation.engine import LocalEngine
from thinwire.training import Local
from thinwire.wire import message as wire

LIAR, CLIENTS = 3, 5
LARGEST = torch.finfo(torch.float32).max


def filled(value: float) -> Callable[[Tree], Tree]:
    return lambda tree: tmap(lambda block: torch.full_like(block, value), tree)


def times(factor: float) -> Callable[[Tree], Tree]:
    return lambda tree: tmap(lambda block: (block.double() * factor).clamp(-LARGEST, LARGEST).to(block.dtype), tree)


FIELDS = {  # name: the field of the upload, and what becomes of its values
    "change of the largest floats": (wire.COORDS, filled(LARGEST)),
    "change of 1e30": (wire.COORDS, filled(1e30)),
    "change of 1e25": (wire.COORDS, filled(1e25)),
    "change of -1e20": (wire.COORDS, filled(-1e20)),
    "change of 1e15": (wire.COORDS, filled(1e15)),
    "change of -1e10": (wire.COORDS, filled(-1e10)),
    "change of 1e5": (wire.COORDS, filled(1e5)),
    "change a million times": (wire.COORDS, times(-1e6)),
    "change of NaN": (wire.COORDS, filled(torch.nan)),
    "change of infinity": (wire.COORDS, filled(torch.inf)),
    "report ten billion times": (wire.SHARED, times(1e10)),
    "report of the largest floats": (wire.SHARED, filled(LARGEST)),
    "report of 1/2": (wire.SHARED, filled(0.5)),
    "report of NaN": (wire.SHARED, filled(torch.nan)),
    "sizes below 0": (wire.REPORT, filled(-1.0)),
    "sizes of 1e30": (wire.REPORT, filled(1e30)),
    "buffers of 1e30": (wire.BUFFERS, filled(1e30)),
    "buffers below 0": (wire.BUFFERS, filled(-1.0)),
    "buffers of NaN": (wire.BUFFERS, filled(torch.nan)),
}
WEIGHTS = {"no weight": 0.0, "weight below 0": -1.0, "weight of NaN": torch.nan, "weight of 1e30": 1e30}
WEIGHTS |= {"weight of a billion examples": 1e9}
METRICS = {
    "loss of NaN": {"loss": torch.nan},
    "loss of 1e300": {"loss": 1e300},
    "no examples": {"examples": 0},
    "a trillion examples": {"examples": 10**12},
    "endless examples": {"examples": 10**30},
}
MESSAGES = ("another client's message", "the message of the round before", "half a message", "no message")
LIES = (*FIELDS, *WEIGHTS, *METRICS, *MESSAGES)
HARMLESS = {"report of 1/2": "scaffold"}  # small values are not far from anything


class Lying(InMemory):
    """Clients of which one tells another lie in each round."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.lie = ""
        self.told = False
        self.before = b""

    def ask(self, asks, seconds):
        answers = {number: self.upload(number, ask) for number, ask in asks.items()}
        honest, self.told = answers.get(LIAR), False
        if honest is not None and honest.data and self.lie:
            answers[LIAR] = self.spoilt(honest, answers)
        for number, answer in answers.items():
            yield Heard(number, answer)
        if honest is not None:
            self.before = honest.data

    def spoilt(self, honest: Answer, answers: dict[int, Answer]) -> Answer:
        self.told = True
        if self.lie in METRICS:
            return honest._replace(**METRICS[self.lie])
        if self.lie in MESSAGES:
            whole = {"another client's message": answers[0].data, "the message of the round before": self.before}
            return honest._replace(
                data=whole.get(self.lie, honest.data[: len(honest.data) // 2 * ("half" in self.lie)])
            )
        schema = self.client.contract.schema.sent_by(LIAR)
        message = wire.unpack(honest.data, schema)
        body = wire.unpack_body(message.bodies[0], schema)
        field, payload = self.payload(message.version, body)
        self.told = field in body.fields and bool(payload)
        packed = wire.pack_body(wire.Body(body.plan, {**body.fields, field: payload}), schema)
        return honest._replace(data=wire.pack(wire.UP, message.version, [packed], schema)) if self.told else honest

    def payload(self, version: int, body: wire.Body) -> tuple[int, bytes]:
        """The field that is replaced, and its bytes; empty where the method does not have it."""
        if self.lie in WEIGHTS:
            return wire.WEIGHT, struct.pack("<f", WEIGHTS[self.lie])
        field, change = FIELDS[self.lie]
        if field not in body.fields:
            return field, b""
        contract = self.client.contract.at(version)
        if field == wire.COORDS:
            planned = contract.coords.restrict(contract.coords.named if body.plan is None else body.plan)
            spec, peer = contract.method.sketch.spec(planned), contract.peer(version, LIAR)
            up = contract.up(LIAR)
            tree = up.decode(body.fields[field], spec, peer)
            try:
                return field, up.encode(change(tree), up.init(spec), peer)[0]
            except WireError:  # no message of this codec has such values
                return field, b""
        names = frozenset(contract.coords.names) if body.plan is None else body.plan
        spec = {wire.SHARED: contract.report, wire.BUFFERS: contract.buffers}.get(field)
        spec = schedule_report(contract, Plan(names)) if spec is None else spec
        return field, raw(change(unraw(body.fields[field], spec)))


METHODS = ["fedavg", "mapo", "scaffold", "fednova", "fedadam", "fedlama", "ef+topk+int4", "lora", "evofed"]
AGGREGATORS = list(entries("aggregator"))


def federation(name: str, aggregator: str) -> tuple[FlowerServer, Lying, list[str]]:
    method = method_from(join(named(name), "digits").get("method", {}))
    method = replace(method, aggregator=build("aggregator", aggregator, "method.aggregator"))
    task = digits_task(perceptron(norm=name in ("fedavg", "fedadam")), sizes=(30, 24, 18, 30, 24))
    engine = LocalEngine("cpu", "loop", 1)
    job = Job(task, method, rounds=len(LIES) + 1, cohort=CLIENTS, local=Local(batch=8, steps=2), eval_every=1000)
    transport, lines = Lying(Client(engine, job)), []
    return (
        FlowerServer(engine, job, lambda *_: transport, RoundPolicy(0.01, quorum=0.5, tries=1), lines.append),
        transport,
        lines,
    )


def lied_to(name: str, aggregator: str) -> int:
    """Tell every lie to a federation of this method; gives how many of them it could be told."""
    served, transport, lines = federation(name, aggregator)
    state, _ = served.round(served.start())
    told = 0
    for lie in LIES:
        transport.lie = lie
        del lines[:]
        state, record = served.round(state)
        server = state.server
        trees = (*server.public[1:], server.opt, server.correction, server.schedule, server.codec)
        assert all(map(all_finite, trees)), lie
        assert record.clients + record.refused == CLIENTS, (lie, record)
        assert record.clients >= CLIENTS - 1, lie
        if transport.told and HARMLESS.get(lie) != name:
            told += 1
            assert record.refused + record.bounded >= 1, f"{name}, {aggregator}: {lie} is in no record"
            assert any(f"client {LIAR}" in line for line in lines), lie
        assert record.loss < 1e4, (lie, record.loss)
    transport.lie = ""
    state, record = served.round(state)
    assert (record.clients, record.refused) == (CLIENTS, 0), "the liar is heard again once it tells the truth"
    return told


# each method and each aggregator once; all of them together are slow
PAIRS = [(method, AGGREGATORS[i % len(AGGREGATORS)]) for i, method in enumerate(METHODS)]


@pytest.mark.parametrize(("method", "aggregator"), PAIRS)
def test_a_lying_client_neither_stops_nor_poisons_a_run(method, aggregator):
    assert lied_to(method, aggregator) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("method", METHODS)
def test_every_lie_in_every_method_under_every_aggregator(method, aggregator):
    assert lied_to(method, aggregator) >= 20


@pytest.mark.parametrize(("server", "norm_bound"), [("fedavg", 10.0), ("fedadam", 10.0), ("fedadam", 0.0)])
def test_the_whole_next_state_is_checked_before_it_counts(server, norm_bound):
    """Without a bound the largest floats overflow Adam's squares: their client is refused."""
    served, transport, lines = federation(server, "weighted")
    job = replace(served.job, method=replace(served.job.method, norm_bound=norm_bound))
    transport = Lying(Client(served.engine, job))
    served = FlowerServer(served.engine, job, lambda *_: transport, RoundPolicy(0.01), lines.append)
    state, _ = served.round(served.start())
    transport.lie = "change of the largest floats"
    state, record = served.round(state)
    assert (record.clients, record.refused, record.bounded) == ((5, 0, 1) if norm_bound else (4, 1, 0))
    assert all_finite(state.server.opt)
    transport.lie = ""
    for _ in range(3):
        state, record = served.round(state)
    assert (record.clients, record.refused, record.bounded) == (5, 0, 0)
