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
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import Clients, Collected, Federation
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.site_record import SiteRecord, Status
from thinwire.flower.collect import Collector, FlowerCollected, Turn
from thinwire.flower.guard import far_off, reported, similarity, training_loss
from thinwire.flower.secure_round import SecureRound, VersionSpent, skip_version
from thinwire.flower.site_evaluation import evaluated_at_sites
from thinwire.flower.transport import Log, RoundPolicy, Transport
from thinwire.protocol.bounds import reference
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Closed, Round
from thinwire.runs.cohort_file import CohortLog
from thinwire.secure.keys import need_cryptography
from thinwire.secure.masks import sum_masked

OnSites = Callable[[Sequence[SiteRecord]], None]
MAX_SKIPPED = 500  # versions in one round: after a restored checkpoint, those that clients have answered


class FlowerServer(Federation):
    """A federation whose clients are in other processes.

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

        def clients(federation: Federation) -> FlowerClients:
            transport = connect(federation.contract, len(job.task.clients))
            rules = policy or RoundPolicy()
            collector = Collector(federation.contract, transport, rules, record or CohortLog(), log, clock)
            return FlowerClients(federation, collector, on_sites, goes_back)

        super().__init__(engine, job, clients)


class FlowerClients(Clients):
    """Clients in other processes, reached over a transport.

    Args:
        federation: the federation that they take part in.
        collector: draws cohorts and collects their uploads.
        on_sites: receives the records of all clients of a round.
        goes_back: whether a state that is not fit ends the round with `Unfit`.
    """

    def __init__(self, federation: Federation, collector: Collector, on_sites: OnSites, goes_back: bool) -> None:
        super().__init__(federation)
        self.collector, self.transport, self.policy = collector, collector.transport, collector.policy
        self.log, self.on_sites, self.goes_back = collector.log, on_sites, goes_back
        self.left_out: Mapping[int, int] = {}  # clients, and the last round without them
        self.attempt = 0  # how often the run went back

    def open(self, round: Round, state: RunState) -> FlowerCollected:
        """A round before anything was received."""
        return FlowerCollected(round, state)

    def collect(self, got: Collected) -> None:
        """Collect the uploads of a cohort that is drawn from the clients that are there."""
        assert isinstance(got, FlowerCollected)
        if self.job.method.secure_aggregation:
            return self._collect_secure(got)
        turn = self._turn(got.round, got.state)
        got.size = turn.size
        return self.collector.collect(got, turn)

    def leave_out(self, until: Mapping[int, int], attempt: int) -> None:
        """Leave clients out of cohorts."""
        self.left_out, self.attempt = dict(until), attempt

    def evaluate(self, state: RunState, record: RoundRecord) -> RoundRecord:
        """The record with evaluations at the sites, where there is no test set."""
        return evaluated_at_sites(self.federation, self.collector, state, record)

    def _turn(self, round: Round, state: RunState) -> Turn:
        """How the cohort of the next round is taken; within a window of the schedule it is kept.

        Clients that are left out are not taken, as long as there are others.
        """
        sampler, out = self.federation.sampler, {i for i, until in self.left_out.items() if state.round < until}
        order = tuple(i for i in sampler.order(state.round) if i not in out) or sampler.order(state.round)
        kept = () if round.plan.resample else tuple(i for i in state.cohort if i in order)
        size, asynchronous = min(sampler.size, len(order)), self.job.method.asynchronous
        concurrent = asynchronous.clients(size, len(order)) if asynchronous.active else 0
        training = self.collector.still_training(round.version, out)
        return Turn(state.round + 1, order, kept, size, concurrent, training)

    def _collect_secure(self, got: FlowerCollected) -> None:
        """Uploads whose masks cancel in their sum; state and round change if versions had to be skipped."""
        skipped: list[bool] = []  # for each version, whether clients trained it
        wasted = 0
        while True:
            turn = self._turn(got.round, got.state)
            got.cohort, got.size = self.collector.draw(turn), turn.size
            try:
                SecureRound(self.collector, self.job, got).collect()
                got.bytes_catchup += wasted
                return
            except VersionSpent as spent:
                skipped.append(spent.trained)
                wasted += sum(got.sent)
                start, version = f"round {turn.number}: ", got.round.version
                if sum(skipped) > self.policy.tries or len(skipped) > MAX_SKIPPED:
                    raise WireError(
                        f"{start}{len(skipped)} versions were spent ({spent}); `thinwire resume` continues"
                    ) from spent
                self.log(f"{start}{spent}; version {version} is skipped, since no client answers a version twice")
                state = got.state._replace(server=skip_version(self.contract, got.state.server, got.round.plan))
                vars(got).update(vars(self.open(Round.open(self.contract, state.server), state)))  # begin again

    def close(self, got: Collected) -> Closed:
        """The next version; clients that are refused then are removed from what was received."""
        assert isinstance(got, FlowerCollected)
        state, recent = got.state, got.state.recent
        losses = [abs(one.loss) for one in got.counted.values()]
        if recent.loss_is_unfit(loss := reference(losses) if losses else 0.0):
            self._go_back(got, f"the median loss is {loss:.3g}, far above that of the latest rounds")
        lr = self.contract.at(got.round.version).client_opt(got.round.version).lr
        try:
            noise = SecretKey.draw()  # noise from the seed, which clients know, would hide nothing from them
            registered = len(self.job.task.clients)
            closed = got.round.close(got.uploads, registered, noise, recent.sizes(lr), sum_masked)
        except Unfit as error:
            self.collector.refuse(got, error.far)
            self._write_sites(got)
            raise Unfit(f"round {got.number}: {error}", error.far, got.sent, state.round) from error
        except Diverged as error:
            self._go_back(got, str(error))
            raise
        self.collector.refuse(got, closed.refused)
        asynchronous = self.job.method.asynchronous.active
        used, counted = sorted(got.uploads), got.counted
        based = [got.replies[i].version for i in used] if asynchronous else None
        self.collector.record.closed(got.number, used, sorted(got.late), based)
        got.loss, odd = training_loss(counted, self.job.method.norm_bound, recent)
        got.bounded = {i: why for i, why in {**odd, **closed.bounded}.items() if i in counted}
        for i, why in got.bounded.items():
            self.log(f"round {got.number}: bounded {self.transport.name(i)}: {why}")
        self._write_sites(got, closed.norms)
        places = max(len(got.cohort), got.size) - len(got.late)
        got.absent = places - len(counted) - len(got.refused.keys() - counted.keys())
        got.asked = self.collector.record.extremes()
        named = zip(("loss", "examples"), reported(counted), strict=True)
        medians = {**closed.medians, **{name: reference(values, recent.of(name)) for name, values in named}}
        norms = {client: size for client, size in closed.norms.items() if client in counted}
        far = far_off(norms, recent.sizes(lr).get("code", 0.0))
        got.state = state._replace(recent=recent.after(medians, lr, far))
        return closed

    def _go_back(self, got: FlowerCollected, why: str) -> None:
        """Raise `Unfit` if clients were far off in the round that made this state."""
        done, far = got.state.round, got.state.recent.far
        names = " and ".join(map(self.transport.name, far))
        if not self.goes_back or not names or self.job.method.privacy.active:  # abandoned rounds spend privacy, too
            return
        line = f"round {got.number}: {why}, and {names} was far off in round {done}"
        self.log(f"{line}; the run goes back to round {done - 1} without")
        raise Unfit(line, dict.fromkeys(far, f"far off in round {done}"), got.sent, done - 1)

    def _write_sites(self, got: FlowerCollected, norms: Mapping[int, float] = {}) -> None:
        """Pass on the lines of `sites.jsonl`: what each client of the cohort sent, and what became of it."""
        hidden = self.job.method.secure_aggregation  # the server has no update of a single client
        updates, start = {} if hidden else {i: one.code for i, one in got.uploads.items()}, Tree()
        if updates and self.job.method.upload == "weights":
            start = to_device(restrict(got.round.server.public.coords, next(iter(updates.values())).keys()), "cpu")
        lengths, cosines = similarity(updates, start)
        lengths |= norms
        records = []
        for i in got.cohort:
            status, why = _status(i, got)
            records.append(
                SiteRecord(
                    round=got.number,
                    site=self.transport.name(i),
                    client=i,
                    status=status,
                    norm=_finite(lengths.get(i)),
                    cosine=_finite(cosines.get(i)),
                    loss=_finite(got.replies[i].loss if i in got.uploads else None),
                    seconds=round(got.seconds[i], 3) if i in got.seconds else None,
                    bytes_up=got.up.get(i, 0),
                    bytes_down=got.down.get(i, 0),
                    why=visible(why, 300),
                    attempt=self.attempt,
                )
            )
        self.on_sites(records)


def _status(client: int, got: FlowerCollected) -> tuple[Status, str]:
    if client in got.uploads:
        return ("bounded", got.bounded[client]) if client in got.bounded else ("accepted", "")
    if client in got.refused:
        return "refused", got.refused[client]
    if client in got.late:
        return "late", "the round was closed before it responded"
    return "absent", "no response in time"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
