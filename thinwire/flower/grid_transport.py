"""Flower as a transport: our messages as opaque bytes in Flower's records.

    to a client    run, client, accepted, phase, data
    from it        client, loss, examples, accuracy, data; or client, error

`data` is the message. Up to 4 MB it is in the record itself, which Flower sends as one object; above, in an array of
bytes, which Flower sends in chunks. Everything received is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.transport import ClientResponse

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

INLINE = 4 * 1000 * 1000
HELLO_SECONDS = 120.0
AGAIN_SECONDS = 10.0
_FIELDS, _LONG, _KIND = "thinwire", "thinwire-data", "thinwire.message/1"


def pack(fields: Mapping[str, Any], data: bytes = b"") -> RecordDict:
    """Fields and a message as Flower's records; empty values are omitted."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    given = {key: value for key, value in fields.items() if value not in ("", b"", [])}
    records = RecordDict({_FIELDS: ConfigRecord({**given, **({"data": data} if 0 < len(data) <= INLINE else {})})})
    if len(data) > INLINE:
        records[_LONG] = ArrayRecord({"data": Array("uint8", (len(data),), _KIND, data)})
    return records


def unpack(records: RecordDict, **types: type) -> tuple[list[Any], bytes]:
    """The fields of these names and types, and the message.

    Args:
        records: the records, not trusted.
        types: the expected fields; a missing string is empty.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    fields = records.get(_FIELDS)
    if not isinstance(fields, ConfigRecord):
        raise WireError("not a message of thinwire: the record 'thinwire' is missing")
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
    """Clients on the nodes of a Flower grid. Each node reports which clients it has.

    Args:
        grid: Flower's grid.
        run: returns the name of this run, under which clients store their states; called once, at the first message.
        schema: the hash of method, model, initial weights and seed, which must be the same on nodes.
        clients: number of clients.
        poll: seconds between two polls for responses.
        log: receives a line for everything that was refused.
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
        self.unresponsive: dict[int, float] = {}  # nodes, and until when they are not queried again

    @property
    def run(self) -> str:
        """The name of this run."""
        self._run = self._run or self._make_run()
        return self._run

    def clients(self) -> Set[int]:
        """The clients of all connected nodes; new nodes are queried for their clients."""
        here = set(self.grid.get_node_ids())
        self.serves = {node: clients for node, clients in self.serves.items() if node in here}
        self.unresponsive = {node: until for node, until in self.unresponsive.items() if until > time.monotonic()}
        new = sorted(here - self.serves.keys() - self.unresponsive.keys())
        if new:
            hello = {node: pack({"run": self.run}) for node in new}
            for node, reply in self._exchange(hello, "query", HELLO_SECONDS):
                if reply.has_error():  # of Flower or of the app; it may be temporary
                    self.log(f"node {node} could not report its clients: {visible(str(reply.error.reason), 300)}")
                    self.unresponsive[node] = time.monotonic() + AGAIN_SECONDS
                    continue
                try:
                    self.serves[node] = self._reported(reply)
                except WireError as error:
                    self.log(f"node {node} is not used: {visible(str(error), 300)}")
                    self.serves[node] = frozenset()
            for node in set(new) - self.serves.keys() - self.unresponsive.keys():  # not in every round
                self.log(f"node {node} did not report its clients in {HELLO_SECONDS:.0f} seconds")
                self.unresponsive[node] = time.monotonic() + 5 * HELLO_SECONDS
        return frozenset().union(*self.serves.values())

    def name(self, client: int) -> str:
        """What logs and records call a client."""
        return f"client {client}"

    def exchange(self, requests: Mapping[int, Request], seconds: float) -> Iterator[ClientResponse]:
        """Send all requests, and yield the responses as they arrive."""
        node_of = {client: node for node, clients in self.serves.items() for client in clients}
        sent = {
            i: pack({"run": self.run, "client": i, "accepted": request.accepted, "phase": request.phase}, request.data)
            for i, request in requests.items()
        }
        for client, reply in self._exchange(sent, "train", seconds, node_of):
            if reply.has_error():  # of Flower or of the app, not of the client
                self.log(f"client {client} did not respond: {visible(str(reply.error.reason), 300)}")
                continue
            try:
                yield ClientResponse(client, _response(client, reply))
            except WireError as error:
                yield ClientResponse(client, Response(b"", error=str(error)))

    def _reported(self, reply: Message) -> frozenset[int]:
        (served, schema), _ = unpack(reply.content, clients=list, schema=bytes)
        if schema != self.schema:
            raise WireError(
                f"it runs another method, model or seed (schema {schema[:16].hex()}, ours {self.schema.hex()}); "
                "start it with the same app and the same data"
            )
        clients = frozenset(served)
        if not clients <= frozenset(range(self.count)):
            raise WireError(f"it reports clients {sorted(clients)[:5]}, there are {self.count}")
        taken = clients & frozenset().union(*self.serves.values())
        if taken:
            raise WireError(f"it reports client {min(taken)}, which another node has")
        return clients

    def _exchange(
        self, contents: Mapping[int, RecordDict], kind: str, seconds: float, node_of: Mapping[int, int] | None = None
    ) -> Iterator[tuple[int, Message]]:
        """Push one message to each, and pull the replies until all have arrived or the time is over."""
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


def _response(client: int, reply: Message) -> Response:
    content = reply.content
    (who, error), data = unpack(content, client=int, error=str)
    if who != client:
        raise WireError(f"client {who} responded in its place")
    if error:
        return Response(b"", error=error)
    (loss, examples, accuracy), _ = unpack(content, loss=float, examples=int, accuracy=float)
    return Response(data, loss, examples, accuracy=accuracy)
