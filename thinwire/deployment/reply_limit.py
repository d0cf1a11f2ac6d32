"""The length of replies is refused before they are loaded into the memory of the server.

A reply waits in the SuperLink as objects: a record of fields, and the chunks of a long message. The server is sent a
list of the objects of each reply, and pulls them one by one over HTTP. Here the header `Content-Length` of each is read
before its body is; if the objects of one reply together are longer than any upload, the rest is not pulled, the
SuperLink is told to delete the reply, and the server treats it as refused. A reply that was announced, but whose
objects do not arrive, is given up after the time that a client has to respond; Flower alone would wait for two hours.

This needs Flower's HTTP client, which is not part of its public interface. Without it, replies are checked after they
were loaded, and the log says so once. What a node can store in the SuperLink is limited by a proxy in front of it, such
as `client_max_body_size` of nginx for each object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from thinwire.errors import WireError
from thinwire.flower.transport import TOO_LONG
from thinwire.protocol.contract import Contract

SPARE = 1_000_000  # bytes of the other fields of a reply
SHORT = 1000  # bytes: an answer without an object is shorter
LONGEST_LIST = 32_000_000  # bytes of the list of replies and their objects; an error of an app is in it


def longest_reply(contract: Contract) -> int:
    """The largest number of bytes of a reply: an upload of any stage, and other fields."""
    return max(stage.longest_up for stage in contract.stages) + SPARE


def limit_replies(grid: Any, longest: int, seconds: float, log: Callable[[str], None] = lambda line: None) -> bool:
    """Refuse replies that are too long before they are loaded; returns whether that is possible.

    Args:
        grid: Flower's grid.
        longest: the largest number of bytes of a reply.
        seconds: how long to wait for the objects of a reply.
        log: receives a line if it is not possible.
    """
    if type(grid).__name__ == "InMemoryGrid":  # of Flower's simulation: replies are objects of this process
        return False
    runtime = getattr(grid, "_runtime_client", None)
    http = getattr(runtime, "_client", None)
    hooks = getattr(http, "event_hooks", None)
    if http is None or not isinstance(hooks, dict) or not _has_names():
        log("this version of Flower loads replies before their length can be checked; see docs/safe-rounds.md")
        return False
    limit = ReplyLimit(runtime, getattr(grid, "node", None), longest, seconds)
    http.event_hooks = {**hooks, "response": [*hooks.get("response", ()), limit.check]}
    return True


def _has_names() -> bool:
    """Whether this version of Flower has the names that are used below, before a reply needs them."""
    try:
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest  # noqa: F401
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse  # noqa: F401
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError  # noqa: F401
    except ImportError:
        return False
    return True


class ReplyLimit:
    """Adds up the lengths of the objects of each reply.

    Args:
        runtime: Flower's client of the SuperLink.
        node: the server, as Flower names it.
        longest: the largest number of bytes of a reply.
        seconds: how long to wait for the objects of a reply.
    """

    def __init__(self, runtime: Any, node: Any, longest: int, seconds: float) -> None:
        self.runtime, self.node, self.longest, self.seconds = runtime, node, longest, seconds
        self.reply_of: dict[str, str] = {}  # by object
        self.pulled: dict[str, int] = {}  # bytes by reply
        self.since: dict[str, float] = {}  # when the first object of a reply was pulled
        self.refused: set[str] = set()

    def check(self, response: Any) -> None:
        """Read the headers of a response of the SuperLink; an event hook of httpx."""
        path = response.request.url.path
        if path.endswith("/pull-messages"):
            self._note_objects(response)
        elif path.endswith("/pull-object"):
            self._check_object(response)

    def _note_objects(self, response: Any) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse

        if (size := _length(response)) > LONGEST_LIST:
            raise WireError(f"the list of replies has {size:,} bytes, expected at most {LONGEST_LIST:,}")
        listed = PullAppMessagesResponse.FromString(response.read())
        self.reply_of, self.pulled, self.since = {}, {}, {}  # the replies of the list before were pulled, or refused
        for tree in listed.message_object_trees:
            self.reply_of |= dict.fromkeys(_objects(tree), tree.object_id)

    def _check_object(self, response: Any) -> None:
        from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

        asked = PullObjectRequest.FromString(response.request.content)
        reply, length, now = self.reply_of.get(asked.object_id, asked.object_id), _length(response), time.monotonic()
        self.pulled[reply] = self.pulled.get(reply, 0) + length
        if self.pulled[reply] > self.longest:
            self._refuse(asked, reply, f"{TOO_LONG} {self.longest:,} bytes")
        waited = now - self.since.setdefault(reply, now)
        if (
            waited > self.seconds
            and length < SHORT
            and not PullObjectResponse.FromString(response.read()).object_available
        ):
            self._refuse(asked, reply, f"its reply had not arrived {waited:.0f} seconds after it was announced")

    def _refuse(self, asked: Any, reply: str, why: str) -> NoReturn:
        """Let the SuperLink delete a reply, and raise the error with which Flower gives it up."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        if reply not in self.refused:
            self.refused.add(reply)
            with suppress(Exception):  # else the reply stays in the SuperLink until the run ends
                self.runtime.ConfirmMessageReceived(
                    ConfirmMessageReceivedRequest(node=self.node, run_id=asked.run_id, message_object_id=reply)
                )
        raise ObjectPullError(asked.object_id, why)


def _length(response: Any) -> int:
    """The length of the body of a response; one without is refused."""
    try:
        return int(response.headers["content-length"])
    except (KeyError, ValueError):
        return 1 << 62


def _objects(tree: Any) -> Iterator[str]:
    """The objects of a reply."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        yield one.object_id
        waiting.extend(one.children)
