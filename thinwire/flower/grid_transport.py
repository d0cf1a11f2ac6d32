"""Flower as a transport: our messages as opaque bytes in Flower's records.

    to a client    run, client, heard, data
    from it        client, loss, examples, data; or client, error

`data` is the message. Up to 4 MB it stands in the record itself, which Flower sends as one object; above, in an array
of bytes, which Flower cuts into pieces. Whatever arrives is checked before it is believed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.flower.client_store import Answer, Ask
from thinwire.flower.transport import Heard

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

INLINE = 4 * 1000 * 1000
HELLO_SECONDS = 120.0
AGAIN_SECONDS = 10.0
_FIELDS, _LONG, _KIND = "thinwire", "thinwire-data", "thinwire.message/1"


def pack(fields: Mapping[str, Any], data: bytes = b"") -> RecordDict:
    """Fields and a message as Flower's records; empty values are left out."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    given = {key: value for key, value in fields.items() if value not in ("", b"", [])}
    records = RecordDict({_FIELDS: ConfigRecord({**given, **({"data": data} if 0 < len(data) <= INLINE else {})})})
    if len(data) > INLINE:
        records[_LONG] = ArrayRecord({"data": Array("uint8", (len(data),), _KIND, data)})
    return records


def unpack(records: RecordDict, **types: type) -> tuple[list[Any], bytes]:
    """The fields of these names and types, and the message.

    Args:
        records: from anywhere.
        types: what is expected; a text that is absent is empty.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    fields = records.get(_FIELDS)
    if not isinstance(fields, ConfigRecord):
        raise WireError("not a message of thinwire: it has no record of that name")
    values = []
    for name, kind in types.items():
        value = fields.get(name, "" if kind is str else None)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"field {name!r} is {type(value).__name__}, expected {kind.__name__}")
        values.append(value)
    data = fields.get("data", b"")
    if isinstance(long := records.get(_LONG), ArrayRecord):
        array = long.get("data")
        data = array.data if array is not None and array.stype == _KIND else b""
    if not isinstance(data, bytes):
        raise WireError(f"field 'data' is {type(data).__name__}, expected bytes")
    return values, data


class GridTransport:
    """Clients behind the nodes of a Flower grid. Each node says which clients it serves.

    Args:
        grid: Flower's.
        run: the name of this run, under which clients keep their states; asked for once, at the first message.
        schema: what both ends must have agreed on.
        clients: how many clients there are.
        poll: seconds between two looks for answers.
        log: is told what was refused.
    """

    def __init__(
        self,
        grid: Any,
        run: Callable[[], str],
        schema: bytes,
        clients: int,
        poll: float = 0.1,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid, self.schema, self.count, self.poll, self.log = grid, schema, clients, poll, log
        self._make_run, self._run = run, ""
        self.serves: dict[int, frozenset[int]] = {}  # by node
        self.silent: dict[int, float] = {}  # nodes that did not answer, and until when they are left alone

    @property
    def run(self) -> str:
        """The name of this run."""
        self._run = self._run or self._make_run()
        return self._run

    def clients(self) -> Set[int]:
        """The clients of all nodes that are there; nodes that are new are asked whom they serve."""
        here = set(self.grid.get_node_ids())
        self.serves = {node: clients for node, clients in self.serves.items() if node in here}
        self.silent = {node: until for node, until in self.silent.items() if until > time.monotonic()}
        new = sorted(here - self.serves.keys() - self.silent.keys())
        if new:
            hello = {node: pack({"run": self.run}) for node in new}
            for node, reply in self._exchange(hello, "query", HELLO_SECONDS):
                if reply.has_error():  # of Flower or of the app, which may pass
                    self.log(f"node {node} could not introduce itself: {visible(str(reply.error.reason), 300)}")
                    self.silent[node] = time.monotonic() + AGAIN_SECONDS
                    continue
                try:
                    self.serves[node] = self._introduced(reply)
                except WireError as error:
                    self.log(f"node {node} is left out: {visible(str(error), 300)}")
                    self.serves[node] = frozenset()
            for node in set(new) - self.serves.keys() - self.silent.keys():  # do not wait for it in every round
                self.log(f"node {node} did not introduce itself in {HELLO_SECONDS:.0f} seconds")
                self.silent[node] = time.monotonic() + 5 * HELLO_SECONDS
        return frozenset().union(*self.serves.values())

    def ask(self, asks: Mapping[int, Ask], seconds: float) -> Iterator[Heard]:
        """Send all messages, and give the answers as they come."""
        node_of = {client: node for node, clients in self.serves.items() for client in clients}
        sent = {i: pack({"run": self.run, "client": i, "heard": ask.heard}, ask.data) for i, ask in asks.items()}
        for client, reply in self._exchange(sent, "train", seconds, node_of):
            if reply.has_error():  # of Flower or of the app: the client itself said nothing
                self.log(f"client {client} did not answer: {visible(str(reply.error.reason), 300)}")
                continue
            try:
                yield Heard(client, _answer(client, reply))
            except WireError as error:
                yield Heard(client, Answer(b"", error=str(error)))

    def _introduced(self, reply: Message) -> frozenset[int]:
        (served, schema), _ = unpack(reply.content, clients=list, schema=bytes)
        if schema != self.schema:
            raise WireError(
                f"it runs another method, model or seed (schema {schema[:16].hex()}, ours {self.schema.hex()}); "
                "start it with the same app and the same data"
            )
        clients = frozenset(served)
        if not clients <= frozenset(range(self.count)):
            raise WireError(f"it says that it serves clients {sorted(clients)[:5]}, there are {self.count}")
        taken = clients & frozenset().union(*self.serves.values())
        if taken:
            raise WireError(f"it says that it serves client {min(taken)}, which another node serves")
        return clients

    def _exchange(
        self, contents: Mapping[int, RecordDict], kind: str, seconds: float, node_of: Mapping[int, int] | None = None
    ) -> Iterator[tuple[int, Message]]:
        """Push one message to each, and pull the replies until all are there or the time is over."""
        from flwr.app import Message

        waiting = {}
        for key, content in contents.items():
            node = key if node_of is None else node_of[key]
            message = Message(content, dst_node_id=node, message_type=kind, ttl=seconds + 60, group_id="thinwire")
            pushed = list(self.grid.push_messages([message]))
            if pushed and pushed[0]:
                waiting[pushed[0]] = key
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages(list(waiting)):
                if (of := reply.metadata.reply_to_message_id) in waiting:
                    yield waiting.pop(of), reply
            if waiting:
                time.sleep(self.poll)


def _answer(client: int, reply: Message) -> Answer:
    content = reply.content
    (who, error), data = unpack(content, client=int, error=str)
    if who != client:
        raise WireError(f"client {who} answered in its place")
    if error:
        return Answer(b"", error=error)
    (loss, examples), _ = unpack(content, loss=float, examples=int)
    return Answer(data, loss, examples)
