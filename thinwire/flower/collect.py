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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import Diverged, WireError
from thinwire.federation.federation import Collected
from thinwire.flower.transport import TOO_LONG, ClientResponse, Deadline, Log, RoundPolicy, Transport
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Reply, Request, Response
from thinwire.protocol.state import ClientState
from thinwire.protocol.upload import MAX_EXAMPLES, Upload
from thinwire.runs.cohort_file import CohortLog
from thinwire.wire import message as wire


class Turn(NamedTuple):
    """A round that needs a cohort.

    Args:
        number: of the round.
        order: all eligible clients, in the order in which it takes them.
        kept: the cohort that the schedule keeps within its window; empty at the start of one.
        size: the number of uploads that the round is for.
        concurrent: of an asynchronous round, the number of clients that train at the same time; 0 otherwise.
        training: the clients that were asked in earlier rounds, and whose uploads this one can use.
    """

    number: int
    order: tuple[int, ...]
    kept: tuple[int, ...]
    size: int
    concurrent: int = 0
    training: Set[int] = frozenset()


class Asked(NamedTuple):
    """What a client was asked to train from, and when."""

    version: int
    accepted: int = -1  # the version of its last accepted upload
    since: float = 0.0  # on the clock of the server


@dataclass
class FlowerCollected(Collected):
    """What one round has received so far, and from whom.

    Args:
        size: the number of uploads that the round is for.
        requests: what clients were asked.
        logged: refused clients that are in the log.
        up: bytes that each client sent.
        down: bytes that each client was sent.
        seconds: until the last response of a client.
    """

    size: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    logged: set[int] = field(default_factory=set)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def counted(self) -> dict[int, Reply]:
        """The replies that are used."""
        return {i: self.replies[i] for i in self.uploads}

    def count(self, requests: Mapping[int, Request]) -> None:
        """Count requests that are sent."""
        for i, request in requests.items():
            self.downloads[i] = wire.Parts((request.data,))
            self.down[i] = self.down.get(i, 0) + len(request.data)


