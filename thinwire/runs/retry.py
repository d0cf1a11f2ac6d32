"""Going back when training fails: to the last healthy checkpoint, with half the client learning rate.

    fails        a value is not finite (`Diverged`), or accuracy or loss collapses (`Course.too_fast`)
    checkpoints  states that an evaluation found healthy, `checkpoint.every` rounds apart; before the first, the start
    then         factor of the learning rate = schedule(t) * 0.5^(number of retries from version t or before)

The rates are a function of the version (`HalvedLR`), a warm-up does not start again, and clients go back to their own
states of that round. Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record
that follows, so that sums over records are what was sent. `retries.json` lists the retries with these rounds' records.
It is written first: a process that is killed at any moment and resumed goes on with the same bits.

A deployment goes back otherwise (`Unfit`): to the state before a round in which clients were far off, with the same
learning rate, and without these clients for some rounds. `retries.json` lists that, too.

Go back to a checkpoint by hand: what `thinwire resume --from` does.

Rounds after it are given up: their records move to `retries.json`, and their bytes count as `bytes_abandoned` in the
record that follows. A finished run is no longer finished. Clients of a deployment that are ahead of the server receive
the whole state.
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
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord, RunState
from thinwire.federation.runner import LeavesOut, Runner
from thinwire.optimizers.lr_schedules import HalvedLR
from thinwire.protocol.method import Method
from thinwire.runs.collapse import Verdict
from thinwire.runs.files import read_checked, with_checksum, write_atomically
from thinwire.runs.loop import Checkpoints, Collapsed, Stop, rounds
from thinwire.runs.records import BEST, ROLLED_BACK, SUMS, checkpoint_file, remove_checkpoint, rounds_in
from thinwire.runs.run_directory import RunFolder

MOST_RETRIES = 5
MOST_ROLLBACKS = 20
LEFT_OUT_ROUNDS = 10  # without a client that was far off, the first time; each further time twice as many


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `diverged`, `collapsed` or `at chance`; or `rolled back`: in a deployment, or by hand
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate from there on
    bytes_up: int  # of the abandoned rounds, with what the failed one sent
    bytes_down: int
    bytes_catchup: int
    seconds: float
    records: list[dict[str, Any]]  # of the abandoned rounds
    left_out: Sequence[int] = ()  # clients of a deployment that are left out of the next cohorts

    @classmethod
    def of(
        cls,
        verdict: tuple[int, str, str],
        back: tuple[int, int, float],
        records: Sequence[RoundRecord],
        sent: Sequence[int] = (0, 0, 0),
        left_out: Iterable[int] = (),
    ) -> Retry:
        """Go back from the end of these records.

        Args:
            verdict: round, status and why.
            back: the round and the version that it goes back to, and the learning rate from there on.
            records: all records so far.
            sent: the bytes that the failed round sent, by way.
            left_out: clients that are left out.
        """
        lost = [record._asdict() for record in records[back[0] :]]
        ways = zip(("up", "down", "catchup"), sent, strict=True)
        up, down, catchup = (last + sum(line[f"bytes_{way}"] for line in lost) for way, last in ways)
        return cls(
            *verdict, *back, up, down, catchup, sum(line["seconds"] for line in lost), lost, sorted(set(left_out))
        )

    @property
    def halves(self) -> bool:
        """Whether the learning rate is halved from there on."""
        return self.status != ROLLED_BACK

    @property
    def bytes(self) -> int:
        """All bytes of the abandoned rounds."""
        return self.bytes_up + self.bytes_down + self.bytes_catchup

    @property
    def line(self) -> str:
        """What happened, in one line."""
        back = f"round {self.from_round}" if self.from_round else "the start"
        if self.halves:
            return f"round {self.round} {self.status}: {self.why}; back to {back} with learning rate {self.lr:.4g}"
        without = f" without clients {', '.join(map(str, self.left_out))}" if self.left_out else ""
        return f"{self.why}; back to {back}{without}"

    def as_summary(self) -> dict[str, Any]:
        """The keys of a summary."""
        hidden = ("records", "seconds", *(() if self.left_out else ("left_out",)))
        kept = {key: value for key, value in self._asdict().items() if key not in hidden}
        return {**kept, "bytes_abandoned": self.bytes}


class Store:
    """The retries of a run, and the states that it can go back to: its checkpoints, or one in memory.

    Args:
        folder: the run directory; None for a run without one.
        device: the device of a state that is loaded.
    """

    def __init__(self, folder: RunFolder | None = None, device: str = "cpu") -> None:
        self.folder, self.device = folder, device
        self.state: RunState | None = None  # the last good one, without a directory; states never change
        self.retries = read_retries(folder.path) if folder else []
        self._settle()

    @property
    def round(self) -> int:
        """The round of the newest state; 0 if it is the initial one."""
        if self.folder:
            return max(rounds_in(self.folder.checkpoints), default=0)
        return self.state.round if self.state else 0

    def version(self, number: int) -> int | None:
        """The version of the state after a round, if it is stored; None if it is not."""
        if not number:
            return 0
        if self.folder is None:
            return self.state.server.public.version if self.state and self.state.round == number else None
        file = checkpoint_file(self.folder.checkpoints, number)
        return int(read_checked(file)["state"]["server"]["public"]["version"]) if file.is_file() else None

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry, remove newer checkpoints and records; the state that it goes back to, None for the initial."""
        self.retries.append(retry)
        if self.folder is None:
            return self.state if retry.from_round else None
        # first: what follows is done again by a resumed run
        found = {"retries": [one._asdict() for one in self.retries]}
        write_atomically(self.folder.path / "retries.json", with_checksum(found))
        self._settle()
        self.folder.forget(retry.from_round)
        return self.folder.load(self.device, retry.from_round) if retry.from_round else None

    def _settle(self) -> None:
        """Remove checkpoints of abandoned rounds."""
        if self.folder is None or not self.retries:
            return
        self.folder.retries = len(self.retries)
        for number in reversed(rounds_in(self.folder.checkpoints)):
            if number > self.retries[-1].from_round and self._retries_before(number) < len(self.retries):
                remove_checkpoint(self.folder.checkpoints, number)

    def _retries_before(self, number: int) -> float:
        """How often the run had gone back at a checkpoint; a damaged one stays, and is found when it is loaded."""
        assert self.folder is not None
        try:
            return int(read_checked(checkpoint_file(self.folder.checkpoints, number)).get("retries", 0))
        except CheckpointError:
            return float("inf")


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / "retries.json"
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} holds no retries; `--overwrite` runs from the start") from error


