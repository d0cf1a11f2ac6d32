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
                                               (`protocol/bounds.py`); outvoted, if the method has a robust aggregator
    the next state is not fit                  the run goes back without the clients that were far off (below)
    a response arrives twice                   the first counts
    a client is too late for its round         in asynchronous rounds its upload counts in a later one
    a client was absent, or lost its state     the shortest download from its version; or the whole state, on request
    a response was lost                        the client returns to its state before it (`client.py`)
    the server is killed                       it resumes at its checkpoint; clients repeat their last upload
    two servers                                the lock of the run directory stops the second

Which reports and updates are far from those of the others:

    bounds     uploads, losses and numbers of examples are compared with the medians of the latest rounds, too
               (`protocol/bounds.py`), so that a cohort of one client, or of mostly malicious ones, is bounded
    far off    the norm of a client's update is above 3 times the median of its round or of the latest rounds
    not fit    the median loss that the next cohort reports is above 3 times the median of the latest rounds, and above
               3 times that of each of the last three

A state that is not fit, after a round with clients far off, is given up: the run goes back to the state before that
round and leaves these clients out (`runs/retry.py`). Without such clients the run continues.

Evaluation at the sites, for a server without test data: after a round, clients evaluate its model on their examples.

Every client that is there is asked, not the cohort alone; after a quorum, the server waits `grace` seconds. A request
is the download that takes the client to the new version; the client evaluates that model on its validation examples,
keeps nothing, and sends numbers. The downloads count as catch-up.

    a number that is not finite, an accuracy outside 0 to 1, a metric that the job does not have    refused
    examples                                    at most 1,000 times the median client's count in means
    losses                                      at most 10 times the median client's in means
    a metric that is not finite                 left out: it is not defined for this client
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from thinwire.core.key import Key, SecretKey
from thinwire.core.text import visible
from thinwire.errors import Diverged, Unfit, WireError
from thinwire.federation.evaluation import as_numbers, bounded, with_client_evaluations
from thinwire.federation.federation import Collected
from thinwire.federation.job import RoundRecord, RunState
from thinwire.flower.collect import Collector, FlowerCollected, check_error, requests_to
from thinwire.flower.policy import Deadline
from thinwire.flower.secure_round import SecureRound, VersionSpent, skip_version
from thinwire.protocol.bounds import Recent, reference
from thinwire.protocol.round import EVALUATE, Closed, Response, Round
from thinwire.protocol.upload import MAX_EXAMPLES
from thinwire.runs.deployment_records import SiteRecord, Status
from thinwire.secure.frames import threshold
from thinwire.training.evaluation import Evaluation

MAX_SKIPPED = 500  # versions in one round: after a restored checkpoint, those that clients have answered


