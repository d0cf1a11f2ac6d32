"""Going back when training fails: to the newest checkpoint, with half the client learning rate.

    fails        a value is not finite (`Diverged`), or accuracy or loss collapses (`Course.too_fast`)
    checkpoints  states that an evaluation found healthy, `checkpoint.every` rounds apart; before the first, the start
    then         factor of the learning rate = schedule(t) * 0.5^(number of retries from version t or before)

The rates are a function of the version (`HalvedLR`), a warm-up does not start again, and clients go back to their own
states of that round. Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record
that follows, so that sums over records are what was sent. `retries.json` lists the retries with these rounds' records.
A process that is killed at any moment and resumed goes on with the same bits.

A deployment goes back otherwise (`Unfit`): to the state before a round in which clients were far off, with the same
learning rate, and without these clients for some rounds. `thinwire resume --from` goes back by hand (`roll_back`).
Clients of a deployment that are ahead of the server receive the whole state.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import CheckpointError, ConfigError, Diverged, Unfit
from thinwire.federation.engine import EngineSettings
from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.optimizers.lr_schedules import HalvedLR
from thinwire.protocol.method import Method
from thinwire.runs.files import read_checked
from thinwire.runs.loop import Checkpoints, Collapsed, Stop, rounds
from thinwire.runs.records import ROLLED_BACK, rounds_in
from thinwire.runs.run_directory import RETRIES, RunFolder

MAX_RETRIES = 5
MAX_ROLLBACKS = 20
LEFT_OUT_ROUNDS = 10  # without a client that was far off, the first time; each further time twice as many


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `diverged`, `collapsed` or `at chance`; or `rolled back`: in a deployment, or by hand
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate from there on
    bytes_abandoned: int  # of the abandoned rounds, with what the failed one sent
    records: list[dict[str, Any]]  # of the abandoned rounds
    left_out: Sequence[int] = ()  # clients of a deployment that are left out of the next cohorts

    @property
    def halves(self) -> bool:
        """Whether the learning rate is halved from there on."""
        return self.status != ROLLED_BACK

    def as_summary(self) -> dict[str, Any]:
        """The keys of a summary."""
        return {
            key: value for key, value in self._asdict().items() if key != "records" and (value or key != "left_out")
        }


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / RETRIES
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} holds no retries that this version reads; `--overwrite` runs from the start"
        ) from error


@dataclass
class Rescue:
    """Trains the rounds of a run, and goes back where training fails.

    Args:
        prepare: makes the runner of a job.
        job: the job, with the learning rates of the first try.
        folder: the run directory, with the retries so far; None for a run without one.
        device: the device of states that are loaded.
        every: rounds between two good states.
        active: whether to halve the learning rate; if not, an error ends the run, as it does after five retries.
        begin: is called with the runner and the state before the first round of each try.
    """

    prepare: Callable[[Job], Federation]
    job: Job
    folder: RunFolder | None
    device: str
    every: int
    active: bool = True
    begin: Callable[[Federation, RunState], RunState] = lambda runner, state: state
    good: RunState | None = None  # the newest good state, without a directory; states never change

    def __post_init__(self) -> None:
        self.retries = read_retries(self.folder.path) if self.folder else []
        if self.folder:
            self.folder.retries = len(self.retries)

    @property
    def round(self) -> int:
        """The round of the newest good state; 0 for the initial one."""
        if self.folder:
            return max(rounds_in(self.folder.checkpoints), default=0)
        return self.good.round if self.good else 0

    def runner(self, first: Federation) -> Federation:
        """The runner with the learning rates after the retries so far."""
        self._leave_out(first)
        return self._prepared() if any(retry.halves for retry in self.retries) else first

    def _leave_out(self, runner: Federation) -> None:
        """Tell the server of a deployment which clients are left out."""
        times = [(retry.from_round, retry.left_out) for retry in self.retries]
        runner.clients.leave_out(left_out_until(times), len(self.retries))

    def _prepared(self, *more: int) -> Federation:
        """The runner with learning rates that are halved at the versions of the retries so far, and at `more`."""
        at = (*(retry.from_version for retry in self.retries if retry.halves), *more)
        return self.prepare(dataclasses.replace(self.job, method=halved(self.job.method, at)))

    def rounds(
        self,
        simulation: Federation,
        state: RunState,
        stop: Stop,
        records: list[RoundRecord],
        checkpoints: Checkpoints | None = None,
        on_message: OnMessage | None = None,
    ) -> Iterator[tuple[Federation, RunState, RoundRecord]]:
        """Train the rounds that are left; yields the runner, the state and the record after each.

        Args:
            simulation: the runner, with the learning rates after the retries so far.
            state: the state to continue from.
            stop: when the run ends.
            records: the records of the rounds before; the caller appends to them, here they are cut.
            checkpoints: how the state is saved; not at all by default.
            on_message: is called with every message.
        """

        def keep(good: RunState) -> None:
            if good.round - self.round < self.every:
                return
            if checkpoints:
                checkpoints.save(good)
            else:
                self.good = good

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
                    on_healthy=keep if self.active else None,
                    completed=self._with_abandoned,
                )
                for state, record in loop:
                    yield simulation, state, record
                return
            except Diverged as error:
                simulation, state = self._back(simulation, state, error, records)

    def _with_abandoned(self, record: RoundRecord) -> RoundRecord:
        lost = sum(retry.bytes_abandoned for retry in self.retries if retry.from_round == record.round - 1)
        return record._replace(bytes_abandoned=lost) if lost else record

    def _back(
        self, runner: Federation, state: RunState, error: Diverged, records: list[RoundRecord]
    ) -> tuple[Federation, RunState]:
        """The runner and the state to continue with: half the rate, or without clients; raises if it cannot."""
        unfit, failed = isinstance(error, Unfit), state.round + 1
        before = [retry for retry in self.retries if retry.halves != unfit]
        if isinstance(error, Unfit):
            number = state.round if error.back_to is None else error.back_to
            status, why, left_out = ROLLED_BACK, str(error), error.far
            start = self._load(number)
            if (number and start is None) or len(before) >= MAX_ROLLBACKS:
                raise error
        else:
            if not self.active:
                raise error
            if len(before) >= MAX_RETRIES:
                what = f"{error.verdict.status}: {error}" if isinstance(error, Collapsed) else str(error)
                tried = f"{len(before)} retries, with learning rate {before[-1].lr:.4g}"
                raise Diverged(f"{what}; also after {tried}", error.sent) from error
            number, left_out = self.round, {}
            status, why = "diverged", str(error).removeprefix(f"round {failed}: ")
            if isinstance(error, Collapsed):
                failed, (status, _, why) = state.round, error.verdict
            start = self._load(number)
        version = start.server.public.version if start else 0
        runner = runner if unfit else self._prepared(version)
        lr = runner.contract.at(version).client_opt(version).lr
        sent, lost = _abandoned(records, number)
        del records[number:]
        sent += sum(error.sent)
        self.retries.append(Retry(failed, status, why, number, version, lr, sent, lost, sorted(left_out)))
        if self.folder:
            self.folder.go_back(number, [one._asdict() for one in self.retries])
        self._leave_out(runner)
        if not unfit:
            name, back = f"{self.folder.path}: " if self.folder else "", f"round {number}" if number else "the start"
            text = f"{name}round {failed} {status}: {why}; back to {back} with learning rate {lr:.4g}"
            warnings.warn(f"{text} (retry {len(before) + 1} of {MAX_RETRIES})", stacklevel=2)
        return runner, start or runner.start()

    def _load(self, number: int) -> RunState | None:
        """The state after a round; None for the initial one, and for one that is not stored."""
        if self.folder:
            return self.folder.load(self.device, number) if number else None
        return self.good if self.good and self.good.round == number else None


def _abandoned(records: Sequence[RoundRecord], number: int) -> tuple[int, list[dict[str, Any]]]:
    """The bytes and the records of the rounds after `number`."""
    lost = [record._asdict() for record in records[number:]]
    return sum(line[f"bytes_{way}"] for line in lost for way in ("up", "down", "catchup")), lost


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


def roll_back(path: Path, number: int, left_out: Sequence[int] = ()) -> Retry:
    """Go back to the checkpoint of a round; nothing is changed if there is none. A finished run is unfinished again.

    Args:
        path: the run directory.
        number: the round; 0 for the start.
        left_out: clients of a deployment that are left out of the next cohorts.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        _check(folder, number, left_out)
        start = folder.load("cpu", number) if number else None
        version = start.server.public.version if start else 0
        folder.clear_results()
        records = folder.rewind(rounds_in(folder.checkpoints)[-1])
        lr = (records[number].lr if number < len(records) else None) or 0.0
        why, clients = "rolled back by hand", sorted(set(left_out))
        retry = Retry(len(records), ROLLED_BACK, why, number, version, lr, *_abandoned(records, number), clients)
        folder.go_back(number, [one._asdict() for one in (*read_retries(path), retry)])
    return retry


