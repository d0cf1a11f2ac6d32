"""The server of a deployment: request, wait, check, decide. It knows a transport, not what is behind it.

What can go wrong, and what then happens:

    a client is absent, or too late            the round continues without it, if enough others responded (`quorum`)
    fewer responded                            asked again (they repeat their upload), then the run stops: resume
    a message is damaged, much too long, of    refused and counted; the client's state does not change
      another version or method, or not finite
    a client is malicious                      bounded by the medians of cohort and latest rounds, or refused
                                               (`norm_bound.py`); outvoted, if the method has a robust aggregator
    the next state is not fit                  the run goes back without the clients that were far off (`recent.py`)
    a response arrives twice                   the first counts
    a client was absent, or lost its state     the shortest download from its version; or the whole state, on request
    a response was lost                        the client returns to its state before it (`client_store.py`)
    the server is killed                       it resumes at its checkpoint; clients repeat their last upload
    two servers                                the lock of the run directory stops the second
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.core.text import visible
from thinwire.core.tree import Tree
from thinwire.errors import Diverged, IncompatibleParts, WireError
from thinwire.flower.client_store import Request, Response
from thinwire.flower.guard import Guard, OnSites
from thinwire.flower.left_out import replaced
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.site_stats import Traffic
from thinwire.flower.transport import TOO_LONG, Transport
from thinwire.protocol.contract import Contract
from thinwire.protocol.server import ClosedRound, full_state_message, open_round, split_download
from thinwire.protocol.state import ClientState, ServerState
from thinwire.protocol.upload import MOST_EXAMPLES, Upload, decode_upload, trained_by_tier
from thinwire.runtime.engine import EngineSettings
from thinwire.runtime.federation import Federation, OnMessage, show_messages, with_client_accuracies
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.schedules.base import Plan
from thinwire.wire import message as wire

Log = Callable[[str], None]


class _Round(NamedTuple):
    """A round that is open."""

    number: int
    server: ServerState
    plan: Plan
    trained: Mapping[int, Tree]  # the values that clients of each tier train


@dataclass
class _Collected:
    """What one round has received so far."""

    responses: dict[int, Response] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_catchup: int = 0
    drifted: int = 0
    traffic: Traffic = field(default_factory=Traffic)  # by client
    logged: set[int] = field(default_factory=set)  # refused clients that the log has named


class FlowerServer:
    """A job whose clients are in other processes. `round` is that of a simulation, over a transport.

    Args:
        engine: the device of the server.
        job: what is trained; of the clients' examples only their number is used.
        connect: returns, for a contract and a number of clients, the transport to them.
        policy: how long to wait, and for how many.
        log: receives a line for everything that was refused.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`, so that the run goes back.
    """

    def __init__(
        self,
        engine: EngineSettings,
        job: Job,
        connect: Callable[[Contract, int], Transport],
        policy: RoundPolicy | None = None,
        log: Log = lambda line: None,
        on_sites: OnSites = lambda records: None,
        goes_back: bool = False,
    ) -> None:
        if job.method.secure_aggregation:
            raise IncompatibleParts(
                "secure_aggregation = true needs secrets between clients, which a deployment does not establish yet. "
                "Write secure_aggregation = false, or simulate"
            )
        self.federation, self.job = Federation(engine, job), job
        self.contract = self.federation.contract
        self.transport = connect(self.contract, len(job.task.clients))
        self.policy, self.log = policy or RoundPolicy(), log
        self.guard = Guard(self.federation, self.transport, log, on_sites, goes_back)
        self._waited = False  # nodes need some time to connect

    def start(self) -> RunState:
        """The state before the first round."""
        return self.federation.start("loop", "clients are in other processes")

    def choose_backend(self, state: RunState) -> RunState:
        """The same state: clients train in other processes."""
        return state

    def convolutions(self, state: RunState) -> str:
        """How clients compute convolutions: with torch's own."""
        return "torch"

    def round(self, state: RunState, on_message: OnMessage | None = None) -> tuple[RunState, RoundRecord]:
        """One round: the state after it, and its record."""
        began, number, server = time.perf_counter(), state.round + 1, state.server
        plan, cohort = self.federation.sample(state)
        cohort = self._replaced(number, cohort)
        trained = trained_by_tier(self.contract, server.public, cohort)
        accepted = {i: state.clients[i].version if i in state.clients else -1 for i in cohort}
        down = open_round(self.contract, server, {i: max(0, version) for i, version in accepted.items()})
        requests = {i: Request(down[i], accepted[i]) for i in cohort}
        got = self._collect(_Round(number, server, plan, trained), requests)
        closed = self.guard.close(state, plan, got, cohort)
        up = {i: got.responses[i].data for i in cohort if i in got.uploads}
        if on_message:
            show_messages(on_message, number, down, up)
        # the server knows only the version of a client's last accepted upload
        clients = {**state.clients, **{i: ClientState(server.public.version) for i in up}}
        contract = self.contract.at(server.public.version)
        after = state._replace(round=number, server=closed.server, clients=clients, cohort=cohort)
        after = after._replace(
            sync_counts=state.sync_counts.add(contract, plan, up), recent=self.guard.recent(state, got, closed)
        )
        record = self._record(state, got, closed, cohort)
        with self.federation.compute():
            after = self.federation.with_average(after)
            if self.federation.is_evaluated(number):
                record = self.federation.evaluated(after, record)
        return after, record._replace(seconds=time.perf_counter() - began)

    def leave_out(self, until: Mapping[int, int], attempt: int) -> None:
        """Leave clients out of cohorts.

        Args:
            until: the last round without each of them.
            attempt: how often the run went back so far.
        """
        self.guard.left_out, self.guard.attempt = dict(until), attempt

    def _replaced(self, number: int, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """The cohort with other clients, drawn from the seed, in place of those that are left out."""
        key = self.federation.key.fold("instead", number)
        return replaced(cohort, self.guard.out(number), self.federation.eligible, key)

    def _record(self, state: RunState, got: _Collected, closed: ClosedRound, cohort: tuple[int, ...]) -> RoundRecord:
        """The record of a round, without evaluation."""
        number, version = state.round + 1, state.server.public.version
        loss, bounded = self.guard.record(state, got, closed, cohort)
        counted = {i: got.responses[i] for i in got.uploads}
        record = RoundRecord(
            *(number, loss, None, None, got.bytes_up, got.bytes_down, got.bytes_catchup, len(counted), 0.0),
            lr=self.contract.at(version).client_opt(version).lr,
            drifted=got.drifted,
            refused=len(got.refused),
            bounded=bounded,
            absent=len(cohort) - len(counted) - len(got.refused.keys() - counted.keys()),
            epsilon=(self.federation.epsilon(number) or (None,))[0],
        )
        # of the model that clients received, which is that of the round before
        return with_client_accuracies(record, [one.accuracy for one in counted.values() if 0 <= one.accuracy <= 1])

    def _collect(self, opened: _Round, requests: Mapping[int, Request]) -> _Collected:
        """Send the requests, and again to clients that did not respond while there are too few."""
        number, got, needed = opened.number, _Collected(), self.policy.needed(len(requests))
        for attempt in range(self.policy.tries):
            here = self._available(requests.keys(), needed)
            asked = {i: request for i, request in requests.items() if i in here and i not in got.uploads}
            sent = {i: request.data for i, request in asked.items()}
            for i, data in sent.items():
                got.traffic.sent(i, len(data))
            ordinary, more = split_download(self.contract, opened.server, sent)
            again = ordinary if attempt else 0  # a repeated message counts as catching up
            got.bytes_down, got.bytes_catchup = got.bytes_down + ordinary - again, got.bytes_catchup + more + again
            lost = self._exchange(got, opened, asked)
            if lost:
                got.drifted += len(lost)
                got.bytes_catchup += sum(len(request.data) for request in lost.values())
                for i, request in lost.items():
                    got.traffic.sent(i, len(request.data))
                self._exchange(got, opened, lost)
            self.guard.refuse(number, got)
            if len(got.uploads) >= needed:
                return got
            self.log(f"round {number}: {len(got.uploads)} of {len(requests)} clients responded, {needed} are needed")
        raise WireError(
            f"round {number}: {len(got.uploads)} of {len(requests)} clients sent an upload that can be used, {needed} "
            "are needed; `thinwire resume` continues when they are back"
        )

    def _available(self, cohort: Set[int], needed: int) -> Set[int]:
        """The clients that can be asked. The first round waits for the whole cohort, later ones for enough of it."""
        end = time.monotonic() + self.policy.seconds
        wanted = needed if self._waited else len(cohort)
        while len(here := cohort & self.transport.clients()) < wanted and time.monotonic() < end:
            time.sleep(min(1.0, self.policy.seconds / 10))
        self._waited = True
        return here

    def _exchange(self, got: _Collected, opened: _Round, asked: Mapping[int, Request]) -> dict[int, Request]:
        """Collect the uploads that can be used; returns what clients need that requested the whole state."""
        lost: dict[int, Request] = {}
        if not asked:
            return lost
        began = time.perf_counter()
        for client, response in self.transport.exchange(asked, self.policy.seconds):
            got.bytes_up += len(response.data)
            if client in asked:
                got.traffic.received(client, len(response.data), time.perf_counter() - began)
            if client not in asked or client in got.uploads or client in lost:
                continue
            try:
                result = self._read(opened, client, response)
            except (WireError, Diverged) as error:
                got.refused[client] = str(error)
                continue
            if isinstance(result, bytes):
                lost[client] = Request(result, asked[client].accepted)
            else:
                got.uploads[client], got.responses[client] = result, response
        return lost

    def _read(self, opened: _Round, client: int, response: Response) -> Upload | bytes:
        """The decoded upload of a response, or the whole state that a lost client needs; raises if it is refused."""
        if response.error:
            words = "" if response.error.startswith(TOO_LONG) else "it could not respond: "
            raise WireError(f"{words}{visible(response.error, 300)}")
        version = opened.server.public.version
        contract = self.contract.at(version)
        if wire.unpack(response.data, contract.schema.sent_by(client), contract.longest_up).kind == wire.LOST:
            return full_state_message(self.contract, opened.server, response.data, client)
        trained = opened.trained[contract.tier(client)]
        upload = decode_upload(contract, opened.plan, version, client, response.data, trained)
        if not (math.isfinite(response.loss) and 0 < response.examples <= MOST_EXAMPLES):
            raise Diverged(f"its training loss is {response.loss} over {response.examples} examples")
        return upload
