"""Going back when training fails: to the last healthy state, with half the client learning rate.

    fails        a value is not finite (`Diverged`), or accuracy or loss collapses (`Course.too_fast`)
    good state   the newest that an evaluation found healthy, kept every `checkpoint.every` rounds; else the initial one
    then         factor of the learning rate = schedule(t) * 0.5^(number of retries from version t or before)

The rates are a function of the version (`HalvedLR`), a warm-up does not start again, and clients go back to their own
states of that round. Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record
that follows, so that sums over records are what was sent. `retries.json` lists the retries with these rounds' records.
It is written first: a process that is killed at any moment and resumed goes on with the same bits.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thinwire.errors import CheckpointError, ConfigError, Diverged
from thinwire.experiments.checkpoint import save_checkpoint
from thinwire.experiments.collapse import Verdict
from thinwire.experiments.files import read_checked, with_checksum, write_atomically
from thinwire.experiments.loop import Checkpoints, Collapsed, Stop, rounds
from thinwire.experiments.records import checkpoint_file, lines_at, rounds_in
from thinwire.experiments.run_directory import RunFolder
from thinwire.optimizers.halved_lr import HalvedLR
from thinwire.protocol.method import Method
from thinwire.runtime.engine import EngineSettings
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import Job, RoundRecord, RunState
from thinwire.runtime.runner import Runner

MOST_RETRIES = 5


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `diverged`, `collapsed` or `at chance`
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate from there on
    bytes_up: int  # of the abandoned rounds, with what the failed one sent
    bytes_down: int
    bytes_catchup: int
    seconds: float
    records: list[dict[str, Any]]  # of the abandoned rounds

    @property
    def bytes(self) -> int:
        """All bytes of the abandoned rounds."""
        return self.bytes_up + self.bytes_down + self.bytes_catchup

    @property
    def line(self) -> str:
        """What happened, in one line."""
        back = f"round {self.from_round}" if self.from_round else "the start"
        return f"round {self.round} {self.status}: {self.why}; back to {back} with learning rate {self.lr:.4g}"

    def as_summary(self) -> dict[str, Any]:
        """The keys of a summary."""
        kept = {key: value for key, value in self._asdict().items() if key not in ("records", "seconds")}
        return {**kept, "bytes_abandoned": self.bytes}


class Store(Protocol):
    """Keeps the last good state of a run and the list of its retries."""

    retries: list[Retry]

    @property
    def good_round(self) -> int:
        """The round of the last good state; 0 if it is the initial one."""
        ...

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        ...

    def keep(self, state: RunState) -> None:
        """Keep a good state in place of the one before."""
        ...

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry; returns the good state, None for the initial one."""
        ...


@dataclass
class MemoryStore:
    """The last good state in memory; states never change, so it is not copied.

    Args:
        folder: the run directory of a script, if it has one.
    """

    folder: RunFolder | None = None
    retries: list[Retry] = field(default_factory=list)
    state: RunState | None = None

    @property
    def good_round(self) -> int:
        """The round of the last good state."""
        return self.state.round if self.state else 0

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        return self.state.server.public.version if self.state else 0

    def keep(self, state: RunState) -> None:
        """Keep a good state."""
        self.state = state

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry; returns the good state."""
        self.retries.append(retry)
        if self.folder:
            write_retries(self.folder.path, self.retries)
            self.folder.forget(retry.from_round)
        return self.state


class FolderStore:
    """The last good state in `good/` of a run directory, apart from newer checkpoints, which may be bad already."""

    def __init__(self, folder: RunFolder, device: str) -> None:
        self.folder, self.device = folder, device
        self.good = folder.path / "good"
        self.retries = read_retries(folder.path)
        folder.retries = len(self.retries)
        self._settle()

    @property
    def good_round(self) -> int:
        """The round of the last good state."""
        return max(rounds_in(self.good), default=0)

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        return int(read_checked(checkpoint_file(self.good, self.good_round))["version"]) if self.good_round else 0

    def keep(self, state: RunState) -> None:
        """Write a good state, and remove the one before."""
        save_checkpoint(self.good, state, self.folder.config, self.folder.lines(state.round), keep=1)

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry, remove the newer checkpoints and records; returns the good state."""
        self.retries.append(retry)
        write_retries(self.folder.path, self.retries)  # first: what follows is done again by a resumed run
        self.folder.retries = len(self.retries)
        state = self._settle()
        self.folder.forget(retry.from_round)
        return state

    def _settle(self) -> RunState | None:
        """Remove checkpoints of abandoned rounds; the state that the last retry started from replaces them."""
        if not self.retries:
            return None
        folder, last = self.folder.checkpoints, self.retries[-1].from_round
        for number in reversed(rounds_in(folder)):  # a checkpoint exists when its JSON exists
            file = checkpoint_file(folder, number)
            if number > last and _retries_before(file) < len(self.retries):
                file.unlink(missing_ok=True)
                file.with_suffix(".safetensors").unlink(missing_ok=True)
        if not last or max(rounds_in(folder), default=0) > last:
            return None
        state = self.folder.load(self.device, self.good)
        if state is None or state.round != last:
            raise CheckpointError(f"{self.good} lacks the state of round {last}; `--again` runs from the start")
        lines = lines_at(self.good, last)
        save_checkpoint(folder, state, self.folder.config, lines, self.folder.retries)
        return state


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
        if not self.store.retries:
            return first
        at = tuple(retry.from_version for retry in self.store.retries)
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
                )
                for state, record in loop:
                    yield simulation, state, self._with_abandoned(record)
                return
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

    def _back(self, state: RunState, error: Diverged, records: list[RoundRecord]) -> tuple[Runner, RunState]:
        """The runner with half the rate, and the state that it continues from."""
        verdict, good, version = verdict_of(error, state.round), self.store.good_round, self.store.good_version
        lost = [record._asdict() for record in records[good:]]
        sums = [sum(line[f"bytes_{way}"] for line in lost) for way in ("up", "down", "catchup")]
        up, down, catchup = (total + last for total, last in zip(sums, error.sent, strict=True))
        at = (*(retry.from_version for retry in self.store.retries), version)
        simulation = self.prepare(dataclasses.replace(self.job, method=halved(self.job.method, at)))
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


# -- on disk ---------------------------------------------------------------------------------------------------------


def write_retries(path: Path, retries: Sequence[Retry]) -> None:
    """Write the retries of a run directory."""
    write_atomically(path / "retries.json", with_checksum({"retries": [retry._asdict() for retry in retries]}))


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / "retries.json"
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} holds no retries; `--again` runs from the start") from error


def _retries_before(file: Path) -> int:
    """How often a run had gone back when it wrote a checkpoint; one that is damaged is found when it is loaded."""
    try:
        return int(read_checked(file).get("retries", 0))
    except CheckpointError:
        return MOST_RETRIES
