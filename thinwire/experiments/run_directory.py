"""The directory of a run: what was asked, on which machine, what happened, and from where to go on.

config.toml        the resolved experiment
environment.json   versions, machine, how clients were trained
training.json      how clients are trained, chosen before round 1: a run that is resumed does the same
metrics.jsonl      one line a round
summary.json       the totals and how the run ended (`status`), when it is done or training broke down
model.safetensors  the final weights, when the run is done
SHA256SUMS         of these three, when there are totals: `sha256sum --check SHA256SUMS`
checkpoints/       see `checkpoint`
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors.torch import save

from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.experiments.checkpoint import Bounds, load_checkpoint, save_checkpoint
from thinwire.experiments.config import Experiment, digest, from_table, to_table
from thinwire.experiments.files import append, naming, read_checked, with_checksum, write_atomically
from thinwire.experiments.records import (
    SUMS,
    begins_with,
    lines_at,
    parse_records,
    read_records,
    read_totals,
    sums_of,
    verify,
)
from thinwire.experiments.toml import Table, dumps, read_toml
from thinwire.runtime.job import RoundRecord, RunState
from thinwire.training.inputs import Backend

Summary = dict[str, Any]


class Training(NamedTuple):
    """How clients are trained: the fields of `RunState` that may change rounding, and why."""

    backend: Backend
    backend_reason: str
    chunk: int
    onednn: bool | None

    @classmethod
    def of(cls, state: RunState) -> Training:
        """As a state has it."""
        return cls(state.backend, state.backend_reason, state.chunk, state.onednn)


class RunFolder:
    """A run directory that holds, or is about to hold, one run: of an experiment, or of a script that describes it."""

    def __init__(self, path: Path, asked: Experiment | Table) -> None:
        self.path = path
        self.table = to_table(asked) if isinstance(asked, Experiment) else asked
        self.config = digest(self.table)
        self.checkpoints = path / "checkpoints"
        self._lines: list[str] = []  # of metrics.jsonl

    @property
    def experiment(self) -> Experiment:
        """What was asked; the run of a script is none that can be built again from its file."""
        if "script" in self.table:
            raise CheckpointError(f"{self.path} was written by tw.simulate; run `python {self.table['script']}` again")
        return from_table(self.table)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A directory that exists."""
        file = path / "config.toml"
        if not file.is_file():
            raise CheckpointError(f"{path} is not a run directory: it has no config.toml")
        table = read_toml(file)
        return cls(path, table if "script" in table else from_table(table))

    @property
    def exists(self) -> bool:
        """Whether something was run here before; of another experiment, that is an error."""
        file = self.path / "config.toml"
        if file.is_file():
            theirs = RunFolder.open(self.path).config
            if theirs != self.config:
                raise CheckpointError(
                    f"{self.path} belongs to another configuration ({theirs}, this one is {self.config}); "
                    "name another directory with --out"
                )
            return True
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(f"{self.path} exists and is not a run directory; name another with --out")
        return False

    def create(self) -> None:
        """Write what was asked, and remove what a kill left half-written."""
        for half in (*self.path.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")):
            half.unlink()
        (self.path / SUMS).unlink(missing_ok=True)  # of totals that are written again
        write_atomically(self.path / "config.toml", dumps(self.table).encode())

    def clear(self) -> None:
        """Forget what was run here."""
        written = ("summary.json", SUMS, "metrics.jsonl", "model.safetensors", "environment.json", "training.json")
        for file in (*written, "diverged.json"):
            (self.path / file).unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            for old in self.checkpoints.iterdir():
                old.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out while this one writes; the system lifts the lock when the process dies."""
        try:
            import fcntl
        except ImportError:  # not on this system: nothing to keep out with
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)  # the directory itself: files in it are replaced, it is not
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise CheckpointError(f"another process is writing to {self.path}; wait for it or stop it") from error
        try:
            yield
        finally:
            os.close(handle)

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Hold the directory while a script's run is written; what a script wrote there before is replaced."""
        earlier = (self.path / "config.toml").is_file() and "script" in RunFolder.open(self.path).table
        if not earlier and self.exists:
            raise CheckpointError(f"{self.path} holds a run of the command line; name another directory")
        with self.locked():
            self.clear()
            self.create()
            self.write_environment({})
            yield

    # -- what happened ---------------------------------------------------------------------------------------------

    def history(self) -> list[RoundRecord]:
        """The recorded rounds; a last line that a kill cut short is left out."""
        return _records(read_records(self.path / "metrics.jsonl"))

    def rewind(self, rounds: int) -> list[RoundRecord]:
        """FlatTree the records back to a round, from which the run goes on; what is missing of them is restored.

        A checkpoint holds the lines up to its round. If those in `metrics.jsonl` are others, or fewer, a warning says
        so, and the checkpoint's take their place.
        """
        file = self.path / "metrics.jsonl"
        kept = lines_at(self.checkpoints, rounds) if rounds else ""
        damaged = kept is not None and not begins_with(file, kept.encode())
        if kept is None:  # the checkpoint is of a version that kept none
            kept = "".join(_line(record) for record in self.history() if record.round <= rounds)
        history = _records(parse_records(kept.encode()))
        if len(history) != rounds or any(record.round != i for i, record in enumerate(history, 1)):
            raise CheckpointError(
                f"{file} lacks rounds before the checkpoint of round {rounds}; remove that checkpoint"
            )
        write_atomically(file, kept.encode())
        self._lines = kept.splitlines(keepends=True)
        if damaged:
            told = f"{file} was damaged; its first {rounds} rounds were restored from the checkpoint"
            warnings.warn(told, stacklevel=2)
        return history

    def record(self, record: RoundRecord) -> None:
        """Add the line of a round."""
        append(self.path / "metrics.jsonl", _line(record).encode())
        self._lines.append(_line(record))

    def save(self, state: RunState) -> None:
        """Write a checkpoint; the metrics before it reach the disk first."""
        with naming(self.path / "metrics.jsonl"), (self.path / "metrics.jsonl").open("ab") as file:
            os.fsync(file.fileno())
        save_checkpoint(self.checkpoints, state, self.config, "".join(self._lines[: state.round]))

    def load(self, device: str) -> RunState | None:
        """The newest checkpoint, or None."""
        task = self.table.get("task", {})
        return load_checkpoint(self.checkpoints, self.config, device, Bounds(self.table["rounds"], task["clients"]))

    def keep_training(self, training: Training) -> None:
        """Write how clients are trained, before the first of them is."""
        write_atomically(self.path / "training.json", with_checksum(training._asdict()))

    def training(self) -> Training | None:
        """How clients are trained, as it was chosen before round 1; None if nothing was chosen."""
        file = self.path / "training.json"
        if not file.is_file():
            return None
        hint = "; remove it to choose again, which may change the rounding of every round"
        kept = read_checked(file, hint)
        sound = kept.keys() == set(Training._fields) and kept["backend"] in get_args(Backend)
        sound = sound and isinstance(kept["backend_reason"], str) and kept["onednn"] in (True, False, None)
        if not sound or type(kept["chunk"]) is not int or kept["chunk"] < 0:
            raise CheckpointError(f"{file} holds no way to train{hint}")
        return Training(**kept)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write down the machine, the versions, and some facts about this run."""
        write_atomically(
            self.path / "environment.json", (json.dumps({**environment(), **facts}, indent=1) + "\n").encode()
        )

    def finish(self, summary: Summary, weights: Tree) -> None:
        """Write the final weights, the checksums and, last, the totals: a run that has totals is done."""
        model = save({name: block.detach().cpu().contiguous().clone() for name, block in weights.items()})
        write_atomically(self.path / "model.safetensors", model)
        self._write_totals(summary, {"model.safetensors": model})

    def _write_totals(self, summary: Summary, others: dict[str, bytes]) -> None:
        """The totals, and before them the sums of all that a run which has totals has."""
        lines, totals = "".join(self._lines).encode(), (json.dumps(summary, indent=1) + "\n").encode()
        write_atomically(self.path / SUMS, sums_of({"metrics.jsonl": lines, **others, "summary.json": totals}))
        write_atomically(self.path / "summary.json", totals)

    def broke_down(self, why: str, summary: Summary | None = None) -> None:
        """Note that training broke down, with the totals until then: a run repeats itself, so it is not run again."""
        write_atomically(self.path / "diverged.json", (json.dumps({"why": why}) + "\n").encode())
        if summary is not None:
            self._write_totals(summary, {})

    def summary(self) -> Summary | None:
        """The totals of a finished run, or None."""
        return read_totals(self.path)

    def verify(self) -> None:
        """Refuse a finished run one of whose files is damaged or of another run."""
        verify(self.path)


def environment() -> dict[str, Any]:
    """The machine and the versions on which numbers depend."""
    versions = {}
    for name in ("thinwire", "torch", "numpy", "safetensors", "scikit-learn"):
        try:
            versions[name] = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "versions": versions,
    }


def _line(record: RoundRecord) -> str:
    return json.dumps(record._asdict()) + "\n"


def _records(lines: Iterable[dict[str, Any]]) -> list[RoundRecord]:
    """Lines as records, up to the first of a version that recorded other things."""
    records = []
    for line in lines:
        try:
            records.append(RoundRecord(**line))
        except TypeError:
            break
    return records
