"""Reading of run directories as plain values: every value is checked, torch is not needed, nothing is written.

Reading of `metrics.jsonl` stops at an incomplete line (the run is still writing, or was killed).

`SHA256SUMS` covers the files of a finished run, in the format of `sha256sum --check`. The rounds of an unfinished run
are covered up to its newest checkpoint, which holds their lines. The error for a file that does not match has its path.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thinwire.core.reference import task_label
from thinwire.core.text import visible
from thinwire.errors import CheckpointError
from thinwire.runs.collapse import Chance, Verdict, judge, known_chance, known_verdict
from thinwire.runs.files import read_checked, read_json, read_lines
from thinwire.runs.toml import Table, read_toml

Record = dict[str, Any]  # a line of metrics.jsonl
Accounting = Literal["honest", "ideal"]

SUMS = "SHA256SUMS"  # written before summary.json, so that a run with totals has checksums; early versions have none
COVERED = ("metrics.jsonl", "model.safetensors", "summary.json")
ROLLED_BACK = "rolled back"  # the status of a time that a run went back without another learning rate
KEEP = 2  # checkpoints, the newest; see `Checkpointing.keep`
BEST = "best.safetensors"  # covered too, in runs that keep the best model

_COUNTS = ("round", "bytes_up", "bytes_down", "bytes_catchup", "clients")
_LARGEST = 1 << 63  # of a count


class Recorded(NamedTuple):
    """A run, finished or not."""

    path: Path
    table: Table
    records: list[Record]
    environment: dict[str, Any]
    summary: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The label of its method in tables, on one line."""
        return visible(str(self.table.get("name", self.path.name)), 200)

    @property
    def task(self) -> str:
        """The name of its task."""
        task = self.table.get("task")
        return visible(task_label(task), 200) if isinstance(task, dict) else "?"

    @property
    def rounds(self) -> int:
        """The number of rounds in the configuration."""
        rounds = self.table.get("rounds", len(self.records))
        return rounds if isinstance(rounds, int) else len(self.records)

    @property
    def totals(self) -> dict[str, Any]:
        """The totals of its rounds, with the bytes of abandoned ones."""
        known = (self.summary or {}).get("bytes_abandoned")
        return totals(self.records, abandoned=known if type(known) is int and 0 <= known < _LARGEST else None)

    @property
    def retries(self) -> list[dict[str, Any]]:
        """How often it went back and why (`retry.py`); empty if the run is not finished, or never did."""
        found = (self.summary or {}).get("retries")
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    @property
    def chance(self) -> Chance | None:
        """The chance accuracy on its test set; None if unknown."""
        return known_chance(self.environment.get("chance"))

    @property
    def verdict(self) -> Verdict:
        """The status of the run, finished or not."""
        return known_verdict(self.summary) or judge(self.records, self.chance)


def read_run(path: Path) -> Recorded:
    """Read a run directory; a file whose checksum does not match is a CheckpointError with its path."""
    file = path / "config.toml"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a run directory: it has no config.toml that can be read")
    table = read_toml(file)
    summary = read_summary(path)
    if summary is None:
        records = _covered_records(path)
    else:
        verify(path, "metrics.jsonl")
        records = read_records(path / "metrics.jsonl")
    return Recorded(path, table, records, _read_notes(path / "environment.json"), summary)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories; a folder that is none is replaced by those in it."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / "config.toml").is_file() else sorted(f.parent for f in path.glob("*/config.toml"))
        if not inside:
            raise CheckpointError(f"{path} is not a run directory and holds none; `thinwire run fedavg` writes one")
        found += [run for run in inside if run not in found]
    return found


def read_records(file: Path) -> list[Record]:
    """The lines of a metrics file up to the first that is incomplete or not valid."""
    return parse_records(read_lines(file))


def parse_records(lines: Iterable[bytes]) -> list[Record]:
    """The records of some lines, as `read_records`."""
    records: list[Record] = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _sound(record):
            break
        records.append(record)
    return records


