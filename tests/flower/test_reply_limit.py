"""Replies that are too long are refused by Flower's own client before their bodies are read."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse

from thinwire.flower.grid_transport import GridTransport, pack
from thinwire.flower.node import limit_replies
from thinwire.flower.policy import TOO_LONG, Deadline
from thinwire.flower.sites import Admission, Node, Software
from thinwire.protocol.round import Request, Response

LONGEST = 3_000_000
SOFTWARE = Software(b"", "1")


class SuperLink(BaseHTTPRequestHandler):
    """Serves replies as a SuperLink does, and notes what was read of them."""

    replies: dict = {}  # noqa: RUF012 - by the id of their request: (proto, tree, objects)
    objects: dict = {}  # noqa: RUF012
    served: list = []  # noqa: RUF012
    confirmed: list = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("pull-messages"):
            found, type(self).replies = self.replies, {}
            answer = PullAppMessagesResponse(
                messages_list=[proto for proto, _ in found.values()],
                message_object_trees=[tree for _, tree in found.values()],
            )
        elif self.path.endswith("pull-object"):
            content = self.objects[PullObjectRequest.FromString(body).object_id]
            answer = PullObjectResponse(object_found=True, object_available=bool(content), object_content=content)
        else:
            self.confirmed.append(self.path)
            answer = ConfirmMessageReceivedResponse()
        data = answer.SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/protobuf")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        try:
            for start in range(0, len(data), 1 << 16):
                self.wfile.write(data[start : start + (1 << 16)])
                self.served.append(min(1 << 16, len(data) - start))
        except OSError:  # the client has closed the connection
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def grid(monkeypatch):
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid.http_grid import HttpGrid

    for name in ("_task_id", "_run_id", "_node_id"):  # that Flower gives to the process of a server
        monkeypatch.setattr(TaskIdentity, name, 1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), SuperLink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    SuperLink.replies, SuperLink.objects, SuperLink.served, SuperLink.confirmed = {}, {}, [], []
    found = HttpGrid(f"127.0.0.1:{server.server_port}", insecure=True, token="x")
    found.set_run(Run.create_empty(1))
    yield found
    found._disconnect()
    server.shutdown()
    server.server_close()


def reply(content, request: str) -> None:
    """Store a reply in the SuperLink."""
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    message = Message(content, dst_node_id=1, message_type="train")
    message.metadata.__dict__["_reply_to_message_id"] = request
    message.metadata.__dict__["_message_id"] = message.object_id
    SuperLink.objects |= {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    SuperLink.replies[request] = message_to_proto(remove_content_from_message(message)), get_object_tree(message)


@pytest.mark.parametrize("size", [80_000_000, 4_000_000], ids=["in chunks", "in one object"])
def test_a_long_reply_is_refused_before_it_is_loaded(grid, size):
    assert limit_replies(grid, LONGEST, 60.0)
    reply(pack(Response(bytes(size), 1.0, 3)), "long")
    reply(pack(Response(b"short", 1.0, 3)), "short")
    transport = GridTransport(grid, lambda: "run", Admission(SOFTWARE, 2, None, print))
    transport.admission.nodes = {1: Node(frozenset({0, 1}))}
    ids = iter(["long", "short"])
    grid.push_messages = lambda messages: [next(ids)]
    transport.send({0: Request(b""), 1: Request(b"")}, 60.0)
    found = dict(transport.receive({0, 1}, Deadline(60.0)))
    assert found[0].error.startswith(TOO_LONG)
    assert not found[0].data
    assert found[1].data == b"short"
    assert sum(SuperLink.served) < size / 2 + 10_000_000, "the rest was not read"
    assert len(SuperLink.confirmed) == 2, "the SuperLink deletes both"


def test_a_reply_whose_objects_do_not_arrive_is_given_up(grid):
    lines: list[str] = []
    assert limit_replies(grid, LONGEST, 0.01)
    reply(pack(Response(b"announced")), "announced")
    SuperLink.objects = dict.fromkeys(SuperLink.objects, b"")
    transport = GridTransport(grid, lambda: "run", Admission(SOFTWARE, 1, None, lines.append))
    transport.admission.nodes = {1: Node(frozenset({0}))}
    grid.push_messages = lambda messages: ["announced"]
    transport.send({0: Request(b"")}, 60.0)
    assert not list(transport.receive({0}, Deadline(60.0)))
    assert "client 0 did not respond" in lines[0]
    assert "had not arrived" in lines[0]


def test_a_grid_without_an_http_client_is_named_in_the_log():
    lines: list[str] = []
    assert not limit_replies(object(), LONGEST, 60.0, lines.append)
    assert "before their length can be checked" in lines[0]
