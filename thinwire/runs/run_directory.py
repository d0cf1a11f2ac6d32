"""The run directory: configuration, environment, metrics, results and checkpoints of one run.

config.toml        the resolved experiment
environment.json   versions, machine, how clients were trained
metrics.jsonl      one line a round
cohorts.jsonl      of a deployment: who was there, was asked and was accepted in each round (`deployment_records.py`)
sites.jsonl        of a deployment: one line per client and round (`deployment_records.py`)
summary.json       totals and `status`, when the run is finished or diverged
model.safetensors  the final weights, when the run is finished
best.safetensors   the weights of the best round, if they are kept
clients.jsonl      the numbers of each client at the end, the worst first, where clients have validation examples
SHA256SUMS         of these, when there are totals: `sha256sum --check SHA256SUMS`
process.json       the process that writes, while the run is not finished
deployment.json    of a deployment: the name of the run, and how it was started
checkpoints/       see `checkpoint.py`
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
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.core.text import visible
from thinwire.errors import CheckpointError, ConfigError
from thinwire.federation.job import RoundRecord
from thinwire.federation.settings import KEEP, Settings
from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thinwire.runs.config import digest, from_table
from thinwire.runs.deployment_records import COHORTS, SITES, cut_sites
from thinwire.runs.files import (
    LOCK,
    PROCESS,
    note_process,
    with_checksum,
    write_atomically,
)
from thinwire.runs.records import (
    BEST,
    CLIENTS,
    CONFIG,
    SUMS,
    read_config,
    read_records,
    read_totals,
    remove_checkpoint,
    rounds_in,
    sums_of,
    verify,
)
from thinwire.runs.toml import Table, dumps, flat

Summary = dict[str, Any]
# settings that a run may have of its own if it begins from a checkpoint of another
CHANGEABLE = (
    *("name", "rounds", "extended", "local.", "cohort.", "eval.", "checkpoint.", "engine."),
    *("method.client_opt.", "method.lr_schedule.", "method.aggregator.", "method.norm_bound"),
)
DEPLOYMENT = "deployment.json"  # of a deployment: the name of the run, and how it was started
METRICS = "metrics.jsonl"
RETRIES = "retries.json"
RESULTS = ("summary.json", SUMS, "model.safetensors", BEST, CLIENTS)  # of a finished run


class RunFolder:
    """The directory of one run.

    Args:
        path: the directory; it need not exist.
        table: the settings of the run, or the table of a script that calls `tw.simulate`.
    """

    def __init__(self, path: Path, table: Table) -> None:
        self.path, self.table = path, table
        own, rounds = identity(table), rounds_of(table)
        tables = [{**own, "rounds": rounds[i], "extended": rounds[:i]} for i in reversed(range(len(rounds)))]
        # now, and before it was given more rounds
        self.configs = [digest({key: value for key, value in one.items() if value != []}) for one in tables]
        self.keep = int(table.get("checkpoint", {}).get("keep", KEEP))  # number of checkpoints
        self.checkpoints = path / "checkpoints"

    @property
    def experiment(self) -> Settings:
        """The experiment of the run, whose code is imported; the run of a script has none."""
        if "script" in self.table:
            raise CheckpointError(
                f"{self.path} was written by a script; run `python {self.table['script']}` again, with resume=True"
            )
        return from_table(self.table)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run directory at a path that holds one; code that it names is not imported."""
        return cls(path, read_config(path))

    @property
    def exists(self) -> bool:
        """Whether the directory holds this run; another one, other data and other files are errors."""
        if not (self.path / "config.toml").is_file():
            if self.path.exists() and (not self.path.is_dir() or {*os.listdir(self.path)} - {LOCK}):
                raise CheckpointError(f"{self.path} exists and is not a run directory; name another directory")
            return False
        theirs = RunFolder.open(self.path)
        known, now = str(theirs.table.get("fingerprint", "")), str(self.table.get("fingerprint", ""))
        if known and now and known != now:
            raise other_task(f"{self.path} holds a run that began", known, now)
        if theirs.configs[0] not in self.configs:
            what = _difference(identity(theirs.table), identity(self.table))
            remedy = "or delete it with --overwrite"
            if (self.path / DEPLOYMENT).is_file():
                remedy = f"with -c 'from=\"{self.path}\"' to begin there from the newest checkpoint of this run"
            raise CheckpointError(
                f"{self.path} holds a run of another configuration: {what}; name another directory, {remedy}"
            )
        return True

    @property
    def is_extended(self) -> bool:
        """Whether the run in the directory is now given more rounds."""
        return RunFolder.open(self.path).configs[0] != self.configs[0]

    def create(self, overwrite: bool = False) -> None:
        """Write the configuration, and remove the temporary files of a killed process.

        Args:
            overwrite: whether to delete the files of earlier runs.
        """
        if overwrite:
            self.clear_results()
            for file in (METRICS, "environment.json", RETRIES, COHORTS, SITES):
                (self.path / file).unlink(missing_ok=True)
            for old in self.checkpoints.iterdir() if self.checkpoints.is_dir() else ():
                old.unlink()
        for folder in (self.path, self.checkpoints):
            for half in folder.glob(".*.tmp"):
                half.unlink()
        (self.path / SUMS).unlink(missing_ok=True)  # the totals are written again
        write_atomically(self.path / "config.toml", dumps(self.table).encode())
        note_process(self.path)

    def begin_from(self, path: Path) -> int:
        """Begin with the newest checkpoint of another run, its records and bytes; returns its round.

        Clients begin without a state of their own, and are sent the whole state.

        Args:
            path: the directory of the other run, whose settings may differ in those of `CHANGEABLE`.
        """
        other = RunFolder.open(path)
        if (found := other.load("cpu")) is None:
            raise CheckpointError(f"{path} has no checkpoint to begin from; name a run with one")
        fixed = [
            {key: value for key, value in flat(one.table).items() if not key.startswith(CHANGEABLE)}
            for one in (other, self)
        ]
        if what := _difference(*fixed):
            raise CheckpointError(f"a run cannot begin from {path} with other settings than its own: {what}")
        if self.table["method"].get("privacy", {}).get("kind", "none") != "none":
            raise ConfigError(f"{path} has differential privacy, which is not accounted over runs with other settings")
        if (done := found.state.round) >= self.table["rounds"]:
            raise ConfigError(f"{path} has {done} rounds already; write rounds = {2 * done}")
        self.create()
        state = found.state._replace(clients={}, waiting=())
        save_checkpoint(self.checkpoints, found._replace(state=state), self.configs[0], self.keep)
        return done

    def clear_results(self) -> None:
        """Delete what a finished run has; it is then unfinished."""
        for file in RESULTS:
            (self.path / file).unlink(missing_ok=True)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def history(self) -> list[RoundRecord]:
        """The records of all rounds; an incomplete last line of a killed process is left out."""
        return records_of(read_records(self.path / METRICS))

    def rewind(self, start: Checkpoint | None, attempt: int) -> None:
        """Write the records up to a checkpoint, from which the run continues.

        Args:
            start: the checkpoint; None for the start.
            attempt: how often the run went back.
        """
        file, kept = self.path / METRICS, start.metrics.encode() if start else b""
        if not file.is_file() or file.read_bytes() != kept:
            write_atomically(file, kept)
        cut_sites(self.path, start.state.round if start else 0, attempt)

    def go_back(self, rounds: int, retries: Iterable[Any]) -> None:
        """Remove checkpoints of later rounds, and write all `Retry`; a killed process continues from there, too."""
        for number in reversed(rounds_in(self.checkpoints)):
            if number > rounds:
                remove_checkpoint(self.checkpoints, number)
        write_atomically(self.path / RETRIES, with_checksum({"retries": [one._asdict() for one in retries]}))

    def load(self, device: str, number: int | None = None) -> Checkpoint | None:
        """A checkpoint, by default the newest; None if there is none."""
        return load_checkpoint(self.checkpoints, self.configs, device, number)

    def finish(self, summary: Summary, results: Mapping[str, bytes]) -> None:
        """Write models and clients, the checksums and, last, the totals: a run with totals is finished.

        Args:
            summary: the totals.
            results: contents by name of the file; none of a run that diverged.
        """
        for name, data in results.items():
            write_atomically(self.path / name, data)
        totals = (json.dumps(summary, indent=1) + "\n").encode()
        old = {one: (self.path / one).read_bytes() for one in (METRICS, CONFIG) if (self.path / one).is_file()}
        covered = {METRICS: b"", **results, "summary.json": totals, **old}
        write_atomically(self.path / SUMS, sums_of(covered))
        write_atomically(self.path / "summary.json", totals)
        (self.path / PROCESS).unlink(missing_ok=True)

    def summary(self) -> Summary | None:
        """The totals of a finished run, whose files are verified; None if it is not finished."""
        if (self.path / "summary.json").is_file():
            verify(self.path)
        return read_totals(self.path)


