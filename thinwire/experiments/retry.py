"""Going back when training fails: to the last healthy state, with half the client learning rate.

    fails        a value is not finite (`Diverged`), or accuracy or loss collapses (`Course.too_fast`)
    good state   the newest that an evaluation found healthy, kept every `checkpoint.every` rounds; else the initial one
    then         factor of the learning rate = schedule(t) * 0.5^(number of retries from version t or before)

The rates are a function of the version (`HalvedLR`), a warm-up does not start again, and clients go back to their own
states of that round. Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record
that follows, so that sums over records are what was sent. `retries.json` lists the retries with these rounds' records.
It is written first: a process that is killed at any moment and resumed goes on with the same bits.

A deployment goes back otherwise (`Unfit`): to the state before a round in which clients were far off, with the same
learning rate, and without these clients for some rounds. `retries.json` lists that, too.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError, Diverged, Unfit
from thinwire.experiments.collapse import Verdict
from thinwire.experiments.loop import Checkpoints, Collapsed, Stop, rounds
from thinwire.experiments.records import ROLLED_BACK
from thinwire.experiments.retry_store import Retry, Store
from thinwire.optimizers.lr_schedules import HalvedLR
from thinwire.protocol.method import Method
from thinwire.runtime.engine import EngineSettings
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.runtime.runner import LeavesOut, Runner

MOST_RETRIES = 5
MOST_ROLLBACKS = 20
LEFT_OUT_ROUNDS = 10  # without a client that was far off, the first time; each further time twice as many


@dataclass
class Rescue:
    """Trains the rounds of a run, and goes back where training fails.

    Args:
        prepare: makes the runner of a job.
        job: the job, with the learning rates of the first try.
        store: the last good state and the retries so far.
        every: rounds between two good states.
        name: of the run, in the line about a retry.
        active: whether to go back; if not, an error ends the run, as it does after five retries.
        begin: is called with the runner and the state before the first round of each try.
    """

    prepare: Callable[[Job], Runner]
    job: Job
    store: Store
    every: int
    name: str = ""
    active: bool = True
    begin: Callable[[Runner, RunState], RunState] = lambda simulation, state: state

    def runner(self, first: Runner) -> Runner:
        """The runner with the learning rates after the retries so far."""
        self._leave_out(first)
        halving = [retry for retry in self.store.retries if retry.halves]
        if not halving:
            return first
        return self._prepared([retry.from_version for retry in halving])

    def _leave_out(self, runner: Runner) -> None:
        """Tell the server of a deployment which clients are left out."""
        if isinstance(runner, LeavesOut):
            times = [(retry.from_round, retry.left_out) for retry in self.store.retries]
            runner.leave_out(left_out_until(times), len(self.store.retries))

    def _prepared(self, at: Sequence[int]) -> Runner:
        """The runner with learning rates that are halved at these versions."""
        return self.prepare(dataclasses.replace(self.job, method=halved(self.job.method, at)))

    def rounds(
        self,
        simulation: Runner,
        state: RunState,
        stop: Stop,
        records: list[RoundRecord],
        checkpoints: Checkpoints | None = None,
        on_message: OnMessage | None = None,
    ) -> Iterator[tuple[Runner, RunState, RoundRecord]]:
        """Train the rounds that are left; yields the runner, the state and the record after each.

        Args:
            simulation: the runner, with the learning rates after the retries so far.
            state: the state to continue from.
            stop: when the run ends.
            records: the records of the rounds before; the caller appends to them, here they are cut.
            checkpoints: how the state is saved; not at all by default.
            on_message: is called with every message.
        """
        on_healthy = self._keep if self.active else None
        while True:
            try:
                state = self.begin(simulation, state)
                loop = rounds(
                    simulation,
                    state,
                    stop,
                    records=records,
                    checkpoints=checkpoints,
                    on_message=on_message,
                    on_healthy=on_healthy,
                    completed=self._with_abandoned,
                )
                for state, record in loop:
                    yield simulation, state, record
                return
            except Unfit as error:
                state = self._roll_back(simulation, state, error, records)
            except Diverged as error:
                if not self.active or len(self.store.retries) == MOST_RETRIES:
                    raise self._last(error) from error
                simulation, state = self._back(state, error, records)

    def _keep(self, state: RunState) -> None:
        if state.round - self.store.good_round >= self.every:
            self.store.keep(state)

    def _with_abandoned(self, record: RoundRecord) -> RoundRecord:
        lost = sum(retry.bytes for retry in self.store.retries if retry.from_round == record.round - 1)
        return record._replace(bytes_abandoned=lost) if lost else record

    def _last(self, error: Diverged) -> Diverged:
        """The error that ends the run."""
        if not self.active or not self.store.retries:
            return error
        verdict = verdict_of(error, 0)
        what = f"{verdict.status}: {error}" if isinstance(error, Collapsed) else str(error)
        count, rate = len(self.store.retries), f"{self.store.retries[-1].lr:.4g}"
        return Diverged(f"{what}; also after {count} retries, with learning rate {rate}", error.sent)

    def _roll_back(self, runner: Runner, state: RunState, error: Unfit, records: list[RoundRecord]) -> RunState:
        """The state that a deployment goes back to, without the clients that were far off; raises if it cannot."""
        done = state.round if error.back_to is None else error.back_to
        version = self.store.version_of(done)
        if version is None or sum(not retry.halves for retry in self.store.retries) >= MOST_ROLLBACKS:
            raise error
        lost = [record._asdict() for record in records[done:]]
        sums = [sum(line[f"bytes_{way}"] for line in lost) for way in ("up", "down", "catchup")]
        up, down, catchup = (total + last for total, last in zip(sums, error.sent, strict=True))
        lr = runner.contract.at(version).client_opt(version).lr
        facts = (state.round + 1, ROLLED_BACK, str(error), done, version, lr)
        seconds = sum(line["seconds"] for line in lost)
        retry = Retry(*facts, up, down, catchup, seconds, lost, sorted(error.far))
        del records[done:]
        found = self.store.go_back(retry)
        self._leave_out(runner)
        return found or runner.start()

    def _back(self, state: RunState, error: Diverged, records: list[RoundRecord]) -> tuple[Runner, RunState]:
        """The runner with half the rate, and the state that it continues from."""
        verdict, good, version = verdict_of(error, state.round), self.store.good_round, self.store.good_version
        lost = [record._asdict() for record in records[good:]]
        sums = [sum(line[f"bytes_{way}"] for line in lost) for way in ("up", "down", "catchup")]
        up, down, catchup = (total + last for total, last in zip(sums, error.sent, strict=True))
        at = (*(retry.from_version for retry in self.store.retries), version)
        simulation = self._prepared(at)
        lr = simulation.contract.at(version).client_opt(version).lr
        facts = (verdict.round or 0, verdict.status, verdict.why, good, version, lr)
        seconds = sum(line["seconds"] for line in lost)
        retry = Retry(*facts, up, down, catchup, seconds, lost)
        count = f"(retry {len(at)} of {MOST_RETRIES})"
        warnings.warn(f"{self.name}: {retry.line} {count}" if self.name else f"{retry.line} {count}", stacklevel=2)
        del records[good:]
        found = self.store.go_back(retry)
        return simulation, found or simulation.start()


def verdict_of(error: Diverged, done: int) -> Verdict:
    """The verdict of an error after this number of rounds."""
    if isinstance(error, Collapsed):
        return error.verdict._replace(round=done)
    why = str(error).removeprefix(f"round {done + 1}: ")
    return Verdict("diverged", done + 1, why)


def left_out_until(times: Iterable[tuple[int, Iterable[int]]]) -> dict[int, int]:
    """The last round without each client.

    Args:
        times: for each time that a run went back, the rounds done in the state that it went back to, and the clients
            that were left out.

    >>> left_out_until([(5, [3]), (20, [3, 4])])
    {3: 40, 4: 30}
    """
    until: dict[int, int] = {}
    counts: dict[int, int] = {}
    for done, clients in times:
        for client in clients:
            counts[client] = counts.get(client, 0) + 1
            until[client] = done + LEFT_OUT_ROUNDS * 2 ** (counts[client] - 1)
    return until


def halved(method: Method, at: Sequence[int]) -> Method:
    """The method with a client learning rate that is halved from each of these versions on.

    >>> halved(Method(), (0, 20)).client_opt_at(20).lr
    0.025
    """
    return method.replace(lr_schedule=HalvedLR(tuple(at), method.lr_schedule)) if at else method


def check_retry(method: Method, engine: EngineSettings) -> None:
    """Refuse what cannot go back."""
    opt, asked = method.client_opt, "on_divergence = 'retry'"
    if not dataclasses.is_dataclass(opt) or not any(part.name == "lr" for part in dataclasses.fields(opt)):
        raise ConfigError(f"{asked} halves the learning rate, but {opt!r} has no setting lr; write 'stop'")
    if method.privacy.active:
        raise ConfigError(f"{asked} would not count the privacy that abandoned rounds spend; write 'stop'")
    if engine.workers:
        raise ConfigError(f"{asked} cannot start the processes of engine.workers again; write workers = 0")
    if method.penalty.active and engine.device != "cpu" and engine.backend in ("auto", "graph"):
        raise ConfigError(
            f"{asked} changes the learning rate, which a CUDA graph with a penalty cannot; write backend = 'vmap'"
        )
