"""The directory of a run: what was asked, on which machine, what happened, and from where to go on.

config.toml        the resolved experiment
environment.json   versions, machine, how clients were trained
metrics.jsonl      one line a round
summary.json       the totals and how the run ended (`status`), when it is done or training broke down
model.safetensors  the final weights, when the run is done
checkpoints/       see `checkpoint`
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from thinwire.core.tree import Tree
from thinwire.engines.job import RoundRecord, RunState
from thinwire.errors import CheckpointError
from thinwire.run.checkpoint import load_checkpoint, save_checkpoint
from thinwire.run.config import Experiment, digest, from_table, to_table
from thinwire.run.files import write_atomically
from thinwire.run.records import read_records
from thinwire.run.toml import Table, dumps, loads

Summary = dict[str, Any]


class RunFolder:
    """A run directory that holds, or is about to hold, one run: of an experiment, or of a script that describes it."""

    def __init__(self, path: Path, asked: Experiment | Table) -> None:
        self.path = path
        self.table = to_table(asked) if isinstance(asked, Experiment) else asked
        self.config = digest(self.table)
        self.checkpoints = path / "checkpoints"

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
        table = loads(file.read_text("utf-8"), str(file))
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
        write_atomically(self.path / "config.toml", dumps(self.table).encode())

    def clear(self) -> None:
        """Forget what was run here."""
        for file in ("summary.json", "metrics.jsonl", "model.safetensors", "environment.json", "diverged.json"):
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
        records = []
        for line in read_records(self.path / "metrics.jsonl"):
            try:
                records.append(RoundRecord(**line))
            except TypeError:  # of a version that recorded other things
                break
        return records

    def rewind(self, rounds: int) -> list[RoundRecord]:
        """Drop the records after a round, from which the run goes on."""
        kept = [record for record in self.history() if record.round <= rounds]
        if [record.round for record in kept] != list(range(1, rounds + 1)):
            raise CheckpointError(f"{self.path / 'metrics.jsonl'} lacks rounds before the checkpoint of round {rounds}")
        write_atomically(self.path / "metrics.jsonl", "".join(_line(record) for record in kept).encode())
        return kept

    def record(self, record: RoundRecord) -> None:
        """Add the line of a round."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def save(self, state: RunState) -> None:
        """Write a checkpoint; the metrics before it reach the disk first."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            os.fsync(file.fileno())
        save_checkpoint(self.checkpoints, state, self.config)

    def load(self, device: str) -> RunState | None:
        """The newest checkpoint, or None."""
        return load_checkpoint(self.checkpoints, self.config, device)

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write down the machine, the versions, and some facts about this run."""
        write_atomically(
            self.path / "environment.json", (json.dumps({**environment(), **facts}, indent=1) + "\n").encode()
        )

    def finish(self, summary: Summary, weights: Tree) -> None:
        """Write the final weights and the totals."""
        data = save({name: block.detach().cpu().contiguous().clone() for name, block in weights.items()})
        write_atomically(self.path / "model.safetensors", data)
        write_atomically(self.path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def broke_down(self, why: str, summary: Summary | None = None) -> None:
        """Note that training broke down, with the totals until then: a run repeats itself, so it is not run again."""
        write_atomically(self.path / "diverged.json", (json.dumps({"why": why}) + "\n").encode())
        if summary is not None:
            write_atomically(self.path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def summary(self) -> Summary | None:
        """The totals of a finished run, or None."""
        file = self.path / "summary.json"
        if not file.is_file():
            return None
        try:
            summary: Summary = json.loads(file.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read ({error})") from error
        return summary


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
