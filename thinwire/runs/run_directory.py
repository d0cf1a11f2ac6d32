"""The run directory: configuration, environment, metrics, results and checkpoints of one run.

config.toml        the resolved experiment
environment.json   versions, machine, how clients were trained
training.json      how clients are trained, chosen before round 1; a resumed run uses the same
metrics.jsonl      one line a round
cohorts.jsonl      of a deployment: who was there, was asked and was accepted in each round (`cohort_file.py`)
summary.json       totals and `status`, when the run is finished or diverged
model.safetensors  the final weights, when the run is finished
best.safetensors   the weights of the best round, if they are kept
samples.json       of a language model: answers before and after training (`samples.py`)
SHA256SUMS         of these four, when there are totals: `sha256sum --check SHA256SUMS`
process.json       the process that writes, while the run is not finished
checkpoints/       see `checkpoint.py`
sites.jsonl        one line per client and round of a deployment (`site_records.py`)
retries.json       how often the run went back, why, and the records of the abandoned rounds (`retry.py`)

The commit in `environment.json` is that of the checkout from which thinwire is imported; code that was copied out of
its checkout can name it in `THINWIRE_COMMIT`. It ends in `+` if tracked files were changed, and is empty
where it is unknown.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.job import RoundRecord, RunState
from thinwire.federation.settings import KEEP, Settings
from thinwire.runs.checkpoint import load_checkpoint, save_checkpoint, tensor_bytes
from thinwire.runs.cohort_file import COHORTS
from thinwire.runs.config import digest, from_table, to_table
from thinwire.runs.files import (
    INVALID,
    PROCESS,
    append,
    locked,
    naming,
    note_process,
    parse_lines,
    read_checked,
    unpack,
    with_checksum,
    write_atomically,
    write_json,
)
from thinwire.runs.loop import Training as Training
from thinwire.runs.records import (
    BEST,
    SUMS,
    begins_with,
    lines_at,
    parse_record,
    read_records,
    read_totals,
    remove_checkpoint,
    rounds_in,
    sums_of,
    verify,
)
from thinwire.runs.site_records import SITES, cut_sites
from thinwire.runs.task_files import names_new_code
from thinwire.runs.toml import Table, dumps, read_toml

Summary = dict[str, Any]
FREE = ("on_divergence", "keep")  # settings of checkpoints with which a run may be continued
RETRIES = "retries.json"
RESULTS = ("summary.json", SUMS, "model.safetensors", BEST)  # of a finished run


class RunFolder:
    """The directory of one run.

    Args:
        path: the directory; it need not exist.
        configuration: the experiment, or the table of a script that calls `tw.simulate`.
    """

    def __init__(self, path: Path, configuration: Settings | Table) -> None:
        self.path = path
        self.table = to_table(configuration) if isinstance(configuration, Settings) else configuration
        self.config = digest(identity(self.table))
        self.retries = 0  # how often the run went back
        self.keep = int(self.table.get("checkpoint", {}).get("keep", KEEP))  # number of checkpoints
        self.checkpoints = path / "checkpoints"
        self._lines: list[str] = []  # of metrics.jsonl
        self._facts: dict[str, Any] = {}  # of environment.json
        self._since: tuple[float, float] | None = None  # clock and processor, at the first round here

    @property
    def experiment(self) -> Settings:
        """The experiment of the run; the run of a script has none."""
        if "script" in self.table:
            raise CheckpointError(
                f"{self.path} was written by a script; run `python {self.table['script']}` again, with resume=True"
            )
        return from_table(self.table)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run directory at a path that holds one; code that it names is not imported."""
        file = path / "config.toml"
        if not file.is_file():
            raise CheckpointError(f"{path} is not a run directory: it has no config.toml")
        table = read_toml(file)
        return cls(path, table if "script" in table or names_new_code(table) else from_table(table))

    @property
    def exists(self) -> bool:
        """Whether the directory holds this run; one of another configuration is an error."""
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
        """Write the configuration, and remove the temporary files of a killed process."""
        for folder in (self.path, self.checkpoints):
            for half in folder.glob(".*.tmp"):
                half.unlink()
        (self.path / SUMS).unlink(missing_ok=True)  # the totals are written again
        write_atomically(self.path / "config.toml", dumps(self.table).encode())
        note_process(self.path)

    def clear(self) -> None:
        """Delete the files of earlier runs."""
        self.clear_results()
        for file in ("metrics.jsonl", "environment.json", "training.json", RETRIES, COHORTS, SITES, "mlflow.json"):
            (self.path / file).unlink(missing_ok=True)
        for old in self.checkpoints.iterdir() if self.checkpoints.is_dir() else ():
            old.unlink()

    def clear_results(self) -> None:
        """Delete what a finished run has; it is then unfinished."""
        for file in RESULTS:
            (self.path / file).unlink(missing_ok=True)

    def locked(self) -> AbstractContextManager[None]:
        """Lock the directory against other processes; the system releases the lock when the process ends."""
        return locked(self.path)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def history(self) -> list[RoundRecord]:
        """The records of all rounds; an incomplete last line of a killed process is left out."""
        return records_of(read_records(self.path / "metrics.jsonl"))

    def rewind(self, rounds: int) -> list[RoundRecord]:
        """Truncate the records after a round, from which the run continues; missing ones are restored.

        A checkpoint holds the lines up to its round. If those in `metrics.jsonl` differ, they are replaced by the lines
        of the checkpoint, with a warning.
        """
        file = self.path / "metrics.jsonl"
        kept = (lines_at(self.checkpoints, rounds) if rounds else "") or ""
        damaged = not begins_with(file, kept.encode())
        history = records_of(parse_lines(kept.encode(), parse_record))
        if len(history) != rounds or any(record.round != i for i, record in enumerate(history, 1)):
            raise CheckpointError(
                f"{file} lacks rounds before the checkpoint of round {rounds}; remove that checkpoint"
            )
        write_atomically(file, kept.encode())
        cut_sites(self.path, rounds, self.retries)
        self._lines = kept.splitlines(keepends=True)
        if damaged:
            text = f"{file} was damaged; its first {rounds} rounds were restored from the checkpoint"
            warnings.warn(text, stacklevel=2)
        return history

    def record(self, record: RoundRecord) -> None:
        """Add the line of a round."""
        self._since = self._since or (time.perf_counter(), time.process_time())
        append(self.path / "metrics.jsonl", _line(record).encode())
        self._lines.append(_line(record))

    def save(self, state: RunState, best: Tree | None = None) -> None:
        """Write a checkpoint, with the best model if it is kept, after the metrics of its rounds are on disk."""
        with naming(self.path / "metrics.jsonl"), (self.path / "metrics.jsonl").open("ab") as file:
            os.fsync(file.fileno())
        lines = "".join(self._lines[: state.round])
        save_checkpoint(self.checkpoints, state, self.config, lines, self.keep, best)

    def go_back(self, rounds: int, retries: list[dict[str, Any]]) -> None:
        """Remove checkpoints and lines of later rounds, and write why; a killed process continues from there, too."""
        for number in reversed(rounds_in(self.checkpoints)):
            if number > rounds:
                remove_checkpoint(self.checkpoints, number)
        write_atomically(self.path / RETRIES, with_checksum({"retries": retries}))
        self.retries, self._lines = len(retries), self._lines[:rounds]
        write_atomically(self.path / "metrics.jsonl", "".join(self._lines).encode())

    def load(self, device: str, number: int | None = None) -> RunState | None:
        """The state of a checkpoint, by default the newest; None if there is none."""
        return load_checkpoint(self.checkpoints, self.config, device, number)

    def keep_training(self, training: Training) -> None:
        """Write how clients are trained, before round 1."""
        write_atomically(self.path / "training.json", with_checksum(training._asdict()))

    def training(self) -> Training | None:
        """How clients are trained, as chosen before round 1; None before the choice."""
        file = self.path / "training.json"
        if not file.is_file():
            return None
        hint = "; remove it to choose again, which may change the rounding of every round"
        try:
            found: Training = unpack(Training, read_checked(file, hint))
            return found
        except INVALID as error:
            raise CheckpointError(f"{file} holds no valid backend{hint}") from error

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write the machine, the versions, some facts about this run, and its time so far."""
        self._facts = facts
        found = {**environment(), **facts}
        if self._since:  # their quotient shows whether other processes slowed the run down; of all threads
            now = time.perf_counter(), time.process_time()
            names = ("wall_seconds", "processor_seconds")
            found |= {key: round(b - a, 3) for key, a, b in zip(names, self._since, now, strict=True)}
        write_json(self.path / "environment.json", found)

    def finish(self, summary: Summary, weights: Tree, best: bytes | None = None) -> None:
        """Write the final weights, the checksums and, last, the totals: a run with totals is finished.

        Args:
            summary: the totals.
            weights: the final weights and buffers.
            best: the contents of `best.safetensors`, if the best model is kept.
        """
        models = {"model.safetensors": tensor_bytes(weights), **({} if best is None else {BEST: best})}
        for name, data in models.items():
            write_atomically(self.path / name, data)
        self.write_totals(summary, models)

    def write_totals(self, summary: Summary, others: Mapping[str, bytes] = {}) -> None:
        """Write the time of the run if it trained here, the checksums, also of other files, then its totals."""
        if self._facts:
            self.write_environment(self._facts)
        lines, totals = "".join(self._lines).encode(), (json.dumps(summary, indent=1) + "\n").encode()
        write_atomically(self.path / SUMS, sums_of({"metrics.jsonl": lines, **others, "summary.json": totals}))
        write_atomically(self.path / "summary.json", totals)
        (self.path / PROCESS).unlink(missing_ok=True)

    def summary(self) -> Summary | None:
        """The totals of a finished run, whose files are verified; None if it is not finished."""
        if (self.path / "summary.json").is_file():
            verify(self.path)
        return read_totals(self.path)


def identity(table: Table) -> Table:
    """The part of a configuration that must be the same for a run to be continued.

    The same run may be continued with another `on_divergence` or `keep`; the run of a script also under another
    name, by another script, and with other checkpoints.
    """
    if "script" in table:
        return {key: value for key, value in table.items() if key not in ("name", "script", "checkpoint")}
    saving = {key: value for key, value in table.get("checkpoint", {}).items() if key not in FREE}
    return {**table, **({"checkpoint": saving} if saving else {})}


def environment() -> dict[str, Any]:
    """The machine and the versions on which results depend."""
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
        **provenance(),
    }


def _line(record: RoundRecord) -> str:
    return json.dumps(record._asdict()) + "\n"


def records_of(lines: Iterable[dict[str, Any]]) -> list[RoundRecord]:
    """Lines as records, up to the first line with other fields (of another version)."""
    records = []
    for line in lines:
        try:
            records.append(RoundRecord(**line))
        except TypeError:
            break
    return records


def provenance() -> dict[str, str]:
    """The commit, and the time now, in UTC and to the second.

    >>> sorted(provenance())
    ['commit', 'date']
    """
    return {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def commit() -> str:
    """The commit of the code: `THINWIRE_COMMIT`, or that of the checkout which holds the package."""
    if given := os.environ.get("THINWIRE_COMMIT", ""):
        if not is_commit(given):
            raise ConfigError(f"THINWIRE_COMMIT must be 7 to 40 hexadecimal digits, not {given[:50]!r}")
        return given[:12]
    return _of_checkout(Path(__file__).resolve().parents[2])


def is_commit(value: Any) -> bool:
    """Whether a value is written like a commit.

    >>> is_commit("4e48f0d"), is_commit("4e48f0d+"), is_commit("main"), is_commit(None)
    (True, True, False, False)
    """
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{7,40}\+?", value) is not None


@functools.cache
def _of_checkout(folder: Path) -> str:
    """The commit of a checkout, "" if the folder is the top of none: a package may be installed inside another's."""
    if not (folder / ".git").exists():
        return ""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found if is_commit(found) else ""