def rounds_of(table: Table) -> list[int]:
    """The numbers of rounds that a run had: at its start, and after each time that it was extended."""
    return [*table.get("extended", ()), int(table.get("rounds", 0))]


def identity(table: Table) -> Table:
    """The part of a configuration that must be the same for a run to be continued.

    The same run may be continued with another `keep`; the run of a script also under another
    name, by another script, and with other checkpoints.
    """
    if "script" in table:
        return {key: value for key, value in table.items() if key not in ("name", "script", "checkpoint")}
    saving = {key: value for key, value in table.get("checkpoint", {}).items() if key != "keep"}
    return {**table, **({"checkpoint": saving} if saving else {})}


def other_task(what: str, known: str, now: str) -> CheckpointError:
    """The error for a run whose model or data are not those of its beginning."""
    return CheckpointError(
        f"{what} with other data, or other initial weights of the model (fingerprint {known[:40]}, now {now}); restore "
        "them (call torch.manual_seed before the model is made), or name another directory"
    )


def _difference(theirs: Table, ours: Table) -> str:
    """The settings in which two runs differ.

    >>> _difference({"rounds": 5, "eval": {"every": 1}}, {"rounds": 9, "eval": {"every": 1}})
    'rounds = 5 there, 9 here'
    """
    one, two = flat(theirs), flat(ours)
    differ = [key for key in dict.fromkeys((*one, *two)) if one.get(key) != two.get(key)]
    named = [f"{key} = {one.get(key, 'unset')} there, {two.get(key, 'unset')} here" for key in differ]
    return visible("; ".join(named), 300)


def records_of(lines: Iterable[dict[str, Any]]) -> list[RoundRecord]:
    """Lines as records, up to the first line with other fields (of another version)."""
    records = []
    with suppress(TypeError):
        for line in lines:
            records.append(RoundRecord(**line))
    return records


def environment() -> dict[str, Any]:
    """The machine and the versions on which results depend, the commit, and the time now, in UTC."""
    versions = {"torch": str(torch.__version__)}
    for name in ("thinwire", "numpy", "safetensors", "scikit-learn"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "commit": os.environ.get("THINWIRE_COMMIT", "")[:12] or _commit(Path(__file__).resolve().parents[2]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


@functools.cache
def _commit(folder: Path) -> str:
    """The commit of a checkout, "" if the folder is the top of none: a package may be installed inside another's."""
    if not (folder / ".git").exists():
        return ""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
