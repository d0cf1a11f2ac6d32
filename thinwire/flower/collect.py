"""Collect the uploads of a round: draw its cohort, ask it, wait for enough, and close without those that are late.

while fewer than `quorum` have sent an upload that can be used, at most `tries` times:
    the cohort, from the clients that are there      others in place of those that did not respond
    send the requests, and read what arrives         until all responded, `seconds` end, `grace` seconds after the
                                                     quorum, or when as many responded as the cohort has places
    send the whole state to clients that request it

The order in which a round takes clients is drawn from the seed and the number of the round (`Sampler.order`). The
cohort is the first of them that are there: a function of the seed and of the recorded set. If all clients are there, it
is the cohort of the simulation.

An asynchronous round (`Asynchronous`) ends when as many uploads have arrived as the cohort has places, also of clients
that were asked in earlier rounds. Their uploads are decoded as of the version that they were asked to train from.

The phases of secure aggregation (`secure_round.py`) and evaluations (`server.py`) ask by the same `ask`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import Diverged, WireError
from thinwire.federation.federation import Clients, Collected, Federation
from thinwire.flower.grid_transport import GridTransport
from thinwire.flower.policy import TOO_LONG, Deadline, Log, RoundPolicy
from thinwire.protocol.round import Reply, Request, Response
from thinwire.protocol.state import ClientState
from thinwire.protocol.upload import Upload
from thinwire.runs.deployment_records import CohortLog, SiteRecord
from thinwire.wire import message as wire

SILENT = 5.0  # seconds of a wait before the log says for whom
OnSites = Callable[[Sequence[SiteRecord]], None]


class Asked(NamedTuple):
    """What a client was asked to train from, and when, on the clock of the server."""

    version: int
    accepted: int  # the version of its last accepted upload
    since: float
    until: float  # it is not asked again before, while there are others


@dataclass
class FlowerCollected(Collected):
    """What one round has received so far, and from whom.

    Args:
        order: all clients that can take part, in the order in which the round takes them.
        size: the number of uploads that the round is for.
        needed: the number of uploads without which it cannot be closed.
        requested: what clients were asked.
        up: bytes that each client sent.
        down: bytes that each client was sent.
        seconds: until the last response of a client.
    """

    order: tuple[int, ...] = ()
    size: int = 0
    needed: int = 0
    requested: dict[int, Asked] = field(default_factory=dict)
    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, float] = field(default_factory=dict)

    def count_ordinary(self, size: int) -> None:
        """Count bytes as ordinary downloads: all that are sent count as catching up at first, also repeated ones."""
        self.bytes_down += size
        self.bytes_catchup -= size


class Collector(Clients):
    """Draws the cohorts of rounds from the clients that are there, and collects their uploads.

    Args:
        federation: the federation that they take part in.
        transport: brings requests to clients and their responses back. It guarantees nothing: responses may be missing,
            duplicated, late, or arbitrary bytes.
        policy: how many are asked, and how long to wait.
        log: receives a line for everything that was refused.
        record: the cohorts of the run; by default they are kept in memory.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`, so that the run goes back.
        clock: the clock that limits waits.
    """

    def __init__(
        self,
        federation: Federation,
        transport: GridTransport,
        policy: RoundPolicy | None = None,
        log: Log = lambda line: None,
        record: CohortLog | None = None,
        on_sites: OnSites = lambda records: None,
        goes_back: bool = False,
        clock: Any = time,
    ) -> None:
        super().__init__(federation)
        self.transport = transport
        self.policy, self.log, self.record, self.clock = policy or RoundPolicy(), log, record or CohortLog(), clock
        self.on_sites, self.goes_back = on_sites, goes_back
        self.gone = ""  # who was absent in the last round, and why
        self.asynchronous = self.contract.method.asynchronous
        self.asked: dict[int, Asked] = {}  # the clients that were asked to train and have not responded
        self.here: Set[int] = frozenset()  # who was there when this was last asked
        self.inbox: list[tuple[int, Response]] = []  # responses that arrived between two rounds
        self._first = True  # of this process: clients need some time to connect

    # -- the cohort ------------------------------------------------------------------------------------------------

    def draw(self, got: FlowerCollected) -> None:
        """Draw the cohort of a round. A resumed round has its recorded cohort, unless some of it do not come back."""
        everyone, before = frozenset(got.order), self.record.rounds.get(got.number) if self._first else None
        old = before.cohort if before and everyone.issuperset(before.cohort) else ()
        known = everyone & self.transport.known() or everyone  # with a roster, others do not come
        wanted = frozenset(old or known if self._first else ())
        self._first = False
        here = self.wait(everyone, got.needed, wanted)
        if old and here.issuperset(old):
            got.cohort = old
            return
        if gone := self.names(i for i in old if i not in here):
            self.say(got, f"drawn again without {gone}, not back in {self.policy.wait:g} seconds")
        elif not wanted <= here:
            self.say(got, f"{len(here)} of {len(known)} clients are there after {self.policy.wait:g} seconds")
        got.cohort = self._chosen(got, here)
        self.record.drawn(got.number, sorted(here), got.cohort)

    def _chosen(self, got: FlowerCollected, here: Set[int]) -> tuple[int, ...]:
        """The first clients that are there and idle; those that still work only if there are too few others."""
        idle = [i for i in got.order if i in here - self.working()]
        if self.asynchronous.active:
            places = self.asynchronous.clients(got.size, len(got.order)) - len(self.working())
            return tuple(idle[: max(0, places)])
        kept = () if got.round.plan.resample else got.state.cohort  # within a window of the schedule
        chosen = [i for i in kept if i in idle]
        if len(chosen) < got.needed:
            chosen += [i for i in idle if i not in kept]
            if len(chosen) < got.needed:
                chosen += [i for i in got.order if i in here and i not in idle]
            chosen = chosen[: self.policy.asked(got.size)]
        return tuple(chosen)

    def _draw_more(self, got: FlowerCollected) -> None:
        """Others take the places of the clients of the cohort that did not respond."""
        done = got.uploads.keys()
        here = self.wait(frozenset(got.order) - done, got.needed - len(done))
        missing = max(len(got.cohort), self.policy.asked(got.size)) - len(done)
        free = [i for i in got.order if i in here - self.working() and i not in got.cohort]
        free.sort(key=self.asked.__contains__)  # those last that have not responded to an earlier request
        if others := free[:missing]:
            self.say(got, f"{self.names(others)} take part in place of clients that did not respond")
            got.cohort = (*got.cohort, *others)
            self.record.drawn(got.number, sorted(here | done), got.cohort)

    def wait(self, everyone: Set[int], needed: int, wanted: Set[int] = frozenset()) -> frozenset[int]:
        """Who is there, when all that are wanted are or `wait` seconds end, and enough are or `seconds` end."""
        for_all = Deadline(self.policy.wait if wanted else 0.0, self.clock)
        for_enough = Deadline(self.policy.seconds, self.clock)
        silent: Deadline | None = Deadline(min(SILENT, self.policy.seconds / 2), self.clock)
        while True:
            here = self.here = frozenset(everyone & self.transport.clients())
            self.asked = {i: one if i in here else one._replace(until=0.0) for i, one in self.asked.items()}
            enough = len(here) >= needed or not for_enough.left()
            if enough and (wanted <= here or not for_all.left()):
                return here
            if silent and not silent.left():
                silent, awaited = None, (wanted or everyone & self.transport.known() or everyone) - here
                there = f"{len(here)} clients are there, {max(needed, len(wanted))} are wanted"
                self.log(f"waiting for {self.names(sorted(awaited))}: {there}")
            self.clock.sleep(min(1.0, self.policy.seconds / 10))

    def working(self) -> Set[int]:
        """The clients that work on an earlier request."""
        now = self.clock.monotonic()
        return {client for client, one in self.asked.items() if one.until > now}

    def end_soon(self, deadline: Deadline, responded: int, needed: int) -> None:
        """Once enough have responded, the others have `grace` seconds."""
        if responded >= needed and self.policy.grace >= 0:
            deadline.at_most(self.policy.grace)

    def forget(self, version: int, left_out: Set[int]) -> None:
        """Forget who was asked to train this version or a later one, which a run that went back makes a second time."""
        self.asked = {i: one for i, one in self.asked.items() if one.version < version and i not in left_out}

    # -- its uploads -----------------------------------------------------------------------------------------------

    def collect_uploads(self, got: FlowerCollected) -> None:
        """Ask the cohort, and while there are too few uploads clients that did not respond, and others besides."""
        self.draw(got)
        for attempt in range(self.policy.tries):
            if attempt:
                self._draw_more(got)
            self._ask_to_train(got)
            sent = f"{len(got.uploads)} of {len(got.cohort)} clients"
            if len(got.uploads) >= got.needed:
                break
            self.say(got, f"{sent} responded, {got.needed} are needed")
        else:
            line = f"{sent} sent an upload that can be used, {got.needed} are needed"
            raise WireError(f"round {got.number}: {line}; the same command continues when they are back")
        if self.asynchronous.active:
            got.cohort += tuple(i for i in (*got.uploads, *got.refused) if i not in got.cohort)
        elif got.late:
            self.say(got, f"closed with {sent}; late: {self.names(sorted(got.late))}")

    def _ask_to_train(self, got: FlowerCollected) -> None:
        """Collect the responses of the clients that are there and have not sent an upload that can be used."""
        asked = [i for i in got.cohort if i not in got.requested or i in self.here]
        requests = requests_to(asked, got)
        new = {i: one.data for i, one in requests.items() if i not in got.requested}
        got.count_ordinary(got.round.downloads.split(new)[0])
        self.note(got, requests)
        got.downloads |= {i: wire.Parts((one.data,)) for i, one in requests.items()}
        deadline = Deadline(self.policy.seconds, self.clock)
        end, awaited = deadline.end, frozenset(self.asked) if self.asynchronous.active else requests.keys()
        for client, upload in self.ask(got, requests, partial(self._read, got), deadline, awaited):
            got.uploads[client] = upload
            self.end_soon(deadline, len(got.uploads), got.needed)
            if len(got.uploads) >= got.size and self.asked.keys() & awaited:
                deadline.at_most(0.0)
                break
        if deadline.end < end and not deadline.left():  # the round was closed early
            got.late = (requests.keys() & self.asked.keys()) - got.refused.keys()

    def note(self, got: FlowerCollected, requests: Mapping[int, Request]) -> None:
        """Note what clients are asked, and have not answered yet."""
        now = self.clock.monotonic()
        for i, request in requests.items():
            asked = Asked(got.round.version, request.accepted, now, now + self.policy.seconds)
            self.asked[i] = got.requested[i] = asked

    def _read(self, got: FlowerCollected, client: int, response: Response) -> Upload | Request | None:
        """The decoded upload in a response, or a request with the whole state that a client needs; raises if it is
        refused. None if it is an upload to a round that is closed, of which the next request tells its client.
        """
        waited, active = self.asked.pop(client, None), self.asynchronous.active
        asked = waited if waited and active else got.requested.get(client)
        if asked is None:
            self.say(got, f"{self.transport.name(client)} responded to a round that is closed; it is not used")
            return None
        got.seconds[client] = self.clock.monotonic() - asked.since
        if client in got.uploads:
            return None  # it came twice
        check_error(response)
        contract = self.contract.at(asked.version)
        message = wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up)
        if message.kind == wire.LOST:
            whole = Request(got.round.downloads.full_state(response.data, client), asked.accepted)
            self.note(got, {client: whole})
            got.downloads[client] = wire.Parts((whole.data,))
            return whole
        if (
            waited and active and message.version < asked.version
        ):  # it came twice, and its client trains a newer version
            self.asked[client] = asked
            self.say(got, f"{self.transport.name(client)} responded to a round that is closed; it is not used")
            return None
        known = ClientState(asked.version)  # the server knows only the version of a client's last accepted upload
        facts = response.loss, response.examples, known, response.evaluation
        reply = Reply(client, asked.version, response.data, *facts)
        upload = self.read(got, reply)
        got.replies[client] = reply
        return upload

    # -- requests and answers --------------------------------------------------------------------------------------

    def ask(
        self,
        got: FlowerCollected,
        requests: Mapping[int, Request],
        read: Callable[[int, Response], Any],
        deadline: Deadline,
        awaited: Set[int] | None = None,
        refuse: Callable[[int, str], None] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Send requests, and yield the answers as they arrive, with their clients.

        Args:
            got: counts what is received.
            requests: one for each client.
            read: returns what a response says; None if it is not an answer to a request of these; a request if the
                client needs that before it can answer. Raises WireError or Diverged if the response is refused.
            deadline: when to stop waiting for the last answer; it may be brought forward meanwhile.
            awaited: the clients whose answers end it; by default those of the requests.
            refuse: is called with a client and the reason.
        """
        self._send(got, requests, deadline)
        inbox, self.inbox = self.inbox, []
        restored = set[int]()
        for client, response in chain(inbox, self.transport.receive(awaited or requests.keys(), deadline)):
            got.bytes_up += len(response.data)
            got.up[client] += len(response.data)
            try:
                answer = read(client, response)
            except (WireError, Diverged) as error:
                bad = not response.error  # a client that could not respond does not lie
                (refuse or partial(self.refuse, got, bad=bad))(client, str(error))
                continue
            if not isinstance(answer, Request):
                if answer is not None:
                    yield client, answer
            elif client not in restored:
                restored.add(client)
                got.drifted += 1
                self._send(got, {client: answer}, deadline)

    def _send(self, got: FlowerCollected, requests: Mapping[int, Request], deadline: Deadline) -> None:
        for i, request in requests.items():
            got.down[i] += len(request.data)
            got.bytes_catchup += len(request.data)
        self.transport.send(requests, deadline.left())

    def say(self, got: Collected, line: str) -> None:
        """Log a line about a round."""
        self.log(f"round {got.number}: {line}")

    def site(self, client: int) -> str:
        """What records call a client: the name of its site on the roster, or its number."""
        return self.transport.name(client).removeprefix("site ")

    def names(self, clients: Iterable[int]) -> str:
        """The names of some clients, as text: at most 20."""
        first, rest = (some := list(clients))[:20], len(some) - 20
        return ", ".join([*map(self.transport.name, first), *([f"{rest} more"] if rest > 0 else [])])


def requests_to(clients: Iterable[int], got: FlowerCollected, phase: str = "") -> dict[int, Request]:
    """The requests that bring clients to the version of a round."""
    known = got.state.clients
    accepted = {i: known[i].version if i in known else -1 for i in clients}
    down = got.round.downloads.messages({i: max(0, version) for i, version in accepted.items()})
    return {i: Request(down[i], version, phase) for i, version in accepted.items()}


def check_error(response: Response) -> None:
    """Raise WireError if a client could not respond."""
    if response.error:
        words = "" if response.error.startswith(TOO_LONG) else "it could not respond: "
        raise WireError(f"{words}{visible(response.error, 300)}")
