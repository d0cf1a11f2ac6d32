"""Nodes that are slow, silent or malformed when they are asked what they are: they delay nobody and are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from flwr import app as flwr

from tests.flower.test_flower_apps import identity  # noqa: F401 - a fixture
from thinwire.flower import grid_transport
from thinwire.flower.grid_transport import GridTransport, pack, unpack
from thinwire.flower.sites import Software

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
            (refusal,), _ = unpack(message.content, refusal=str)
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
    return GridTransport(Answers(replies), lambda: "0" * 16, OURS, 4, 0.0, lines.append), lines


def hello(*clients, **changes):
    return pack({**OURS._asdict(), "clients": list(clients), **changes})


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
    monkeypatch.setattr(grid_transport, "HELLO_SECONDS", -1.0)
    assert nodes.clients() == {0}
    assert nodes.admission.put_off.keys() == {2}
    monkeypatch.setattr(grid_transport, "HELLO_SECONDS", 120.0)
    del nodes.grid.replies[1]
    assert nodes.clients() == set()
    assert lines == ["node 2 did not report its clients in -1 seconds"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (flwr.RecordDict(), "the record 'thinwire' is missing"),
        (pack({}), "it runs thinwire of an unknown version"),
        (hello(1, schema="text"), "field 'schema' is str, expected bytes"),
        (hello(1, version=3), "field 'version' is int, expected str"),
        (hello(1, app=3), "field 'app' is int, expected str"),
        (hello(1, clients=1), "field 'clients' is int, expected list"),
        (hello(1, signature="x"), "field 'signature' is str, expected bytes"),
        (hello(1, clients=["a"]), "it reports clients ['a'], there are 4"),
        (hello(1, site="\x1b[31m", version="0.9"), "it runs thinwire 0.9, the server 1.2"),
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
    nodes, lines = transport({1: pack({"refusal": "it runs only\nits own app"}), 2: pack({"error": "no data"})})
    assert nodes.clients() == set()
    assert sorted(lines) == [
        "node 1 is not used: it runs only\\nits own app",
        "node 2 could not report its clients: no data",
    ]
    assert (nodes.admission.refused, nodes.admission.put_off.keys()) == ({1}, {2})
    assert nodes.grid.told == []