class FlowerClients(Collector):
    """Clients in other processes, reached over a transport: opens and closes rounds."""

    def open(self, round: Round, state: RunState) -> FlowerCollected:
        """A round before anything was received, without clients that are left out."""
        sampler, out = self.federation.sampler, self.left_out(state)
        order = tuple(i for i in sampler.order(state.round) if i not in out)
        self.forget(round.version, out.keys())
        size = min(sampler.size, len(order))
        least = threshold(size) if self.job.method.secure_aggregation else 1
        needed = max(least, self.policy.needed(size))
        return FlowerCollected(round, state, left_out=out, order=order, size=size, needed=needed)

    def collect(self, got: Collected) -> None:
        """Collect the uploads of a cohort that is drawn from the clients that are there."""
        assert isinstance(got, FlowerCollected)
        if not self.job.method.secure_aggregation:
            return self.collect_uploads(got)
        spent: list[VersionSpent] = []
        while True:
            self.draw(got)
            try:
                return SecureRound(self, got).collect()
            except VersionSpent as error:
                spent.append(error)
                if sum(one.trained for one in spent) > self.policy.tries or len(spent) > MAX_SKIPPED:
                    line = f"{len(spent)} versions were spent ({error}); the same command continues"
                    raise WireError(f"round {got.number}: {line}") from error
                skipped = f"version {got.round.version} is skipped, since no client answers a version twice"
                self.say(got, f"{error}; {skipped}")
                state = got.state._replace(server=skip_version(self.contract, got.state.server, got.round.plan))
                again = self.open(Round.open(self.contract, state.server), state)
                again.bytes_catchup = sum(got.sent)  # what was sent for nothing
                vars(got).update(vars(again))

    def evaluate(self, state: RunState, record: RoundRecord) -> RoundRecord:
        """The record with the evaluations of the clients that are there, if the round is evaluated at sites.

        It is where there is no test set, and clients hold examples out. Not with secure aggregation: the server must
        learn no number of a single client.
        """
        task, method, start = self.job.task, self.job.method, f"round {record.round}: "
        at_sites = task.test is None and task.client_tests is not None and not method.secure_aggregation
        if not at_sites or not self.federation.is_evaluated(record.round):
            return record
        here = self.transport.clients() & set(self.federation.eligible)
        if self.asynchronous.active:  # those that train are not interrupted
            here -= self.working()
        got = FlowerCollected(Round.open(self.federation.contract, state.server), state)
        requests = requests_to(sorted(here), got, EVALUATE)
        found: dict[int, Evaluation] = {}

        def read(client: int, response: Response) -> Evaluation | None:
            if client not in requests and self.asynchronous.active:
                self.inbox.append((client, response))  # of a client that trains: it counts in the next round
            return None if client not in requests or client in found else checked(response, self.job.all_metrics)

        def refuse(client: int, why: str) -> None:
            self.log(f"{start}no evaluation of {self.names([client])}: {why}")

        deadline = Deadline(self.policy.seconds, self.clock)
        for client, one in self.ask(got, requests, read, deadline, refuse=refuse):
            found[client] = one
            self.end_soon(deadline, len(found), self.policy.needed(len(requests)))
        if not found:
            self.log(f"{start}no client evaluated the model")
        named = {self.site(client): as_numbers(found[client]) for client in sorted(found)}
        record = record._replace(sites_eval=named, bytes_catchup=record.bytes_catchup + got.bytes_catchup)
        return in_record(record, [found[client] for client in sorted(found)])

    def noise(self) -> Key | None:
        """A secret: noise from the seed, which clients know, would hide nothing from them."""
        return SecretKey.draw()

    def close(self, got: Collected) -> Closed:
        """The next version, or `Unfit`; the records of cohort and clients."""
        assert isinstance(got, FlowerCollected)
        state, method = got.state, self.job.method
        losses = [abs(one.loss) for one in got.counted.values()]
        if state.recent.loss_is_unfit(loss := reference(losses) if losses else 0.0):
            self._go_back(got, f"the median loss is {loss:.3g}, far above that of the latest rounds")
        try:
            closed = super().close(got)
        except Unfit as error:
            for client, why in error.far.items():
                self.refuse(got, client, why)
            self._write_sites(got)
            raise Unfit(f"round {got.number}: {error}", error.far, got.sent, state.round) from error
        except Diverged as error:
            self._go_back(got, str(error))
            raise
        counted = got.counted
        based = [counted[i].version for i in sorted(counted)] if method.asynchronous.active else None
        self.record.closed(got.number, sorted(counted), sorted(got.late), based)
        got.asked = self.record.extremes()
        self._write_sites(got)
        places = max(len(got.cohort), got.size) - len(got.late)
        got.absent = places - len(counted.keys() | got.refused.keys())
        return closed

    def _go_back(self, got: FlowerCollected, why: str) -> None:
        """Raise `Unfit` if clients were far off in the round that made this state."""
        _, far, good = got.state.recent
        if not self.goes_back or not far or self.job.method.privacy.active:  # abandoned rounds spend privacy, too
            return
        line = f"{why}, and {self.names(far)} was far off in round {good + 1}"
        self.say(got, f"{line}; the run goes back to round {good} without")
        raise Unfit(f"round {got.number}: {line}", dict.fromkeys(far, f"far off in round {good + 1}"), got.sent, good)

    def _write_sites(self, got: FlowerCollected) -> None:
        """Pass on the lines of `sites.jsonl`: what each client of the cohort sent, and what became of it."""
        losses = {i: one.loss for i, one in got.counted.items()}
        norms = {i: one.norm for i, one in got.uploads.items()}
        records, available = [], set(self.record.rounds[got.number].available)
        there = (available - self.asked.keys()).union(got.cohort)  # else it works on an earlier request
        away = [i for i in sorted(self.transport.known() & set(got.order)) if i not in there]
        for i in (*got.cohort, *away):
            status, why = _status(i, got)
            why = "not connected" if i in away and i not in available else why
            numbers = (one[i] if math.isfinite(one.get(i, math.nan)) else None for one in (norms, losses))
            seconds = round(got.seconds[i], 3) if i in got.seconds else None
            facts: Any = (*numbers, seconds, got.up[i], got.down[i], why, self.attempt)
            records.append(SiteRecord(got.number, self.site(i), i, status, *facts))
        for i, why in sorted(got.left_out.items()):
            records.append(SiteRecord(got.number, self.site(i), i, "left out", why=why, attempt=self.attempt))
        self.on_sites(records)
        gone = ", ".join(f"{self.names([one.client])} ({one.why})" for one in records if one.status == "absent")
        if gone not in ("", self.gone):
            self.say(got, f"without {gone}")
        self.gone = gone


def _status(client: int, got: FlowerCollected) -> tuple[Status, str]:
    if client in got.uploads:
        return ("bounded", got.bounded[client]) if client in got.bounded else ("accepted", "")
    if client in got.refused:
        return "refused", visible(got.refused[client], 300)
    if client in got.late:
        return "late", "the round was closed before it responded"
    return "absent", "no response in time"


def checked(response: Response, metrics: Collection[str]) -> Evaluation:
    """The evaluation in a response; raises if one of its numbers is not valid.

    Args:
        response: the response, not trusted.
        metrics: the names of the metrics of the job.

    >>> checked(Response(b"", evaluation=Evaluation(0.5, 1.5, {}, 10)), ())
    Traceback (most recent call last):
    thinwire.errors.WireError: its evaluation is not valid: loss 0.5, accuracy 1.5, 10 examples, metrics []
    """
    check_error(response)
    if (found := response.evaluation) is None:
        raise WireError("it has no validation examples")
    loss, accuracy, values, examples = found
    sound = math.isfinite(loss) and (accuracy is None or 0 <= accuracy <= 1) and 0 < examples <= MAX_EXAMPLES
    if not sound or not values.keys() <= set(metrics):
        what = f"loss {loss}, accuracy {accuracy}, {examples} examples, metrics {sorted(values)}"
        raise WireError(f"its evaluation is not valid: {visible(what, 200)}")
    return found


def in_record(record: RoundRecord, found: Sequence[Evaluation]) -> RoundRecord:
    """The record with means and quantiles over clients; examples and losses far above the median are bounded.

    Args:
        record: the record of the round.
        found: the evaluation of each client.
    """
    if not found:
        return record
    losses, weights, _ = bounded(found, Recent(), [0] * len(found))
    fair = [one._replace(loss=loss) for one, loss in zip(found, losses, strict=True)]
    return with_client_evaluations(record, fair, weights)
