"""Flower as a transport: our records (`records.py`) as opaque bytes in Flower's.

    to a client    Task
    from it        Response
    to a node      Question
    from it        Report (`sites.py`)

Up to 4 MB the bytes are in the record itself, which Flower sends as one object; above, in an array of bytes, which
Flower sends in chunks. Everything received is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import WireError
from thinwire.flower.policy import TOO_LONG, Deadline
from thinwire.flower.records import dump, read
from thinwire.flower.sites import Admission, Report
from thinwire.protocol.round import Request, Response

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

INLINE = 4 * 1000 * 1000
HELLO_SECONDS = 120.0  # for a node to say what it is
JOIN_SECONDS = 2.0
AGAIN_SECONDS = 10.0
_FIELD, _KIND = "thinwire", "thinwire.message/2"


class Task(NamedTuple):
    """A request to a client of a run."""

    run: str
    client: int
    asked: int  # how many versions were made until that of its last accepted upload; 0 if there is none
    phase: str
    data: bytes

    @property
    def request(self) -> Request:
        """The request."""
        return Request(self.data, self.asked - 1, self.phase)


class Question(NamedTuple):
    """A question to a node: what it is; or why it is not used."""

    run: str
    nonce: bytes = b""
    refusal: str = ""


def pack(record: Any) -> RecordDict:
    """A record as Flower's records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    data = dump(record)
    if len(data) <= INLINE:
        return RecordDict({_FIELD: ConfigRecord({"data": data})})
    return RecordDict({_FIELD: ArrayRecord({"data": Array("uint8", (len(data),), _KIND, data)})})


def unpack(kind: Any, records: RecordDict) -> Any:
    """The record of this kind in Flower's records, which are not trusted."""
    from flwr.app import Array

    data = (records.get(_FIELD) or {}).get("data")
    data = data.data if isinstance(data, Array) else data
    if not isinstance(data, bytes):
        raise WireError(f"not a message of thinwire: the record {_FIELD!r} is missing")
    return read(kind, data)


