"""Collect the uploads of a round: ask its cohort, wait for enough, and close without those that are late.

while fewer than `quorum` have sent an upload that can be used, at most `tries` times:
    the cohort, from the clients that are there      `cohorts.py`; others in place of those that did not respond
    send the requests, and read what arrives         until all responded, `seconds` end, `grace` seconds after the
                                                     quorum, or when as many responded as the cohort has places
    send the whole state to clients that request it

An asynchronous round (`Asynchronous`) ends when as many uploads have arrived as the cohort has places, also of clients
that were asked in earlier rounds. Their uploads are decoded as of the version that they were asked to train from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.tree import Tree
from thinwire.errors import Diverged, WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.cohorts import CohortSampler, Turn
from thinwire.flower.deadline import Deadline
from thinwire.flower.site_stats import Traffic
from thinwire.flower.transport import ClientResponse, Transport
from thinwire.protocol.contract import Contract
from thinwire.protocol.server import open_round, split_download
from thinwire.protocol.state import ServerState
from thinwire.protocol.upload import Upload, trained_by_tier
from thinwire.runtime.job import RunState
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire


class OpenRound(NamedTuple):
    """A round that is open."""

    number: int
    server: ServerState
    plan: Plan
    trained: Mapping[int, Tree] = {}  # the values that clients of each tier train
    base: int | None = None  # the version that clients train from; None for that of the server

    @property
    def version(self) -> int:
        """The version that clients train from."""
        return self.server.public.version if self.base is None else self.base


class Asked(NamedTuple):
    """What a client was asked, and when."""

    version: int
    plan: Plan
    trained: Mapping[int, Tree]
    accepted: int  # the version of its last accepted upload
    since: float  # on the clock of the server


@dataclass
class Collected:
    """What one round has received so far."""

    size: int  # the number of uploads that the round is for
    responses: dict[int, Response] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    cohort: tuple[int, ...] = ()
    requests: dict[int, Request] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # clients that the round did not wait for
    logged: set[int] = field(default_factory=set)  # refused clients that are in the log
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_catchup: int = 0
    drifted: int = 0
    based: dict[int, int] = field(default_factory=dict)  # the version that each upload was trained from
    traffic: Traffic = field(default_factory=Traffic)  # by client


class Collector:
    """Collects the uploads of rounds.

    Args:
        contract: the contract.
        cohorts: takes the cohort of a round; has the transport, the policy, the log and the clock.
        read: decodes the upload of a response, or returns the whole state that a lost client needs; raises if the
            response is refused.
        refuse: logs the refused clients of a round, each once.
    """

    def __init__(
        self,
        contract: Contract,
        cohorts: CohortSampler,
        read: Callable[[OpenRound, int, Response], Upload | bytes],
        refuse: Callable[[int, Collected], None],
    ) -> None:
        self.contract, self.cohorts, self.read, self.refuse = contract, cohorts, read, refuse
        self.asynchronous = contract.method.asynchronous
        self.training: dict[int, Asked] = {}  # the clients that were asked and have not responded
        self.inbox: list[ClientResponse] = []  # responses that arrived between two rounds
        self.transport, self.policy, self.log, self.clock = (
            cohorts.transport,
            cohorts.policy,
            cohorts.log,
            cohorts.clock,
        )

    def collect(self, state: RunState, opened: OpenRound, turn: Turn) -> Collected:
        """Ask the cohort, and while there are too few uploads clients that did not respond, and others besides.

        Args:
            state: the state before the round.
            opened: the round.
            turn: how its cohort is taken.
        """
        number, got, needed = opened.number, Collected(turn.size), self.policy.needed(turn.size)
        for attempt in range(self.policy.tries):
            got.cohort = (
                self.cohorts.again(turn, got.cohort, got.uploads.keys()) if attempt else self.cohorts.draw(turn)
            )
            opened = opened._replace(trained=trained_by_tier(self.contract, opened.server.public, got.cohort))
            self._ask(got, opened, self.requests(state, got), needed)
            self.refuse(number, got)
            if len(got.uploads) >= needed:
                got.late -= got.uploads.keys() | got.refused.keys()
                if self.asynchronous.active:
                    got.cohort += tuple(i for i in (*got.uploads, *got.refused) if i not in got.cohort)
                elif got.late:
                    late = ", ".join(map(self.transport.name, sorted(got.late)))
                    self.log(
                        f"round {number}: closed with {len(got.uploads)} of {len(got.cohort)} clients; late: {late}"
                    )
                return got
            self.log(f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients responded, {needed} are needed")
        raise WireError(
            f"round {number}: {len(got.uploads)} of {len(got.cohort)} clients sent an upload that can be used, "
            f"{needed} are needed; `thinwire resume` continues when they are back"
        )

    def requests(self, state: RunState, got: Collected) -> dict[int, Request]:
        """The requests to the clients of a cohort that are there and have not sent an upload that can be used."""
        new = [i for i in got.cohort if i not in got.requests]
        accepted = {i: state.clients[i].version if i in state.clients else -1 for i in new}
        down = open_round(self.contract, state.server, {i: max(0, version) for i, version in accepted.items()})
        repeated = {i: request for i, request in got.requests.items() if i in self.cohorts.here - got.uploads.keys()}
        got.requests |= {i: Request(down[i], accepted[i]) for i in new}
        asked = {i: got.requests[i] for i in got.cohort if i in repeated or i in new}
        ordinary, more = split_download(self.contract, state.server, {i: one.data for i, one in asked.items()})
        again, _ = split_download(self.contract, state.server, {i: one.data for i, one in repeated.items()})
        got.bytes_down += ordinary - again  # a repeated message counts as catching up
        got.bytes_catchup += more + again
        for i, request in asked.items():
            got.traffic.sent(i, len(request.data))
        return asked

    def _ask(self, got: Collected, opened: OpenRound, asked: Mapping[int, Request], needed: int) -> None:
        """Collect the responses to requests; clients that request the whole state are sent it, while there is time."""
        busy, deadline = (Deadline(self.policy.seconds, self.clock) for _ in range(2))
        lost = self._exchange(got, opened, asked, deadline)
        if len(got.uploads) < needed or self.policy.grace is None:
            deadline = Deadline(self.policy.seconds, self.clock)
        got.drifted += len(lost)
        full = (
            self.asynchronous.active and len(got.uploads) >= got.size
        )  # then lost clients are sent it in a later round
        if lost and deadline.left() and not full:
            for i, request in lost.items():
                got.bytes_catchup += len(request.data)
                got.traffic.sent(i, len(request.data))
            self._exchange(got, opened, lost, deadline)
        self.cohorts.late(got.late - got.uploads.keys(), busy)

    def _exchange(
        self, got: Collected, opened: OpenRound, asked: Mapping[int, Request], deadline: Deadline
    ) -> dict[int, Request]:
        """Collect the uploads that can be used; returns what clients need that requested the whole state."""
        lost: dict[int, Request] = {}
        needed, enough, began = self.policy.needed(got.size), False, self.clock.monotonic()
        self.training |= {i: one for i in asked if (one := self._asked(opened, got, i, began))}
        for client, response in self._responses(asked, lost, deadline):
            got.bytes_up += len(response.data)
            before = self.training.get(client) or self._asked(opened, got, client, began)
            if before is not None and self._is_older(client, response, before):
                self._unused(opened.number, client)
                continue
            self.cohorts.responded(client)
            self.training.pop(client, None)
            if before is None:
                self._unused(opened.number, client)
                continue
            got.traffic.received(client, len(response.data), self.clock.monotonic() - before.since)
            if client in got.uploads or client in lost:
                continue
            try:
                result = self._result(opened, before, client, response)
            except (WireError, Diverged) as error:
                got.refused[client] = str(error)
                continue
            if isinstance(result, bytes):
                lost[client] = Request(result, before.accepted)
                got.requests.setdefault(client, lost[client])
                continue
            got.uploads[client], got.responses[client], got.based[client] = result, response, before.version
            if self.policy.grace is not None and len(got.uploads) >= needed:
                deadline.at_most(self.policy.grace)
                enough = True
            everyone = not self.asynchronous.active and asked.keys() <= got.uploads.keys() | lost.keys()
            if len(got.uploads) >= got.size and not everyone:
                deadline.at_most(0.0)
                enough = True
                break
        if enough and not deadline.left():
            got.late |= asked.keys() - got.uploads.keys() - lost.keys() - got.refused.keys()
        return lost

    def _responses(
        self, asked: Mapping[int, Request], lost: Mapping[int, Request], deadline: Deadline
    ) -> Iterator[ClientResponse]:
        """The responses to requests; in an asynchronous round also those of clients that were asked before.

        It does not wait for these while clients are lost, which are sent the whole state first.
        """
        while self.inbox:
            yield self.inbox.pop(0)
        if asked:
            yield from self.transport.exchange(asked, deadline)
        for one in self.transport.remaining(deadline) if self.asynchronous.active and not lost else ():
            yield one
            if lost:
                return

    def _result(self, opened: OpenRound, asked: Asked, client: int, response: Response) -> Upload | bytes:
        """The upload of a response with its staleness, or the whole state that a lost client needs."""
        then = opened._replace(plan=asked.plan, trained=asked.trained, base=asked.version)
        result, staleness = self.read(then, client, response), opened.version - asked.version
        if isinstance(result, bytes):
            return result
        if self.asynchronous.is_too_stale(staleness):
            raise WireError(
                f"it trained version {asked.version}, {staleness} versions ago, and at most "
                f"{self.asynchronous.most_stale} are used"
            )
        return result._replace(staleness=staleness)

    def _asked(self, opened: OpenRound, got: Collected, client: int, since: float) -> Asked | None:
        """What a client was asked in this round; None if it was not."""
        if client not in got.requests:
            return None
        return Asked(opened.version, opened.plan, opened.trained, got.requests[client].accepted, since)

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

    def _unused(self, number: int, client: int) -> None:
        """Log an upload to a round that is closed, which is not used; the next request tells its client."""
        self.log(f"round {number}: {self.transport.name(client)} responded to a round that is closed; it is not used")

    def idle(self) -> Transport:
        """The transport for requests between two rounds: to clients that do not train, which are not interrupted."""
        return IdleClients(self) if self.asynchronous.active else self.transport


class IdleClients:
    """A transport to the clients that do not train; responses of the others are kept for the next round.

    Args:
        collector: collects the uploads of rounds.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector, self.transport = collector, collector.transport
        self.name, self.sites, self.remaining = self.transport.name, self.transport.sites, self.transport.remaining

    def clients(self) -> Set[int]:
        """The clients that are there and do not train."""
        return self.transport.clients() - self.collector.cohorts.working()

    def exchange(self, requests: Mapping[int, Request], seconds: float | Deadline) -> Iterator[ClientResponse]:
        """The responses to these requests."""
        for one in self.transport.exchange(requests, seconds):
            if one.client in requests:
                yield one
            else:
                self.collector.inbox.append(one)
