"""What a run directory holds, read as plain values: nothing is trusted, nothing needs torch, nothing is written.

A line of `metrics.jsonl` that is cut short (the run is still writing, or was killed) ends the reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.errors import CheckpointError
from thinwire.run.collapse import Chance, Verdict, judge, known_chance, known_verdict
from thinwire.run.toml import Table, loads

Record = dict[str, Any]  # a line of metrics.jsonl
Accounting = Literal["honest", "ideal"]

_COUNTS = ("round", "bytes_up", "bytes_down", "bytes_catchup", "clients")


class Recorded(NamedTuple):
    """A run, finished or not."""

    path: Path
    table: Table
    records: list[Record]
    environment: dict[str, Any]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        """What tables call its method."""
        return str(self.table.get("name", self.path.name))

    @property
    def task(self) -> str:
        """The name of its task."""
        task = self.table.get("task")
        return str(task.get("kind", "?")) if isinstance(task, dict) else "?"

    @property
    def rounds(self) -> int:
        """How many rounds were asked for."""
        rounds = self.table.get("rounds", len(self.records))
        return rounds if isinstance(rounds, int) else len(self.records)

    @property
    def chance(self) -> Chance | None:
        """What guessing gets on its test set, if that is known."""
        return known_chance(self.environment.get("chance"))

    @property
    def verdict(self) -> Verdict:
        """How it ended, or how it stands."""
        return known_verdict(self.summary) or judge(self.records, self.chance)


def read_run(path: Path) -> Recorded:
    """What is in a run directory."""
    file = path / "config.toml"
    try:
        table = loads(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a run directory: it has no config.toml that can be read") from error
    summary = _read_json(path / "summary.json")
    return Recorded(
        path, table, read_records(path / "metrics.jsonl"), _read_json(path / "environment.json") or {}, summary
    )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories; a folder that is none stands for those in it."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.toml").is_file() else sorted(f.parent for f in path.glob("*/config.toml"))
        if not inside:
            raise CheckpointError(f"{path} is not a run directory and holds none; `thinwire run fedavg` makes one")
        found += [run for run in inside if run not in found]
    return found


def read_records(file: Path) -> list[Record]:
    """The lines of a metrics file up to the first that is cut short or makes no sense."""
    records: list[Record] = []
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return records
    for line in lines[:-1]:  # what follows the last end of line is still being written
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not _sound(record):
            break
        records.append(record)
    return records


def totals(records: Sequence[Mapping[str, Any]], accounting: Accounting = "honest") -> dict[str, Any]:
    """Rounds added up: the numbers of a summary that come from its records."""
    accuracies = [record["accuracy"] for record in records if record["accuracy"] is not None]
    own = [record["own_accuracy"] for record in records if record.get("own_accuracy") is not None]
    up, down, catchup = (sum(record[f"bytes_{way}"] for record in records) for way in ("up", "down", "catchup"))
    return {
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "final_own_accuracy": own[-1] if own else None,
        "best_own_accuracy": max(own, default=None),
        "final_loss": records[-1]["loss"] if records else None,
        **byte_totals(up, down, catchup, accounting),
        "seconds": round(sum(record["seconds"] for record in records), 3),
    }


def byte_totals(up: int, down: int, catchup: int, accounting: Accounting) -> dict[str, Any]:
    """All sums of bytes: `honest` of all messages, `ideal` without what returning clients catch up.

    >>> byte_totals(1, 2, 4, "ideal")["bytes_total"], byte_totals(1, 2, 4, "honest")["bytes_total"]
    (3, 7)
    """
    both = {"honest": up + down + catchup, "ideal": up + down}
    return {
        "bytes_up": up,
        "bytes_down": down,
        "bytes_catchup": catchup,
        "bytes_total": both[accounting],
        "accounting": accounting,
        "bytes_total_honest": both["honest"],
        "bytes_total_ideal": both["ideal"],
    }


def _sound(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    if not all(type(record.get(key)) is int and record[key] >= 0 for key in _COUNTS):
        return False
    for key in ("loss", "seconds", "accuracy", "own_accuracy"):
        value = record.get(key)
        if value is None and key.endswith("accuracy"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if key != "loss" and not math.isfinite(value):
            return False
    record.setdefault("accuracy", None)
    return True


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