@dataclass
class Rescue:
    """Trains the rounds of a run, and goes back where training fails.

    Args:
        prepare: makes the runner of a job.
        job: the job, with the learning rates of the first try.
        store: the retries so far, and the states to go back to.
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
        return self._prepared() if any(retry.halves for retry in self.store.retries) else first

    def _leave_out(self, runner: Runner) -> None:
        """Tell the server of a deployment which clients are left out."""
        if isinstance(runner, LeavesOut):
            times = [(retry.from_round, retry.left_out) for retry in self.store.retries]
            runner.leave_out(left_out_until(times), len(self.store.retries))

    def _prepared(self, *more: int) -> Runner:
        """The runner with learning rates that are halved at the versions of the retries so far, and at `more`."""
        halving = [retry for retry in self.store.retries if retry.halves]
        method = halved(self.job.method, (*(retry.from_version for retry in halving), *more))
        return self.prepare(dataclasses.replace(self.job, method=method))

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

        def keep(good: RunState) -> None:
            if good.round - self.store.round < self.every:
                return
            if checkpoints:
                checkpoints.save(good)
            else:
                self.store.state = good

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
            except Unfit as error:
                state = self._roll_back(simulation, state, error, records)
            except Diverged as error:
                if not self.active or len(self.store.retries) == MOST_RETRIES:
                    raise self._last(error) from error
                simulation, state = self._back(state, error, records)

    def _with_abandoned(self, record: RoundRecord) -> RoundRecord:
        lost = sum(retry.bytes for retry in self.store.retries if retry.from_round == record.round - 1)
        return record._replace(bytes_abandoned=lost) if lost else record

    def _last(self, error: Diverged) -> Diverged:
        """The error that ends the run."""
        if not self.active or not self.store.retries:
            return error
        what = f"{error.verdict.status}: {error}" if isinstance(error, Collapsed) else str(error)
        count, rate = len(self.store.retries), f"{self.store.retries[-1].lr:.4g}"
        return Diverged(f"{what}; also after {count} retries, with learning rate {rate}", error.sent)

    def _roll_back(self, runner: Runner, state: RunState, error: Unfit, records: list[RoundRecord]) -> RunState:
        """The state that a deployment goes back to, without the clients that were far off; raises if it cannot."""
        done = state.round if error.back_to is None else error.back_to
        version = self.store.version(done)
        if version is None or sum(not retry.halves for retry in self.store.retries) >= MOST_ROLLBACKS:
            raise error
        what, back = (state.round + 1, ROLLED_BACK, str(error)), (done, version, _rate(runner, version))
        retry = Retry.of(what, back, records, error.sent, error.far)
        del records[done:]
        found = self.store.go_back(retry)
        self._leave_out(runner)
        return found or runner.start()

    def _back(self, state: RunState, error: Diverged, records: list[RoundRecord]) -> tuple[Runner, RunState]:
        """The runner with half the rate, and the state that it continues from."""
        good = self.store.round
        version = self.store.version(good) or 0
        simulation = self._prepared(version)
        if isinstance(error, Collapsed):
            verdict = error.verdict._replace(round=state.round)
        else:
            number = state.round + 1
            verdict = Verdict("diverged", number, str(error).removeprefix(f"round {number}: "))
        what = verdict.round or 0, verdict.status, verdict.why
        retry = Retry.of(what, (good, version, _rate(simulation, version)), records, error.sent)
        del records[good:]
        found = self.store.go_back(retry)
        line = f"{retry.line} (retry {len(self.store.retries)} of {MOST_RETRIES})"
        warnings.warn(f"{self.name}: {line}" if self.name else line, stacklevel=2)
        return simulation, found or simulation.start()


def _rate(runner: Runner, version: int) -> float:
    return runner.contract.at(version).client_opt(version).lr


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


class RolledBack(NamedTuple):
    """What going back did: the round that the run is at, rounds and bytes that were given up, clients left out."""

    round: int
    abandoned: int
    bytes: int
    left_out: tuple[int, ...]


def roll_back(path: Path, number: int, left_out: Sequence[int] = ()) -> RolledBack:
    """Go back to the checkpoint of a round; nothing is changed if there is none.

    Args:
        path: the run directory.
        number: the round; 0 for the start.
        left_out: clients of a deployment that are left out of the next cohorts.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        _check(folder, number, left_out)
        for name in ("summary.json", SUMS, "model.safetensors", BEST, "diverged.json"):  # no longer finished
            (path / name).unlink(missing_ok=True)
        store = Store(folder)
        records = folder.rewind(rounds_in(folder.checkpoints)[-1])
        lr = (records[number].lr if number < len(records) else None) or 0.0
        what, back = (len(records), ROLLED_BACK, "rolled back by hand"), (number, store.version(number) or 0, lr)
        retry = Retry.of(what, back, records, left_out=left_out)
        store.go_back(retry)
    return RolledBack(number, len(retry.records), retry.bytes, tuple(retry.left_out))


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
