"""Nodes that are slow, silent or malformed when they are asked what they are: they delay nobody and are refused."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("flwr")

from flwr import app as flwr

from tests.flower.test_flower_apps import identity  # noqa: F401 - a fixture
from thinwire.flower import grid_transport
from thinwire.flower.grid_transport import GridTransport, Question, pack, unpack
from thinwire.flower.sites import Admission, Report, Software

OURS = Software(b"schema", "1.2")


class Answers:
    """A grid whose nodes give the replies of a table: None for no reply yet."""

    def __init__(self, replies: dict) -> None:
        self.replies, self.waiting, self.told = replies, {}, []

    def get_node_ids(self):
        return list(self.replies)

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            refusal = unpack(Question, message.content).refusal
            if refusal:
                self.told.append((message.metadata.dst_node_id, refusal))
            else:
                self.waiting[message.object_id] = message
        return [message.object_id for message in messages]

    def pull_messages(self, names):
        found = []
        for name in names:
            message = self.waiting.get(name)
            if message is None:
                continue
            if (reply := self.replies.get(message.metadata.dst_node_id)) is not None:
                del self.waiting[name]
                found.append(flwr.Message(reply, reply_to=message))
        return found


def transport(replies):
    lines: list[str] = []
    return GridTransport(Answers(replies), lambda: "0" * 16, Admission(OURS, 4, None, lines.append), 0.0), lines


def hello(*clients, **software):
    return pack(Report(OURS._replace(**software), clients))


def test_slow_node_is_used_when_it_has_responded(monkeypatch):
    monkeypatch.setattr(grid_transport, "JOIN_SECONDS", 0.0)
    nodes, lines = transport({1: hello(0), 2: None, 3: hello(2, 3)})
    assert nodes.clients() == {0, 2, 3}
    assert nodes.clients() == {0, 2, 3}
    assert len(nodes.grid.waiting) == 1  # it was asked once
    nodes.grid.replies[2] = hello(1)
    assert nodes.clients() == {0, 1, 2, 3}
    assert lines == []


def test_silent_node_is_asked_later(monkeypatch):
    monkeypatch.setattr(grid_transport, "JOIN_SECONDS", 0.0)
    nodes, lines = transport({1: hello(0), 2: None})
    assert nodes.clients() == {0}
    assert nodes.clients() == {0}
    assert len(nodes.grid.waiting) == 1
    nodes.admission.nodes[2].ask_at = 0.0  # two minutes later
    assert nodes.clients() == {0}
    assert lines == ["node 2 did not report its clients in 120 seconds"]
    assert len(nodes.grid.waiting) == 2, "it was asked again"
    nodes.grid.replies[2] = hello(1)
    assert nodes.clients() == {0, 1}
    assert list(nodes.asked) == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (flwr.RecordDict(), "the record 'thinwire' is missing"),
        (pack(Report(clients=(1,))), "it runs thinwire of an unknown version"),
        (hello(), "it reports clients [], there are 4"),
        (hello(1, version=3), "it is not a valid Report: it holds 3, expected str"),
        (hello(1, schema="text"), "it is not a valid Report: 'text'"),
        (hello("a"), "it holds 'a', expected int"),
        (hello(-1), "it holds -1, expected int"),
        (hello(True), "it holds True, expected int"),
        (pack(Question("0" * 16)), "it is not a valid Report: "),
        (flwr.RecordDict({"thinwire": flwr.ConfigRecord({"data": b"{" * 100})}), "it is not a valid Report: "),
        (hello(1, version="\x1b[31m"), "it runs thinwire \\x1b[31m, the server 1.2"),
    ],
)
def test_malformed_report_is_refused_and_the_node_is_told(reply, words):
    nodes, lines = transport({1: hello(0), 2: reply})
    assert nodes.clients() == {0}
    (line,) = lines
    assert line.startswith("node 2 is not used: ")
    assert words in line
    assert nodes.clients() == {0}
    assert [(node, text in line) for node, text in nodes.grid.told] == [(2, True)]


def test_node_may_refuse_or_report_an_error():
    nodes, lines = transport({1: pack(Report(refusal="it runs only\nits own app")), 2: pack(Report(error="no data"))})
    assert nodes.clients() == set()
    assert sorted(lines) == [
        "node 1 is not used: it runs only\\nits own app",
        "node 2 could not report its clients: no data",
    ]
    assert nodes.admission.nodes[1].ask_at == math.inf > nodes.admission.nodes[2].ask_at > 0
    assert nodes.grid.told == []