class GridTransport:
    """Clients on the nodes of a Flower grid. Each node is asked what it is before it is used (`sites.py`).

    Args:
        grid: Flower's grid.
        run: returns the name of this run, under which clients store their states; called once, at the first message.
        admission: decides which nodes are used.
        poll: seconds between two polls for responses.
    """

    def __init__(self, grid: Any, run: Callable[[], str], admission: Admission, poll: float = 0.1) -> None:
        self.grid, self.admission, self.poll, self._name_run = grid, admission, poll, run
        self.name, self.known, self.log = admission.name, admission.known, admission.log
        self.asked: dict[str, int] = {}  # by message: the node that is asked what it is
        self.sent: dict[str, tuple[int, str, Deadline]] = {}  # by message: client, its name, how long it may respond
        self.newest: dict[int, str] = {}  # by client: the message that is not answered yet
        self.arrived: list[tuple[int, str, Message]] = []  # replies that were pulled and not read yet
        self.one_at_a_time = False

    @cached_property
    def run(self) -> str:
        """The name of this run."""
        return self._name_run()

    # -- nodes -----------------------------------------------------------------------------------------------------

    def clients(self) -> Set[int]:
        """The clients of all connected nodes that are used.

        New nodes are asked what they are. A node that takes long to respond, since it loads its data, or that is silent
        delays no other: its response is read by a later call.
        """
        here = set(self.grid.get_node_ids())
        new = self.admission.to_ask(here)
        for node in new:
            silent = f"node {node} did not report its clients in {HELLO_SECONDS:.0f} seconds"
            self.admission.postpone(node, HELLO_SECONDS, silent if node in self.asked.values() else "")
        self.asked = {name: node for name, node in self.asked.items() if node in here.difference(new)}
        question = Question(self.run, self.admission.nonce) if new else None
        for node in new:
            if name := self._push(node, question, "query", HELLO_SECONDS):
                self.asked[name] = node
        end = Deadline(JOIN_SECONDS if new else 0.0)
        while self.asked:
            for reply in self._pull(list(self.asked)):
                if (node_asked := self.asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    self._admit(node_asked, reply)
            if not self.asked or not end.left():
                break
            time.sleep(self.poll)
        return self.admission.clients()

    def _admit(self, node: int, reply: Message) -> None:
        """Admit or refuse a node, which is told why."""
        try:
            if reply.has_error():
                report = Report(error=str(reply.error.reason))
            else:
                report = unpack(Report, reply.content)
            if report.error:  # it may be temporary; a node prints its own error
                why = f"node {node} could not report its clients: {visible(report.error, 300)}"
                self.admission.postpone(node, AGAIN_SECONDS, why)
                return
            if report.refusal:  # by the node, which prints it: it runs only an app of its own
                self.admission.refuse(node, report.refusal)
                return
            refusal = self.admission.admit(node, report, self.run)
        except WireError as error:
            refusal = self.admission.refuse(node, str(error))
        if refusal:
            self._push(node, Question(self.run, refusal=refusal), "query", 60.0)

    # -- requests --------------------------------------------------------------------------------------------------

    def send(self, requests: Mapping[int, Request], seconds: float) -> None:
        """Send all requests to clients whose nodes are used; responses are worth something for so many seconds."""
        self.admission.reread()
        for i, (data, accepted, phase) in requests.items():
            self.newest.pop(i, None)
            if (node := self.admission.node_of(i)) is not None:
                task = Task(self.run, i, accepted + 1, phase, data)
                if name := self._push(node, task, "train", seconds):
                    # until the message expires, the client may respond
                    self.sent[name] = i, self.name(i), Deadline(seconds + 60)
                    self.newest[i] = name

    def receive(self, clients: Set[int], deadline: Deadline) -> Iterator[tuple[int, Response]]:
        """Yield the responses as they arrive, also late ones to earlier requests.

        It ends when the newest requests to all of these clients are answered, or the time is over. Further requests may
        be sent, and the deadline may be brought forward, meanwhile.
        """
        while True:
            while self.arrived:  # the caller may close the round between two of them
                client, who, reply = self.arrived.pop(0)
                if response := self._response(client, who, reply):
                    yield client, response
            self.sent = {name: sent for name, sent in self.sent.items() if sent[2].left()}
            if not deadline.left() or self.sent.keys().isdisjoint(self.newest.get(i) for i in clients):
                return
            began = time.monotonic()
            for reply in self._pull(list(self.sent)):
                name = reply.metadata.reply_to_message_id
                sent = self.sent.pop(name, None)
                if sent and self.newest.get(sent[0]) == name:  # else the client was asked again, and responds again
                    del self.newest[sent[0]]
                    self.arrived.append((*sent[:2], reply))
            if not self.arrived:  # a slow poll, on a busy machine, is not repeated at once
                wait = min(max(self.poll, 5 * (time.monotonic() - began)), 5 * self.poll)
                time.sleep(min(wait, deadline.left()))

    def _response(self, client: int, who: str, reply: Message) -> Response | None:
        """The response in a reply; None if it is not from the node of its client, or if Flower failed."""
        if reply.has_error():  # of Flower or of the app, not of the client
            reason = str(reply.error.reason)
            if TOO_LONG in reason:
                return Response(b"", error=reason[reason.index(TOO_LONG) :])
            self.log(f"{who} did not respond: {visible(reason, 300)}")
            return None
        self.admission.reread()  # it may have changed since the request
        if (node := reply.metadata.src_node_id) != self.admission.node_of(client):
            self.log(f"{who}: ignored a response of node {node}, which is no longer used")
            return None
        try:
            return unpack(Response, reply.content)  # type: ignore[no-any-return]
        except WireError as error:
            return Response(b"", error=str(error))

    # -- Flower's messages -----------------------------------------------------------------------------------------

    def _push(self, node: int, record: Any, kind: str, seconds: float) -> str:
        """Push a message to a node; its id, or "" if Flower does not take it."""
        from flwr.app import Message

        message = Message(pack(record), dst_node_id=node, message_type=kind, ttl=seconds + 60, group_id="thinwire")
        return next(iter(self.grid.push_messages([message])), None) or ""

    def _pull(self, ids: list[str]) -> Iterator[Message]:
        """The replies that have arrived; one at a time after a list of them was too long, to find whose that is."""
        for some in [[one] for one in ids] if self.one_at_a_time else [ids]:
            try:
                yield from self.grid.pull_messages(some)
            except WireError as error:
                self.one_at_a_time = True
                self.log(f"{error}; replies are pulled one at a time from now on")