def _check(folder: RunFolder, number: int, left_out: Sequence[int]) -> None:
    """Raise an error for a round without a checkpoint, and for clients that cannot be left out."""
    rounds = rounds_in(folder.checkpoints)
    if not rounds:
        raise CheckpointError(f"{folder.path} has no checkpoint to go back to")
    if number != 0 and number not in rounds:
        listed = ", ".join(map(str, rounds[:10]))
        raise CheckpointError(
            f"{folder.path} has no checkpoint of round {number}; it has {listed}: name one of them, and keep more of "
            "them with --set checkpoint.keep=20"
        )
    if number == rounds[-1] and not left_out:
        raise CheckpointError(f"{folder.path} is at round {number}, there is nothing to go back from")
    if folder.table.get("method", {}).get("privacy", {}).get("kind", "none") != "none":
        raise ConfigError(f"{folder.path} has differential privacy, which rounds that are given up spend, too")
    clients = folder.table.get("task", {}).get("clients", 0)
    if left_out and not (folder.path / "deployment.json").is_file():
        raise ConfigError(f"{folder.path} was not deployed: clients of a simulation cannot be left out")
    if wrong := [one for one in left_out if not 0 <= one < clients]:
        raise ConfigError(f"there is no client {wrong[0]} to leave out; clients are 0 to {clients - 1}")