class Collector:
    """Draws the cohorts of rounds from the clients that are there, and collects their uploads.

    Args:
        contract: the contract.
        transport: carries the messages, and knows who is there.
        policy: how many are asked, and how long to wait.
        record: the cohorts of the run.
        log: receives a line for everything that was refused.
        clock: the clock.
    """

    def __init__(
        self, contract: Contract, transport: Transport, policy: RoundPolicy, record: CohortLog, log: Log, clock: Any
    ) -> None:
        self.contract, self.transport, self.policy = contract, transport, policy
        self.record, self.log, self.clock = record, log, clock
        self.asynchronous = contract.method.asynchronous
        self.busy: dict[int, Deadline] = {}  # clients that work on an earlier request, and for how long at most
        self.here: Set[int] = frozenset()  # who was there when this was last asked
        self._first = True  # of this process: clients need some time to connect
        self.training: dict[int, Asked] = {}  # the clients that were asked and have not responded
        self.inbox: list[ClientResponse] = []  # responses that arrived between two rounds

    # -- the cohort ------------------------------------------------------------------------------------------------

    def draw(self, turn: Turn) -> tuple[int, ...]:
        """The cohort of a round. A resumed round has its recorded cohort, unless some of it do not come back."""
        number, everyone = turn.number, frozenset(turn.order)
        before = self.record.rounds.get(number) if self._first else None
        old = before.cohort if before and everyone.issuperset(before.cohort) else ()
        known = everyone & self.transport.sites().keys() or everyone  # with a roster, others do not come
        wanted = (frozenset(old) or known) if self._first else frozenset()
        self._first = False
        here = self._wait(everyone, wanted, self.policy.needed(turn.size))
        if old and here >= frozenset(old):
            return old
        if gone := [self.transport.name(i) for i in old if i not in here]:
            self.log(f"round {number}: drawn again without {', '.join(gone)}, not back in {self.policy.wait:g} seconds")
        elif not wanted <= here:
            self.log(
                f"round {number}: {len(here)} of {len(known)} clients are there after {self.policy.wait:g} seconds"
            )
        cohort = self._chosen(turn, here)
        self.record.drawn(number, sorted(here), cohort)
        return cohort

    def _again(self, turn: Turn, cohort: tuple[int, ...], responded: Set[int]) -> tuple[int, ...]:
        """The cohort of a round with too few uploads: others take the places of those that did not respond."""
        here = self._wait(frozenset(turn.order), frozenset(), self.policy.needed(turn.size), responded)
        missing = max(len(cohort), self.policy.asked(turn.size)) - len(responded)
        free = [i for i in turn.order if i in here - self.working() and i not in cohort]
        if others := free[:missing]:
            names = ", ".join(map(self.transport.name, others))
            self.log(f"round {turn.number}: {names} take part in place of clients that did not respond")
            cohort = (*cohort, *others)
            self.record.drawn(turn.number, sorted(here), cohort)
        return cohort

    def available(self, cohort: Set[int], needed: int) -> Set[int]:
        """The clients of a cohort that are there, when so many of them are or `seconds` end."""
        return self._wait(cohort, frozenset(), needed)

    def working(self) -> Set[int]:
        """The clients that work on an earlier request."""
        return frozenset(client for client, until in self.busy.items() if until.left())

    def _chosen(self, turn: Turn, here: Set[int]) -> tuple[int, ...]:
        """The first clients that are there and idle; those that still work only if there are too few others."""
        needed, idle = self.policy.needed(turn.size), here - self.working()
        if turn.concurrent:
            places = turn.concurrent - len(turn.training & self.working())
            return tuple([i for i in turn.order if i in idle][: max(0, places)])
        ready = [i for i in turn.kept if i in idle]
        if len(ready) < needed or not turn.kept:
            ready += [i for i in turn.order if i in idle and i not in turn.kept]
            ready = ready[: self.policy.asked(turn.size)]
        if len(ready) < needed:
            ready += [i for i in turn.order if i in here and i not in idle]
        return tuple(ready[: max(self.policy.asked(turn.size), len(turn.kept))])

    def _wait(self, everyone: Set[int], wanted: Set[int], needed: int, responded: Set[int] = frozenset()) -> Set[int]:
        """Who is there, when all that are wanted are or `wait` seconds end, and enough are or `seconds` end."""
        for_all = Deadline(self.policy.wait if wanted else 0.0, self.clock)
        for_enough = Deadline(self.policy.seconds, self.clock)
        while True:
            here = frozenset(everyone & self.transport.clients())
            self.here, self.busy = here, {i: end for i, end in self.busy.items() if i in here}
            if (wanted <= here or not for_all.left()) and (len(here | responded) >= needed or not for_enough.left()):
                return here
            self.clock.sleep(min(1.0, self.policy.seconds / 10))

    # -- its uploads -----------------------------------------------------------------------------------------------

    def collect(self, got: FlowerCollected, turn: Turn) -> None:
        """Ask the cohort, and while there are too few uploads clients that did not respond, and others besides.

        Args:
            got: has the round; receives its uploads.
            turn: how its cohort is taken.
        """
        number, needed = turn.number, self.policy.needed(turn.size)
        for attempt in range(self.policy.tries):
            got.cohort = self._again(turn, got.cohort, got.uploads.keys()) if attempt else self.draw(turn)
            self._ask(got, self.requests(got))
            self.refuse(got)
            if len(got.uploads) >= needed:
                got.late -= got.uploads.keys() | got.refused.keys()
                if self.asynchronous.active:
                    got.cohort += tuple(i for i in (*got.uploads, *got.refused) if i not in got.cohort)
                elif got.late:
                    late = ", ".join(map(self.transport.name, sorted(got.late)))
                    self.log(
                        f"round {number}: closed with {len(got.uploads)} of {len(got.cohort)} clients; late: {late}"
                    )
                return
            self.log(f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients responded, {needed} are needed")
        raise WireError(
            f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients sent an upload that can be used, "
            f"{needed} are needed; `thinwire resume` continues when they are back"
        )

    def requests(self, got: FlowerCollected) -> dict[int, Request]:
        """The requests to the clients of a cohort that are there and have not sent an upload that can be used."""
        known, round = got.state.clients, got.round
        new = [i for i in got.cohort if i not in got.requests]
        accepted = {i: known[i].version if i in known else -1 for i in new}
        down = round.downloads({i: max(0, version) for i, version in accepted.items()})
        repeated = {i: request for i, request in got.requests.items() if i in self.here - got.uploads.keys()}
        got.requests |= {i: Request(down[i], accepted[i]) for i in new}
        asked = {i: got.requests[i] for i in got.cohort if i in repeated or i in new}
        ordinary, more = round.split({i: one.data for i, one in asked.items()})
        again, _ = round.split({i: one.data for i, one in repeated.items()})
        got.bytes_down += ordinary - again  # a repeated message counts as catching up
        got.bytes_catchup += more + again
        got.count(asked)
        return asked

    def _ask(self, got: FlowerCollected, requests: Mapping[int, Request]) -> None:
        """Collect the responses to requests; clients that request the whole state are sent it, while there is time."""
        busy, deadline = (Deadline(self.policy.seconds, self.clock) for _ in range(2))
        lost = self._exchange(got, requests, deadline)
        if len(got.uploads) < self.policy.needed(got.size) or self.policy.grace is None:
            deadline = Deadline(self.policy.seconds, self.clock)
        got.drifted += len(lost)
        full = self.asynchronous.active and len(got.uploads) >= got.size  # then they are sent it in a later round
        if lost and deadline.left() and not full:
            got.bytes_catchup += sum(len(request.data) for request in lost.values())
            got.count(lost)
            self._exchange(got, lost, deadline)
        # others are asked until these have responded
        self.busy |= dict.fromkeys(got.late - got.uploads.keys(), busy)

    def _exchange(
        self, got: FlowerCollected, requests: Mapping[int, Request], deadline: Deadline
    ) -> dict[int, Request]:
        """Collect the uploads that can be used; returns what clients need that requested the whole state."""
        lost: dict[int, Request] = {}
        needed, enough, began = self.policy.needed(got.size), False, self.clock.monotonic()

        def asked(i: int) -> Asked:
            return Asked(got.round.version, got.requests[i].accepted, began)

        self.training |= {i: asked(i) for i in requests}
        for client, response in self._responses(requests, lost, deadline):
            got.bytes_up += len(response.data)
            before = self.training.get(client) or (asked(client) if client in got.requests else None)
            older = before is not None and self._is_older(client, response, before)
            if not older:
                self.busy.pop(client, None)
                self.training.pop(client, None)
            if before is None or older:  # an upload to a round that is closed; the next request tells its client
                name = self.transport.name(client)
                self.log(f"round {got.number}: {name} responded to a round that is closed; it is not used")
                continue
            got.up[client] = got.up.get(client, 0) + len(response.data)
            got.seconds[client] = self.clock.monotonic() - before.since
            if client in got.uploads or client in lost:
                continue
            try:
                result = self._read(got, before, client, response)
            except (WireError, Diverged) as error:
                got.refused[client] = str(error)
                continue
            if isinstance(result, bytes):
                lost[client] = Request(result, before.accepted)
                got.requests.setdefault(client, lost[client])
                continue
            got.uploads[client] = result
            if self.policy.grace is not None and len(got.uploads) >= needed:
                deadline.at_most(self.policy.grace)
                enough = True
            everyone = not self.asynchronous.active and requests.keys() <= got.uploads.keys() | lost.keys()
            if len(got.uploads) >= got.size and not everyone:
                deadline.at_most(0.0)
                enough = True
                break
        if enough and not deadline.left():
            got.late |= requests.keys() - got.uploads.keys() - lost.keys() - got.refused.keys()
        return lost

    def _responses(
        self, requests: Mapping[int, Request], lost: Mapping[int, Request], deadline: Deadline
    ) -> Iterator[ClientResponse]:
        """The responses to requests; in an asynchronous round also those of clients that were asked before.

        It does not wait for these while clients are lost, which are sent the whole state first.
        """
        while self.inbox:
            yield self.inbox.pop(0)
        if requests:
            yield from self.transport.exchange(requests, deadline)
        for one in self.transport.remaining(deadline) if self.asynchronous.active and not lost else ():
            yield one
            if lost:
                return

    def refuse(self, got: FlowerCollected, refused: Mapping[int, str] = {}) -> None:
        """Remove uploads; each refused client is named once in the log of a round."""
        for i, why in refused.items():
            got.refused[i] = why
            got.uploads.pop(i, None)
            got.replies.pop(i, None)
        for i in sorted(got.refused.keys() - got.logged):
            self.log(f"round {got.number}: refused {self.transport.name(i)}: {got.refused[i]}")
        got.logged |= got.refused.keys()

    def _read(self, got: FlowerCollected, asked: Asked, client: int, response: Response) -> Upload | bytes:
        """The decoded upload of a response, or the whole state that a lost client needs; raises if it is refused."""
        if response.error:
            words = "" if response.error.startswith(TOO_LONG) else "it could not respond: "
            raise WireError(f"{words}{visible(response.error, 300)}")
        contract, round = self.contract.at(asked.version), got.round
        if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
            return round.full_state(response.data, client)
        known = ClientState(asked.version)  # the server knows only the version of a client's last accepted upload
        facts = response.loss, response.examples, known, response.evaluation
        reply = Reply(client, asked.version, response.data, *facts)
        upload = round.read(reply)
        if not (math.isfinite(response.loss) and 0 < response.examples <= MAX_EXAMPLES):
            raise Diverged(f"its training loss is {response.loss} over {response.examples} examples")
        got.replies[client] = reply
        return upload

    def _is_older(self, client: int, response: Response, asked: Asked) -> bool:
        """Whether a response is an upload of an earlier version than the client was asked to train: it came twice."""
        if not self.asynchronous.active or not response.data:
            return False
        contract = self.contract.at(asked.version)
        try:
            found = wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up)
        except WireError:
            return False
        return found.kind == wire.UP and found.version < asked.version

    def still_training(self, version: int, left_out: Set[int]) -> Set[int]:
        """The clients whose uploads later rounds can use; the others are forgotten.

        Args:
            version: the current one. A run that went back makes later versions a second time.
            left_out: clients whose uploads are not wanted.
        """
        active = self.asynchronous.active
        kept = {i: one for i, one in self.training.items() if active and one.version < version and i not in left_out}
        self.training = kept
        return kept.keys()

    def ask_idle(self, requests: Mapping[int, Request], deadline: Deadline) -> Iterator[ClientResponse]:
        """The responses to requests between two rounds; those of clients that train are kept for the next round."""
        for one in self.transport.exchange(requests, deadline):
            if one.client in requests:
                yield one
            elif self.asynchronous.active:
                self.inbox.append(one)

    def idle(self) -> Set[int]:
        """The clients that are there; in asynchronous rounds without those that train, which are not interrupted."""
        here = self.transport.clients()
        return here - self.working() if self.asynchronous.active else here
