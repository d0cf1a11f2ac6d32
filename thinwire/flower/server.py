"""The server of a deployment: request, wait, check, decide. It knows a transport, not what is behind it.

What can go wrong, and what then happens:

    a client is not connected                  the cohort is drawn from those that are (`collect.py`)
    a client is absent, or too late            the round continues without it, if enough others responded (`quorum`),
                                               `grace` seconds after these
    fewer responded                            asked again (they repeat their upload), and others in their place; then
                                               the run stops: resume
    a message is damaged, much too long, of    refused and counted; the client's state does not change
      another version or method, or not finite
    a client is malicious                      bounded by the medians of cohort and latest rounds, or refused
                                               (`norm_bound.py`); outvoted, if the method has a robust aggregator
    the next state is not fit                  the run goes back without the clients that were far off (`guard.py`)
    a response arrives twice                   the first counts
    a client is too late for its round         in asynchronous rounds its upload counts in a later one
    a client was absent, or lost its state     the shortest download from its version; or the whole state, on request
    a response was lost                        the client returns to its state before it (`client.py`)
    the server is killed                       it resumes at its checkpoint; clients repeat their last upload
    two servers                                the lock of the run directory stops the second
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.core.key import SecretKey
from thinwire.core.text import visible
from thinwire.core.tree import Tree, restrict, to_device
from thinwire.errors import Diverged, Unfit, WireError
from thinwire.federation.client_evaluations import with_client_accuracies
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import Federation, OnMessage, show_messages
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.site_record import SiteRecord, Status
from thinwire.flower.collect import Collected, Collector, Turn
from thinwire.flower.guard import far_off, reported, similarity, training_loss
from thinwire.flower.secure_round import SecureRound, VersionSpent, skip_version
from thinwire.flower.site_evaluation import evaluated_at_sites
from thinwire.flower.transport import Log, RoundPolicy, Transport
from thinwire.protocol.contract import Contract
from thinwire.protocol.norm_bound import reference
from thinwire.protocol.recent import Recent
from thinwire.protocol.server import ClosedRound, Terms, close_round
from thinwire.protocol.state import ClientState, ServerState
from thinwire.runs.cohort_file import CohortLog
from thinwire.schedules.base import Plan
from thinwire.secure.keys import need_cryptography
from thinwire.secure.masks import sum_masked

OnSites = Callable[[Sequence[SiteRecord]], None]
MOST_SKIPPED = 500  # versions in one round: after a restored checkpoint, those that clients have answered


class FlowerServer:
    """A job whose clients are in other processes. `round` is that of a simulation, over a transport.

    Args:
        engine: the device of the server.
        job: what is trained; of the clients' examples only their number is used.
        connect: returns, for a contract and a number of clients, the transport to them.
        policy: how long to wait, and for how many.
        log: receives a line for everything that was refused.
        record: the cohorts of the run; by default they are kept in memory.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`, so that the run goes back.
        clock: the clock that limits waits.
    """

    def __init__(
        self,
        engine: EngineSettings,
        job: Job,
        connect: Callable[[Contract, int], Transport],
        policy: RoundPolicy | None = None,
        log: Log = lambda line: None,
        record: CohortLog | None = None,
        on_sites: OnSites = lambda records: None,
        goes_back: bool = False,
        clock: Any = time,
    ) -> None:
        if job.method.secure_aggregation:
            need_cryptography()
        self.federation, self.job = Federation(engine, job), job
        self.contract = self.federation.contract
        self.transport = connect(self.contract, len(job.task.clients))
        self.policy, self.log = policy or RoundPolicy(), log
        self.collector = Collector(self.contract, self.transport, self.policy, record or CohortLog(), log, clock)
        self.on_sites, self.goes_back = on_sites, goes_back
        self.left_out: Mapping[int, int] = {}  # clients, and the last round without them
        self.attempt = 0  # how often the run went back

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
        began, number = time.perf_counter(), state.round + 1
        if self.job.method.secure_aggregation:
            state, plan, got = self._collect_secure(state)
        else:
            plan = self.federation.sample(state)[0]
            got = self.collector.collect(state, plan, self._turn(state, plan))
        server = state.server
        closed = self._close(state, plan, got)
        up = {i: got.responses[i].data for i in got.cohort if i in got.uploads}
        asynchronous = self.job.method.asynchronous.active
        based = [got.based[i] for i in sorted(up)] if asynchronous else None
        self.collector.record.closed(number, sorted(up), sorted(got.late), based)
        if on_message:
            show_messages(on_message, number, {i: request.data for i, request in got.requests.items()}, up)
        # the server knows only the version of a client's last accepted upload
        versions = {i: got.based.get(i, server.public.version) for i in up}
        clients = {**state.clients, **{i: ClientState(version) for i, version in versions.items()}}
        contract = self.contract.at(server.public.version)
        after = state._replace(
            round=number,
            server=closed.server,
            clients=clients,
            cohort=got.cohort,
            sync_counts=state.sync_counts.add(contract, plan, up),
            recent=self._recent(state, got, closed),
        )
        record = self._record(state, got, closed)
        with self.federation.compute():
            after = self.federation.with_average(after)
            if self.federation.is_evaluated(number):
                record = self.federation.evaluated(after, record)
        if asynchronous:
            record = record._replace(staleness=sum(server.public.version - v for v in versions.values()) / len(up))
        record = evaluated_at_sites(self.federation, self.collector, after, record)
        return after, record._replace(seconds=time.perf_counter() - began)

    def leave_out(self, until: Mapping[int, int], attempt: int) -> None:
        """Leave clients out of cohorts.

        Args:
            until: the last round without each of them.
            attempt: how often the run went back so far.
        """
        self.left_out, self.attempt = dict(until), attempt

    def _turn(self, state: RunState, plan: Plan) -> Turn:
        """How the cohort of the next round is taken; within a window of the schedule it is kept.

        Clients that are left out are not taken, as long as there are others.
        """
        sampler, out = self.federation.sampler, {i for i, until in self.left_out.items() if state.round < until}
        order = tuple(i for i in sampler.order(state.round) if i not in out) or sampler.order(state.round)
        kept = () if plan.resample else tuple(i for i in state.cohort if i in order)
        size, asynchronous = min(sampler.size, len(order)), self.job.method.asynchronous
        concurrent = asynchronous.clients(size, len(order)) if asynchronous.active else 0
        training = self.collector.still_training(state.server.public.version, out)
        return Turn(state.round + 1, order, kept, size, concurrent, training)

    def _record(self, state: RunState, got: Collected, closed: ClosedRound) -> RoundRecord:
        """The record of a round, without evaluation; those of its clients are written."""
        number = state.round + 1
        counted = got.counted
        loss, odd = training_loss(counted, self.job.method.norm_bound, state.recent)
        bounded = {i: why for i, why in {**odd, **closed.bounded}.items() if i in counted}
        for i, why in bounded.items():
            self.log(f"round {number}: bounded {self.transport.name(i)}: {why}")
        self._write_sites(state, got, bounded, closed.norms)
        places = max(len(got.cohort), got.size) - len(got.late)
        spent = self.federation.epsilon(number, *self.collector.record.extremes())
        record = RoundRecord(
            *(number, loss, None, None, got.bytes_up, got.bytes_down, got.bytes_catchup, len(counted), 0.0),
            lr=self._lr(state.server),
            drifted=got.drifted,
            refused=len(got.refused),
            bounded=len(bounded),
            absent=places - len(counted) - len(got.refused.keys() - counted.keys()),
            late=len(got.late),
            epsilon=(spent or (None,))[0],
        )
        # of the model that clients received, which is that of the round before
        evaluations = [one.evaluation.accuracy for one in counted.values() if one.evaluation]
        return with_client_accuracies(record, [one for one in evaluations if one is not None and 0 <= one <= 1])

    def _collect_secure(self, state: RunState) -> tuple[RunState, Plan, Collected]:
        """Uploads whose masks cancel in their sum; also state and plan, which change if versions had to be skipped."""
        skipped: list[bool] = []  # for each version, whether clients trained it
        wasted = 0
        while True:
            plan = self.federation.sample(state)[0]
            turn, version = self._turn(state, plan), state.server.public.version
            got = Collected(turn.number, turn.size, cohort=self.collector.draw(turn))
            try:
                SecureRound(self.collector, self.job, state, plan, got).collect()
                got.bytes_catchup += wasted
                return state, plan, got
            except VersionSpent as spent:
                skipped.append(spent.trained)
                wasted += sum(got.sent_bytes)
                start = f"round {turn.number}: "
                if sum(skipped) > self.policy.tries or len(skipped) > MOST_SKIPPED:
                    raise WireError(
                        f"{start}{len(skipped)} versions were spent ({spent}); `thinwire resume` continues"
                    ) from spent
                self.log(f"{start}{spent}; version {version} is skipped, since no client answers a version twice")
                state = state._replace(server=skip_version(self.contract, state.server, plan))

    def _close(self, state: RunState, plan: Plan, got: Collected) -> ClosedRound:
        """The closed round; clients that it refuses are removed from what was received."""
        number, server = got.number, state.server
        losses = [abs(one.loss) for one in got.counted.values()]
        if state.recent.loss_is_unfit(loss := reference(losses) if losses else 0.0):
            self._go_back(state, got, f"the median loss is {loss:.3g}, far above that of the latest rounds")
        try:
            noise = SecretKey.draw()  # noise from the seed, which clients know, would hide nothing from them
            recent = state.recent.sizes(self._lr(server))
            terms = Terms(len(self.job.task.clients), noise, recent, sum_masked)
            closed = close_round(self.contract, server, plan, got.uploads, terms)
        except Unfit as error:
            self.collector.refuse(got, error.far)
            self._write_sites(state, got)
            raise Unfit(f"round {number}: {error}", error.far, got.sent_bytes, state.round) from error
        except Diverged as error:
            self._go_back(state, got, str(error))
            raise Diverged(f"round {number}: {error}") from error
        self.collector.refuse(got, closed.refused)
        return closed

    def _recent(self, state: RunState, got: Collected, closed: ClosedRound) -> Recent:
        """What is remembered of the latest rounds after this one."""
        recent, lr, counted = state.recent, self._lr(state.server), got.counted
        named = zip(("loss", "examples"), reported(counted), strict=True)
        medians = {**closed.medians, **{name: reference(values, recent.of(name)) for name, values in named}}
        norms = {client: size for client, size in closed.norms.items() if client in counted}
        return recent.after(medians, lr, far_off(norms, recent.sizes(lr).get("code", 0.0)))

    def _go_back(self, state: RunState, got: Collected, why: str) -> None:
        """Raise `Unfit` if clients were far off in the round that made this state."""
        names = " and ".join(map(self.transport.name, state.recent.far))
        if not self.goes_back or not names or self.job.method.privacy.active:  # abandoned rounds spend privacy, too
            return
        line = f"round {got.number}: {why}, and {names} was far off in round {state.round}"
        self.log(f"{line}; the run goes back to round {state.round - 1} without")
        far = dict.fromkeys(state.recent.far, f"far off in round {state.round}")
        raise Unfit(line, far, got.sent_bytes, state.round - 1)

    def _lr(self, server: ServerState) -> float:
        """The learning rate of the clients."""
        return self.contract.at(server.public.version).client_opt(server.public.version).lr

    def _write_sites(
        self, state: RunState, got: Collected, bounded: Mapping[int, str] = {}, norms: Mapping[int, float] = {}
    ) -> None:
        """Pass on the lines of `sites.jsonl`: what each client of the cohort sent, and what became of it."""
        hidden = self.job.method.secure_aggregation  # the server has no update of a single client
        updates, start = {} if hidden else {i: one.code for i, one in got.uploads.items()}, Tree()
        if updates and self.job.method.upload == "weights":
            start = to_device(restrict(state.server.public.coords, next(iter(updates.values())).keys()), "cpu")
        lengths, cosines = similarity(updates, start)
        lengths |= norms
        records = []
        for i in got.cohort:
            status, why = _status(i, got, bounded)
            records.append(
                SiteRecord(
                    round=got.number,
                    site=self.transport.name(i),
                    client=i,
                    status=status,
                    norm=_finite(lengths.get(i)),
                    cosine=_finite(cosines.get(i)),
                    loss=_finite(got.responses[i].loss if i in got.uploads else None),
                    seconds=round(got.seconds[i], 3) if i in got.seconds else None,
                    bytes_up=got.up.get(i, 0),
                    bytes_down=got.down.get(i, 0),
                    why=visible(why, 300),
                    attempt=self.attempt,
                )
            )
        self.on_sites(records)


def _status(client: int, got: Collected, bounded: Mapping[int, str]) -> tuple[Status, str]:
    if client in got.uploads:
        return ("bounded", bounded[client]) if client in bounded else ("accepted", "")
    if client in got.refused:
        return "refused", got.refused[client]
    if client in got.late:
        return "late", "the round was closed before it responded"
    return "absent", "no response in time"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
