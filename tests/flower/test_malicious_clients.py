"""Malicious clients of a server: the run continues, states stay finite, the uploads of the others count.

Every attack is well formed: decoded, changed, encoded again by the method's own codec, with a valid checksum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.federation import digits_task, perceptron
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.core.registry import entries
from thinwire.core.tree import Tree, all_finite, tmap
from thinwire.errors import IncompatibleParts, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.standing import Standing
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.protocol.method import Method
from thinwire.protocol.round import Response
from thinwire.protocol.upload import raw, unraw
from thinwire.runs.config import update
from thinwire.runs.parts import build
from thinwire.runs.presets import join, named_methods
from thinwire.schedules.base import Plan
from thinwire.training import Local
from thinwire.wire import message as wire
from thinwire.wire.message import pack_weight

MALICIOUS, CLIENTS = 3, 5
LARGEST = torch.finfo(torch.float32).max


def filled(value: float) -> Callable[[Tree], Tree]:
    return lambda tree: tmap(lambda block: torch.full_like(block, value), tree)


def times(factor: float) -> Callable[[Tree], Tree]:
    return lambda tree: tmap(lambda block: (block.double() * factor).clamp(-LARGEST, LARGEST).to(block.dtype), tree)


FIELDS = {  # name: the field of the upload, and the change of its values
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
    "1e30 examples": {"examples": 10**30},
}
MESSAGES = ("another client's message", "the last round's message", "half a message", "no message")
ATTACKS = (*FIELDS, *WEIGHTS, *METRICS, *MESSAGES)
HARMLESS = {"report of 1/2": "scaffold"}  # small values are within the bounds


class Malicious(InMemory):
    """Clients of which one is malicious: it sends another attack in each round."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.attack = ""
        self.sent = False
        self.before = b""

    def receive(self, clients, deadline):
        responses = dict(super().receive(clients, deadline))
        honest, self.sent = responses.get(MALICIOUS), False
        if honest is not None and honest.data and self.attack:
            responses[MALICIOUS] = self.corrupted(honest, responses)
        yield from responses.items()
        if honest is not None:
            self.before = honest.data

    def corrupted(self, honest: Response, responses: dict[int, Response]) -> Response:
        self.sent = True
        if self.attack in METRICS:
            return honest._replace(**METRICS[self.attack])
        if self.attack in MESSAGES:
            whole = {"another client's message": responses[0].data, "the last round's message": self.before}
            return honest._replace(
                data=whole.get(self.attack, honest.data[: len(honest.data) // 2 * ("half" in self.attack)])
            )
        schema = self.client.contract.schema.sent_by(MALICIOUS)
        message = wire.unpack(honest.data, schema)
        body = wire.unpack_body(message.bodies[0], schema)
        field, payload = self.payload(message.version, body)
        self.sent = field in body.fields and bool(payload)
        packed = wire.pack_body(wire.Body(body.plan, {**body.fields, field: payload}), schema)
        return honest._replace(data=wire.pack(wire.UP, message.version, [packed], schema)) if self.sent else honest

    def payload(self, version: int, body: wire.Body) -> tuple[int, bytes]:
        """The field that is replaced, and its bytes; empty if the method does not have it."""
        if self.attack in WEIGHTS:
            return wire.WEIGHT, pack_weight(WEIGHTS[self.attack])
        field, change = FIELDS[self.attack]
        if field not in body.fields:
            return field, b""
        contract = self.client.contract.at(version)
        if field == wire.COORDS:
            planned = contract.coords.restrict(contract.coords.named if body.plan is None else body.plan)
            spec, peer = contract.method.sketch.spec(planned), contract.peer(version, MALICIOUS)
            up = contract.up(MALICIOUS)
            tree = up.decode(body.fields[field], spec, peer)
            try:
                return field, up.encode(change(tree), up.init(spec), peer)[0]
            except WireError:  # this codec cannot encode such values
                return field, b""
        names = frozenset(contract.coords.names) if body.plan is None else body.plan
        spec = {wire.SHARED: contract.report, wire.BUFFERS: contract.buffers}.get(field)
        spec = contract.sent(Plan(names)).report if spec is None else spec
        return field, raw(change(unraw(body.fields[field], spec)))


METHODS = ["fedavg", "mapo", "scaffold", "fednova", "fedadam", "fedlama", "ef+topk+int4", "lora", "evofed"]
AGGREGATORS = list(entries("aggregator"))


def federation(name: str, aggregator: str) -> tuple[FlowerServer, Malicious, list[str]]:
    method = update(Method(), join(named_methods(name), "digits").get("method", {}))
    method = replace(method, aggregator=build("aggregator", aggregator, "method.aggregator"))
    task = digits_task(perceptron(norm=name in ("fedavg", "fedadam")), sizes=(30, 24, 18, 30, 24))
    engine = Engine("cpu", "loop", 1)
    job = Job(task, method, rounds=len(ATTACKS) + 1, cohort=CLIENTS, local=Local(batch=8, steps=2), eval_every=1000)
    transport, lines = Malicious(Client(engine, job)), []
    return (
        FlowerServer(engine, job, transport, RoundPolicy(0.01, quorum=0.5, tries=1), lines.append),
        transport,
        lines,
    )


def attacked(name: str, aggregator: str) -> int:
    """Send every attack to a server of this method; the number of attacks that it can express."""
    server, transport, lines = federation(name, aggregator)
    state, _ = server.round(server.start())
    sent = 0
    for attack in ATTACKS:
        transport.attack = attack
        del lines[:]
        state = state._replace(standing=Standing())  # else it is left out, see tests/federation
        state, record = server.round(state)
        after = state.server
        trees = (*after.public[1:], *after.opt.values(), after.correction, after.schedule, after.codec)
        assert all(map(all_finite, trees)), attack
        assert record.clients + record.refused == CLIENTS, (attack, record)
        assert record.clients >= CLIENTS - 1, attack
        if transport.sent and HARMLESS.get(attack) != name:
            sent += 1
            assert record.refused + record.bounded >= 1, f"{name}, {aggregator}: {attack} is in no record"
            assert any(f"client {MALICIOUS}" in line for line in lines), attack
        assert record.loss < 1e4, (attack, record.loss)
    transport.attack, state = "", state._replace(standing=Standing())
    state, record = server.round(state)
    assert (record.clients, record.refused) == (CLIENTS, 0), "a client is accepted again when its upload is valid"
    return sent


# each method and each aggregator once; all of them together are slow
PAIRS = list(zip(METHODS, itertools.cycle(AGGREGATORS)))


@pytest.mark.parametrize(
    ("method", "aggregator"),
    [pytest.param(*pair, marks=pytest.mark.slow) if i % 2 else pair for i, pair in enumerate(PAIRS)],
)
def test_a_malicious_client_neither_stops_nor_poisons_a_run(method, aggregator):
    assert attacked(method, aggregator) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", AGGREGATORS)
@pytest.mark.parametrize("method", METHODS)
def test_every_attack_on_every_method_and_aggregator(method, aggregator):
    try:
        expressed = attacked(method, aggregator)
    except IncompatibleParts as error:
        pytest.skip(str(error))
    assert expressed >= 20


@pytest.mark.parametrize(("method", "norm_bound"), [("fedavg", 10.0), ("fedadam", 10.0), ("fedadam", 0.0)])
def test_the_whole_next_state_is_checked(method, norm_bound):
    """The client is refused by its norm; without a bound, because the largest floats overflow the next state."""
    server, transport, lines = federation(method, "weighted")
    job = replace(server.job, method=replace(server.job.method, norm_bound=norm_bound))
    transport = Malicious(Client(server.engine, job))
    server = FlowerServer(server.engine, job, transport, RoundPolicy(0.01), lines.append)
    state, _ = server.round(server.start())
    transport.attack = "change of the largest floats"
    state, record = server.round(state)
    assert (record.clients, record.refused, record.bounded) == (4, 1, 0)
    assert ("more than of any honest client" if norm_bound else "is not finite with it") in lines[-1]
    assert all(map(all_finite, state.server.opt.values()))
    transport.attack = ""
    for _ in range(3):
        state, record = server.round(state)
    assert (record.clients, record.refused, record.bounded) == (5, 0, 0)