def totals(
    records: Sequence[Mapping[str, Any]], accounting: Accounting = "honest", abandoned: int | None = None
) -> dict[str, Any]:
    """The totals of some rounds: the values of a summary that come from its records.

    Args:
        records: lines of `metrics.jsonl`.
        accounting: which bytes count in the total.
        abandoned: bytes of abandoned rounds; by default those in the records.
    """
    if abandoned is None:
        abandoned = sum(record.get("bytes_abandoned", 0) for record in records)
    accuracies = [record["accuracy"] for record in records if record["accuracy"] is not None]
    of_clients = [record["client_accuracy"] for record in records if record.get("client_accuracy") is not None]
    up, down, catchup = (sum(record[f"bytes_{way}"] for record in records) for way in ("up", "down", "catchup"))
    return {
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "final_client_accuracy": of_clients[-1] if of_clients else None,
        "best_client_accuracy": max(of_clients, default=None),
        "final_loss": records[-1]["loss"] if records else None,
        **_final("metrics", records),
        **_final("clients_eval", records),
        **byte_totals(up, down, catchup, accounting, abandoned),
        **({"clock": records[-1]["clock"]} if records and records[-1].get("clock") is not None else {}),
        "seconds": round(sum(record["seconds"] for record in records), 3),
    }


def _final(field: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of a field that not all runs have, as `final_...`; empty if no record has one."""
    found = next((record[field] for record in reversed(records) if record.get(field)), None)
    return {f"final_{field}": found} if found else {}


def honest_bytes(record: Mapping[str, Any]) -> int:
    """All bytes up to a round since the one before: up, down, catch-up, and those of rounds abandoned in between."""
    sent = record["bytes_up"] + record["bytes_down"] + record["bytes_catchup"]
    return int(sent + record.get("bytes_abandoned", 0))


def byte_totals(up: int, down: int, catchup: int, accounting: Accounting, abandoned: int = 0) -> dict[str, Any]:
    """All totals of bytes: `honest` of all messages, `ideal` without catch-up and abandoned rounds.

    >>> byte_totals(1, 2, 4, "ideal")["bytes_total"], byte_totals(1, 2, 4, "honest")["bytes_total"]
    (3, 7)
    """
    both = {"honest": up + down + catchup + abandoned, "ideal": up + down}
    return {
        "bytes_up": up,
        "bytes_down": down,
        "bytes_catchup": catchup,
        "bytes_abandoned": abandoned,
        "bytes_total": both[accounting],
        "accounting": accounting,
        "bytes_total_honest": both["honest"],
        "bytes_total_ideal": both["ideal"],
    }


# -- checksums -------------------------------------------------------------------------------------------------------


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """The contents of `SHA256SUMS` for files with these contents.

    >>> sums_of({"summary.json": b"{}"})
    b'44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a  summary.json\\n'
    """
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if it is not finished."""
    if not (path / "summary.json").is_file():
        return None
    verify(path, "summary.json")
    return read_json(path / "summary.json")


def read_totals(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run with valid totals; None if it is not finished."""
    summary = read_summary(path)
    if summary is None:
        return None
    for key in ("rounds", "bytes_up", "bytes_down", "bytes_catchup"):
        if type(summary.get(key)) is not int or not 0 <= summary[key] < _LARGEST:
            given = visible(repr(summary.get(key)), 40)
            raise CheckpointError(f"{path / 'summary.json'} is damaged: {key} is {given}; {_remedy(path)}")
    return summary


def verify(path: Path, *names: str) -> None:
    """Raise a CheckpointError if files of a finished run do not match their checksums; by default all of them."""
    sums = _sums(path)
    for name in (name for name in names or (*COVERED, BEST) if name in sums):
        file = path / name
        if file.is_file():
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            what = "is damaged, or of another run: its SHA-256 is not the one in"
        else:
            found, what = "", "is missing, but listed in"
        if found != sums[name] and (path / "summary.json").is_file():  # if not, the run was just started again
            raise CheckpointError(f"{file} {what} {path / SUMS}; {_remedy(path)}")


def _sums(path: Path) -> dict[str, str]:
    """SHA-256 by file; empty for a run of an early version."""
    file = path / SUMS
    if not file.is_file():
        return {}
    with file.open("rb") as stream:
        lines = stream.read(4096).decode("utf-8", "replace").splitlines()
    found = [re.fullmatch(r"([0-9a-f]{64})  ([a-z.]+)", line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if not {"metrics.jsonl", "summary.json"} <= set(sums) <= {*COVERED, BEST} or not all(found):
        raise CheckpointError(f"{file} is damaged: it must hold the SHA-256 of {', '.join(COVERED)}; {_remedy(path)}")
    return sums


def _remedy(path: Path) -> str:
    """What to do about a damaged file of a finished run."""
    if rounds_in(path / "checkpoints"):
        return f"remove {path / 'summary.json'}, and `thinwire resume {path}` writes it again from its last checkpoint"
    return "restore the file, or run it again"


def rounds_in(folder: Path) -> list[int]:
    """The rounds with a checkpoint, ascending."""
    found = (re.fullmatch(r"round-(\d{6,12})\.json", path.name) for path in folder.glob("round-*.json"))
    return sorted(int(match[1]) for match in found if match)


def checkpoint_file(folder: Path, number: int) -> Path:
    """The JSON of the checkpoint of a round."""
    return folder / f"round-{number:06d}.json"


def remove_checkpoint(folder: Path, number: int) -> None:
    """Remove both files of a checkpoint; it exists while its JSON does."""
    checkpoint_file(folder, number).unlink(missing_ok=True)
    checkpoint_file(folder, number).with_suffix(".safetensors").unlink(missing_ok=True)


def lines_at(folder: Path, number: int) -> str | None:
    """The lines of `metrics.jsonl` that a checkpoint holds; None if it has none, or is damaged."""
    try:
        text = read_checked(checkpoint_file(folder, number)).get("metrics")
    except CheckpointError:
        return None
    return text if isinstance(text, str) else None


def _covered_records(path: Path) -> list[Record]:
    """The records of an unfinished run; those up to its newest checkpoint must match the checkpoint."""
    folder, file = path / "checkpoints", path / "metrics.jsonl"
    rounds = rounds_in(folder)
    wanted = lines_at(folder, rounds[-1]) if rounds else None
    if wanted and not begins_with(file, wanted.encode()):
        newest = checkpoint_file(folder, rounds[-1])
        if newest.is_file():  # if not, the run was just started again
            raise CheckpointError(
                f"{file} is damaged, or of another run: its first {rounds[-1]} rounds are not those in {newest}; "
                f"`thinwire resume {path}` restores them"
            )
    return read_records(file)


def begins_with(file: Path, data: bytes) -> bool:
    """Whether a file begins with these bytes; a missing file is empty."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(data)) == data
    except FileNotFoundError:
        return not data


# -- single values ---------------------------------------------------------------------------------------------------


def _sound(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    if not all(type(record.get(key)) is int and 0 <= record[key] < _LARGEST for key in _COUNTS):
        return False
    for key in ("loss", "seconds", "accuracy", "client_accuracy"):
        value = record.get(key)
        if value is None and key.endswith("accuracy"):
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if abs(value) >= _LARGEST and isinstance(value, int):  # too large for a float
            return False
        if key != "loss" and not math.isfinite(value):
            return False
    lost = record.get("bytes_abandoned", 0)
    if type(lost) is not int or not 0 <= lost < _LARGEST:
        return False
    record.setdefault("accuracy", None)
    return True


def _read_notes(file: Path) -> dict[str, Any]:
    """The object of a file that no result depends on; empty if it cannot be read."""
    try:
        return read_json(file)
    except CheckpointError:
        return {}
