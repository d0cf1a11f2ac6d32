"""Messages in Flower's records: packing is inverted by unpacking, and other records are refused."""

from __future__ import annotations

import pytest

from thinwire.errors import WireError
from thinwire.flower.grid_transport import INLINE, GridTransport, Task, pack, unpack
from thinwire.flower.policy import Deadline
from thinwire.flower.records import dump
from thinwire.flower.sites import Admission, Node, Software
from thinwire.protocol.round import Request, Response
from thinwire.training.evaluation import Evaluation

flwr = pytest.importorskip("flwr.app")


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE, INLINE + 1])
@pytest.mark.parametrize("evaluation", [None, Evaluation(0.5, 0.25, {"f1": 0.75}, 9), Evaluation(2.0, None, {}, 1)])
def test_an_answer_is_what_was_sent(size, evaluation):
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    sent = Response(data, 0.5, 12, evaluation=evaluation)
    records = pack(sent)
    assert unpack(Response, records) == sent
    assert isinstance(records["thinwire"], flwr.ArrayRecord if size >= INLINE else flwr.ConfigRecord)


def config(**fields) -> flwr.RecordDict:
    return flwr.RecordDict({"thinwire": flwr.ConfigRecord(fields)})


TASK = dump(Task("0" * 16, 1, 0, "", b"x"))
OTHER = {
    "nothing": flwr.RecordDict(),
    "metrics": flwr.RecordDict({"thinwire": flwr.MetricRecord({"data": 1})}),
    "no data": config(client=1),
    "text": config(data="text"),
    "no safetensors": config(data=b"text"),
    "half": config(data=TASK[:-1]),
    "another record": config(data=dump(Request(b"x"))),
    "a text": config(data=dump(Task("0" * 16, "1", 0, "", b"x"))),
    "a truth": config(data=dump(Task("0" * 16, True, 0, "", b"x"))),
    "below zero": config(data=dump(Task("0" * 16, 1, -1, "", b"x"))),
    "data that are not there": config(data=dump(Task("0" * 16, 1, 0, "", "/elsewhere"))),
    "nested": config(data=dump(Task("0" * 16, [1], 0, "", b"x"))),
}


@pytest.mark.parametrize("records", OTHER.values(), ids=OTHER.keys())
def test_other_records_are_refused(records):
    assert unpack(Task, config(data=TASK)).client == 1
    with pytest.raises(WireError):
        unpack(Task, records)


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": 1.5},
        {"loss": "low"},
        {"loss": float("nan")},
        {"evaluation": Evaluation(0.5, 0.5, {"f1": "high"}, 9)},
        {"evaluation": Evaluation(0.5, 0.5, {"f1": float("inf")}, 9)},
        {"evaluation": Evaluation(0.5, 0.5, "f1", 9)},
        {"evaluation": Evaluation(0.5, 0.5, {}, -1)},
    ],
)
def test_an_answer_with_other_values_is_refused(wrong):
    with pytest.raises(WireError):
        unpack(Response, pack(Response(b"", 0.5, 12)._replace(**wrong)))


@pytest.fixture
def identity(monkeypatch):
    """Messages are made in a process of Flower."""
    known = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(known, name, 1)


class Grid:
    """Messages of Flower in memory. `script` has the clients that respond before each pull."""

    def __init__(self, *script: set[int]) -> None:
        self.script, self.sent, self.replies, self.count = list(script), {}, [], 0

    def push_messages(self, messages):
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"message {self.count}"
            self.sent[message.metadata.message_id] = message
            yield message.metadata.message_id

    def pull_messages(self, ids):
        for client in self.script.pop(0) if self.script else ():
            request = next(one for one in self.sent.values() if unpack(Task, one.content).client == client)
            self.replies.append(flwr.Message(pack(Response(b"upload", 1.0, 1)), reply_to=request))
            del self.sent[request.metadata.message_id]
        found = [one for one in self.replies if one.metadata.reply_to_message_id in ids]
        self.replies = [one for one in self.replies if one not in found]
        return found


def transport_of(grid: Grid) -> GridTransport:
    transport = GridTransport(grid, lambda: "run", Admission(Software(b"", "1"), 3, None, print), poll=0.0)
    transport.admission.nodes = {10 + i: Node(frozenset({i})) for i in range(3)}
    return transport


def sent(transport: GridTransport, clients: set[int], until: int) -> list[int]:
    """The clients whose responses arrive before the deadline is brought forward, which is at this number of them."""
    deadline, seen = Deadline(60.0), []
    transport.send({i: Request(b"download") for i in clients}, 60.0)
    for client, response in transport.receive(clients, deadline):
        assert response == Response(b"upload", 1.0, 1)
        seen.append(client)
        if len(seen) == until:
            deadline.at_most(0.0)
    return seen


def test_a_late_response_comes_later_unless_its_client_is_asked_again(identity):
    transport = transport_of(Grid({0}, {1}, {2}, {1}))
    assert sent(transport, {0, 1, 2}, 1) == [0]
    assert sorted(client for client, *_ in transport.sent.values()) == [1, 2]
    assert sent(transport, {1}, 9) == [2, 1], "of client 1 the response to the new request"
    assert not transport.sent


def test_responses_that_arrive_together_are_kept_when_the_round_is_closed_between_them(identity):
    transport = transport_of(Grid({0, 1}, {2}))
    transport.send({i: Request(b"download") for i in (0, 1)}, 60.0)
    received = transport.receive({0, 1}, Deadline(60.0))
    first, _ = next(received)
    received.close()
    assert sent(transport, {2}, 9) == [1 - first, 2]


def test_responses_are_waited_for_without_new_requests(identity):
    transport = transport_of(Grid({0}, set(), {1}, {2}))
    assert sent(transport, {0, 1, 2}, 1) == [0]
    assert [client for client, _ in transport.receive({0, 1, 2}, Deadline(60.0))] == [1, 2]
    assert not transport.sent
    assert list(transport.receive({0, 1, 2}, Deadline(60.0))) == []


def test_requests_may_be_sent_while_responses_are_received(identity):
    transport = transport_of(Grid({0}, {1}, {0}))
    seen = []
    transport.send({0: Request(b"one"), 1: Request(b"one")}, 60.0)
    for client, _ in transport.receive({0, 1}, Deadline(60.0)):
        seen.append(client)
        if seen == [0]:
            transport.send({0: Request(b"two")}, 60.0)
    assert seen == [0, 1, 0]
