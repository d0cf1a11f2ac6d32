"""Flower as a transport: our messages as opaque bytes in Flower's records.

    to a client    run, client, accepted, phase, data
    from it        client, loss, examples, data, and of an evaluation eval-examples, eval-loss, eval-accuracy,
                   metric-names, metric-values; or client, error
    to a node      run, and with a roster a nonce; or a refusal
    from it        what `sites.py` says; or error

`data` is the message. Up to 4 MB it is in the record itself, which Flower sends as one object; above, in an array of
bytes, which Flower sends in chunks. Everything received is checked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.flower.sites import Admission, Report, Roster, Software
from thinwire.flower.transport import TOO_LONG, ClientResponse, Deadline
from thinwire.protocol.round import Request, Response
from thinwire.training.evaluation import Evaluation

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

INLINE = 4 * 1000 * 1000
HELLO_SECONDS = 120.0
JOIN_SECONDS = 2.0
AGAIN_SECONDS = 10.0
MOST_METRICS = 100  # of an evaluation
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
        types: the expected fields, with _ for -; a missing text, byte string or list is empty.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    fields = records.get(_FIELDS)
    if not isinstance(fields, ConfigRecord):
        raise WireError("not a message of thinwire: the record 'thinwire' is missing")
    values: list[Any] = []
    for name, kind in {**types, "data": bytes}.items():
        value = fields.get(name.replace("_", "-"), None if kind in (int, float) else kind())
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"field {name!r} is {type(value).__name__}, expected {kind.__name__}")
        values.append(value)
    data: bytes = values.pop()
    if isinstance(long := records.get(_LONG), ArrayRecord):
        array = long.get("data")
        data = array.data if array is not None and array.stype == _KIND else b""
    return values, data


def response_fields(client: int, response: Response) -> dict[str, Any]:
    """The fields of a response but its message, for `pack`; an accuracy of -1 stands for none."""
    fields = {"client": client, "loss": response.loss, "examples": response.examples, "error": response.error}
    if (found := response.evaluation) is None:
        return fields
    accuracy = -1.0 if found.accuracy is None else found.accuracy
    numbers = {"eval-examples": found.examples, "eval-loss": found.loss, "eval-accuracy": accuracy}
    return {**fields, **numbers, "metric-names": list(found.metrics), "metric-values": list(found.metrics.values())}


def read_response(client: int, content: RecordDict) -> Response:
    """The response of a client; values are checked by the server."""
    (who, error), data = unpack(content, client=int, error=str)
    if who != client:
        raise WireError(f"client {who} responded in its place")
    if error:
        return Response(b"", error=error[:1000])
    (loss, examples), _ = unpack(content, loss=float, examples=int)
    if "eval-examples" not in content[_FIELDS]:
        return Response(data, loss, examples)
    kinds = {"eval_examples": int, "eval_loss": float, "eval_accuracy": float}
    (count, eval_loss, accuracy, names, values), _ = unpack(content, **kinds, metric_names=list, metric_values=list)
    metrics = dict(zip(names, values, strict=False))
    if not len(names) == len(values) == len(metrics) <= MOST_METRICS or not all(
        isinstance(name, str) and isinstance(x, float) for name, x in metrics.items()
    ):
        raise WireError(f"its metrics are not {MOST_METRICS} or fewer names, and as many numbers")
    evaluation = Evaluation(eval_loss, None if accuracy == -1.0 else accuracy, metrics, count)
    return Response(data, loss, examples, evaluation=evaluation)


class GridTransport:
    """Clients on the nodes of a Flower grid. Each node is asked what it is before it is used (`sites.py`).

    Args:
        grid: Flower's grid.
        run: returns the name of this run, under which clients store their states; called once, at the first message.
        software: what must be the same on nodes.
        clients: number of clients.
        poll: seconds between two polls for responses.
        log: receives a line for everything that was refused.
        sites: returns the roster as it is now; without it nodes say which clients they have.
    """

    def __init__(
        self,
        grid: Any,
        run: Callable[[], str],
        software: Software,
        clients: int,
        poll: float = 0.1,
        log: Callable[[str], None] = lambda line: None,
        sites: Callable[[], Roster] | None = None,
    ) -> None:
        self.grid, self.poll, self.log = grid, poll, log
        self._make_run, self._run = run, ""
        self.admission = Admission(software, clients, sites, log)
        self.name, self.sites = self.admission.name, self.admission.sites
        self.asked: dict[str, tuple[int, bytes, float]] = {}  # by message: node, nonce, until when it may respond
        self.late: dict[str, tuple[int, Deadline]] = {}  # requests without a response: the client, and when they expire
        self.arrived: list[tuple[int, Message]] = []  # replies that were pulled, and not read yet
        self.one_at_a_time = False

    @property
    def run(self) -> str:
        """The name of this run."""
        self._run = self._run or self._make_run()
        return self._run

    def clients(self) -> Set[int]:
        """The clients of all connected nodes that are used.

        New nodes are asked what they are. A node that takes long to respond, since it loads its data, or that is silent
        delays no other: its response is read by a later call.
        """
        here = set(self.grid.get_node_ids())
        new = self.admission.to_ask(here)
        self.asked = {name: asked for name, asked in self.asked.items() if asked[0] in here}
        fresh = sorted(set(new) - {node for node, *_ in self.asked.values()})
        for node in fresh:
            nonce = b"" if self.admission.roster is None else secrets.token_bytes(32)
            if name := self._push(node, pack({"run": self.run, "nonce": nonce}), "query", HELLO_SECONDS):
                self.asked[name] = node, nonce, time.monotonic() + HELLO_SECONDS
        if self.asked:
            self._read_hellos(JOIN_SECONDS if fresh else 0.0)
        return self.admission.clients()

    def exchange(self, requests: Mapping[int, Request], deadline: Deadline) -> Iterator[ClientResponse]:
        """Send all requests, and yield the responses as they arrive, also late ones to earlier requests."""
        self.admission.reread()
        node_of = {client: node for node, clients in self.admission.serves.items() for client in clients}
        sent = {
            i: pack({"run": self.run, "client": i, "accepted": request.accepted, "phase": request.phase}, request.data)
            for i, request in requests.items()
            if i in node_of
        }
        names = {i: self.name(i) for i in requests}  # as they were when the requests were sent
        yield from self._responses(self._exchange(sent, deadline, node_of), names)

    def remaining(self, deadline: Deadline) -> Iterator[ClientResponse]:
        """Yield the responses to earlier requests as they arrive, until all are there or the time is over."""
        yield from self._responses(self._exchange({}, deadline, {}, also_late=True), {})

    def _responses(self, replies: Iterator[tuple[int, Message]], names: Mapping[int, str]) -> Iterator[ClientResponse]:
        """The responses in replies; those that are not from the node of their client are ignored."""
        for client, reply in replies:
            if reply.has_error():  # of Flower or of the app, not of the client
                reason = str(reply.error.reason)
                if TOO_LONG in reason:
                    yield ClientResponse(client, Response(b"", error=reason[reason.index(TOO_LONG) :][:200]))
                else:
                    self.log(f"{self.name(client)} did not respond: {visible(reason, 300)}")
                continue
            self.admission.reread()  # it may have changed since the request
            node = reply.metadata.src_node_id
            if client not in self.admission.serves.get(node, ()):
                name = names.get(client, f"client {client}")
                self.log(f"{name}: ignored a response of node {node}, which is no longer used")
                continue
            try:
                yield ClientResponse(client, read_response(client, reply.content))
            except WireError as error:
                yield ClientResponse(client, Response(b"", error=str(error)))

    def _read_hellos(self, seconds: float) -> None:
        """Admit or refuse the nodes that respond within that time."""
        end = time.monotonic() + seconds
        while self.asked:
            for reply in self._pull(list(self.asked)):
                if asked := self.asked.pop(reply.metadata.reply_to_message_id, None):
                    self._read_hello(*asked[:2], reply)
            for name, (node, _, until) in list(self.asked.items()):
                if until < time.monotonic():
                    del self.asked[name]
                    why = f"did not report its clients in {HELLO_SECONDS:.0f} seconds"
                    self.admission.postpone(node, 5 * HELLO_SECONDS, why)
            if time.monotonic() >= end:
                return
            if self.asked:
                time.sleep(self.poll)

    def _read_hello(self, node: int, nonce: bytes, reply: Message) -> None:
        """Admit or refuse a node, which is told why."""
        try:
            (failed, refused) = unpack(reply.content, error=str, refusal=str)[0] if reply.has_content() else ("", "")
            if failed or reply.has_error():  # it may be temporary; a node prints its own error
                why = visible(failed or str(reply.error.reason), 300)
                self.admission.postpone(node, AGAIN_SECONDS, f"could not report its clients: {why}")
                return
            if refused:  # by the node, which prints it: it runs only an app of its own
                self.admission.refuse(node, refused)
                return
            of_software = {"schema": bytes, "version": str, "app": str}
            fields, _ = unpack(reply.content, **of_software, clients=list, site=str, signature=bytes)
            report = Report(Software(*fields[:3]), frozenset(fields[3]), *fields[4:])
            refusal = self.admission.admit(node, report, self.run, nonce)
        except WireError as error:
            refusal = self.admission.refuse(node, str(error))
        if refusal:
            self._push(node, pack({"run": self.run, "refusal": refusal}), "query", 60.0)

    def _push(self, node: int, content: RecordDict, kind: str, seconds: float) -> str:
        """Push a message to a node; its id, or "" if Flower does not take it."""
        from flwr.app import Message

        message = Message(content, dst_node_id=node, message_type=kind, ttl=seconds + 60, group_id="thinwire")
        return next(iter(self.grid.push_messages([message])), None) or ""

    def _exchange(
        self,
        contents: Mapping[int, RecordDict],
        deadline: Deadline,
        node_of: Mapping[int, int],
        also_late: bool = False,
    ) -> Iterator[tuple[int, Message]]:
        """Push one message to each client, and pull the replies until all have arrived or the time is over."""
        seconds, waiting = deadline.left(), dict[str, int]()
        # until its message expires, a client may still respond
        self.late = {one: (client, end) for one, (client, end) in self.late.items() if end.left()}
        for client, content in contents.items():
            if name := self._push(node_of[client], content, "train", seconds):
                waiting[name] = client
        expires = Deadline(seconds + 60)
        try:
            while (waiting or (also_late and (self.late or self.arrived))) and deadline.left():
                began = time.monotonic()
                for reply in self._pull([*waiting, *self.late]):
                    if (of := reply.metadata.reply_to_message_id) in waiting:
                        self.arrived.append((waiting.pop(of), reply))
                    elif of in self.late and (client := self.late.pop(of)[0]) not in contents:  # else it responds again
                        self.arrived.append((client, reply))
                while self.arrived:
                    yield self.arrived.pop(0)
                if waiting or (also_late and self.late):  # a slow poll, on a busy machine, is not repeated at once
                    wait = min(max(self.poll, 5 * (time.monotonic() - began)), 5 * self.poll)
                    time.sleep(min(wait, deadline.left()))
        finally:  # the caller may close the round before the end
            self.late |= {one: (client, expires) for one, client in waiting.items()}

    def _pull(self, ids: list[str]) -> Iterator[Message]:
        """The replies that have arrived; one at a time after a list of them was too long, to find whose that is."""
        for some in [[one] for one in ids] if self.one_at_a_time else [ids]:
            try:
                yield from self.grid.pull_messages(some)
            except WireError as error:
                self.one_at_a_time = True
                self.log(f"{error}; replies are pulled one at a time from now on")
