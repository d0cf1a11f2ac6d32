"""The length of replies is refused before they are loaded into the memory of the server.

A reply waits in the SuperLink as objects: a record of fields, and the chunks of a long message. The server is sent a
list of the objects of each reply, and pulls them one by one over HTTP. Here the header `Content-Length` of each is read
before its body is; if the objects of one reply together are longer than any upload, the rest is not pulled, the
SuperLink is told to delete the reply, and the server treats it as refused.

This needs Flower's HTTP client, which is not part of its public interface. Without it, replies are checked after they
were loaded, and the log says so once. What a node can store in the SuperLink is limited by a proxy in front of it, such
as `client_max_body_size` of nginx for each object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from thinwire.errors import WireError
from thinwire.flower.grid_transport import TOO_LONG
from thinwire.protocol.contract import Contract

SPARE = 1_000_000  # bytes of the other fields of a reply
LONGEST_LIST = 32_000_000  # bytes of the list of replies and their objects; an error of an app is in it


def longest_reply(contract: Contract) -> int:
    """The largest number of bytes of a reply: an upload of any stage, and other fields."""
    return max(stage.longest_up for stage in contract.stages) + SPARE


def limit_replies(grid: Any, longest: int, log: Callable[[str], None] = lambda line: None) -> bool:
    """Refuse replies that are too long before they are loaded; returns whether that is possible.

    Args:
        grid: Flower's grid.
        longest: the largest number of bytes of a reply.
        log: receives a line if it is not possible.
    """
    if type(grid).__name__ == "InMemoryGrid":  # of Flower's simulation: replies are objects of this process
        return False
    runtime = getattr(grid, "_runtime_client", None)
    http = getattr(runtime, "_client", None)
    hooks = getattr(http, "event_hooks", None)
    if http is None or not isinstance(hooks, dict):
        log("this version of Flower loads replies before their length can be checked; see docs/safe-rounds.md")
        return False
    limit = ReplyLimit(runtime, getattr(grid, "node", None), longest)
    http.event_hooks = {**hooks, "response": [*hooks.get("response", ()), limit.check]}
    return True


class ReplyLimit:
    """Adds up the lengths of the objects of each reply.

    Args:
        runtime: Flower's client of the SuperLink.
        node: the server, as Flower names it.
        longest: the largest number of bytes of a reply.
    """

    def __init__(self, runtime: Any, node: Any, longest: int) -> None:
        self.runtime, self.node, self.longest = runtime, node, longest
        self.reply_of: dict[str, str] = {}  # by object
        self.pulled: dict[str, int] = {}  # bytes by reply
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
        self.reply_of, self.pulled = {}, {}  # the replies of the list before were pulled, or refused
        for tree in listed.message_object_trees:
            self.reply_of |= dict.fromkeys(_objects(tree), tree.object_id)

    def _check_object(self, response: Any) -> None:
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

        asked = PullObjectRequest.FromString(response.request.content)
        reply = self.reply_of.get(asked.object_id, asked.object_id)
        self.pulled[reply] = self.pulled.get(reply, 0) + _length(response)
        if self.pulled[reply] <= self.longest:
            return
        if reply not in self.refused:
            self.refused.add(reply)
            with suppress(Exception):  # the reply stays in the SuperLink until the run ends
                self.runtime.ConfirmMessageReceived(
                    ConfirmMessageReceivedRequest(node=self.node, run_id=asked.run_id, message_object_id=reply)
                )
        raise ObjectPullError(asked.object_id, f"{TOO_LONG} {self.longest:,} bytes")


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
