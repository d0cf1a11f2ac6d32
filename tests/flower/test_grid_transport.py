"""Messages in Flower's records: packing is inverted by unpacking, and other records are refused."""

from __future__ import annotations

import pytest

from thinwire.errors import WireError
from thinwire.flower.grid_transport import (
    INLINE,
    MOST_METRICS,
    GridTransport,
    pack,
    read_response,
    response_fields,
    unpack,
)
from thinwire.flower.sites import Software
from thinwire.flower.transport import Deadline
from thinwire.protocol.round import Request, Response
from thinwire.training.evaluation import Evaluation

flwr = pytest.importorskip("flwr.app")


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE, INLINE + 1])
def test_unpack_inverts_pack(size):
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    (client, error), got = unpack(pack({"client": 3, "error": ""}, data), client=int, error=str)
    assert (client, error, got) == (3, "", data)


def test_long_messages_are_in_an_array():
    assert "thinwire-data" in pack({}, b"x" * (INLINE + 1))
    assert "thinwire-data" not in pack({}, b"x" * INLINE)


@pytest.mark.parametrize(
    "records",
    [
        flwr.RecordDict(),
        flwr.RecordDict({"thinwire": flwr.MetricRecord({"client": 1})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": "1"})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": True})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"client": 1, "data": "text"})}),
        flwr.RecordDict({"thinwire": flwr.ConfigRecord({"data": b"no client"})}),
    ],
)
def test_other_records_are_refused(records):
    with pytest.raises(WireError):
        unpack(records, client=int)


@pytest.mark.parametrize(
    "evaluation",
    [None, Evaluation(0.5, 0.25, {"f1": 0.75, "auc": float("inf")}, 9), Evaluation(2.0, None, {}, 1)],
)
def test_a_response_is_what_was_sent(evaluation):
    sent = Response(b"upload", 0.5, 12, evaluation=evaluation)
    assert read_response(3, pack(response_fields(3, sent), sent.data)) == sent


@pytest.mark.parametrize(
    "wrong",
    [
        {"eval-examples": 1.5},
        {"eval-loss": "low"},
        {"metric-names": ["f1"], "metric-values": [1.0, 2.0]},
        {"metric-names": ["f1"], "metric-values": ["high"]},
        {"metric-names": "f1"},
        {"metric-names": [str(i) for i in range(MOST_METRICS + 1)], "metric-values": [0.5] * (MOST_METRICS + 1)},
    ],
)
def test_an_evaluation_of_another_form_is_refused(wrong):
    fields = response_fields(3, Response(b"", 0.5, 12, evaluation=Evaluation(0.5, 0.5, {}, 9)))
    with pytest.raises(WireError):
        read_response(3, pack({**fields, **wrong}))


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
            request = next(one for one in self.sent.values() if one.content["thinwire"]["client"] == client)
            fields = {"client": client, "loss": 1.0, "examples": 1}
            self.replies.append(flwr.Message(pack(fields, b"upload"), reply_to=request))
            del self.sent[request.metadata.message_id]
        found = [one for one in self.replies if one.metadata.reply_to_message_id in ids]
        self.replies = [one for one in self.replies if one not in found]
        return found


def exchanged(transport: GridTransport, clients: set[int], until: int) -> list[int]:
    """The clients whose responses arrive before the deadline is brought forward, which is at this number of them."""
    deadline, seen = Deadline(60.0), []
    for one in transport.exchange({i: Request(b"download") for i in clients}, deadline):
        seen.append(one.client)
        if len(seen) == until:
            deadline.at_most(0.0)
    return seen


def test_a_late_response_is_in_a_later_exchange_unless_its_client_is_asked_again(identity):
    grid = Grid({0}, {1}, {2}, {1})
    transport = GridTransport(grid, lambda: "run", Software(b"", "1"), 3, poll=0.0)
    transport.admission.serves = {10 + i: frozenset({i}) for i in range(3)}
    assert exchanged(transport, {0, 1, 2}, 1) == [0]
    assert sorted(client for client, _ in transport.late.values()) == [1, 2]
    assert exchanged(transport, {1}, 9) == [2, 1], "of client 1 the response to the new request"
    assert not transport.late


def test_responses_that_arrive_together_are_kept_when_the_round_is_closed_between_them(identity):
    grid = Grid({0, 1}, {2})
    transport = GridTransport(grid, lambda: "run", Software(b"", "1"), 3, poll=0.0)
    transport.admission.serves = {10 + i: frozenset({i}) for i in range(3)}
    exchange = transport.exchange({i: Request(b"download") for i in (0, 1)}, Deadline(60.0))
    first = next(iter(exchange)).client
    exchange.close()
    assert exchanged(transport, {2}, 9) == [1 - first, 2]


def test_remaining_responses_are_waited_for_without_new_requests(identity):
    grid = Grid({0}, set(), {1}, {2})
    transport = GridTransport(grid, lambda: "run", Software(b"", "1"), 3, poll=0.0)
    transport.admission.serves = {10 + i: frozenset({i}) for i in range(3)}
    assert exchanged(transport, {0, 1, 2}, 1) == [0]
    assert [one.client for one in transport.remaining(Deadline(60.0))] == [1, 2]
    assert not transport.late
    assert list(transport.remaining(Deadline(60.0))) == []
