"""Reading of run directories as plain values: every value is checked, torch is not needed, nothing is written.

Reading of `metrics.jsonl` stops at an incomplete line (the run is still writing, or was killed).

`SHA256SUMS` covers the files of a finished run, in the format of `sha256sum --check`; `verify` compares them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.reference import task_label
from thinwire.core.text import visible
from thinwire.errors import CheckpointError
from thinwire.runs.collapse import Chance, Verdict, judge, known_chance, known_verdict
from thinwire.runs.files import INVALID, read_json, read_lines, unpack, write_json
from thinwire.runs.toml import Table, read_toml

Record = dict[str, Any]  # a line of metrics.jsonl

SUMS = "SHA256SUMS"  # written before summary.json, so that a run with totals has checksums
CONFIG = "config.toml"  # covered, too; runs of version 0.9 and before have it without a checksum
COVERED = ("metrics.jsonl", "model.safetensors", "summary.json")
SEARCH = "search.json"  # how a setting of the run was found, and what the search cost; no result depends on it
BEST = "best.safetensors"  # covered too, in runs that keep the best model
CLIENTS = "clients.jsonl"  # covered too, in runs that measure clients: one line each, the worst first

_COUNTS = ("round", "bytes_up", "bytes_down", "bytes_catchup", "clients")


class SavedRun(NamedTuple):
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
        return totals(self.records, abandoned=known if _is_count(known) else None)

    @property
    def retries(self) -> list[dict[str, Any]]:
        """How often it went back and why (`retry.py`); empty if the run is not finished, or never did."""
        found: list[dict[str, Any]] = (self.summary or {}).get("retries", [])
        return found

    @property
    def chance(self) -> Chance | None:
        """The chance accuracy on its test set; None if unknown."""
        return known_chance(self.environment.get("chance"))

    @property
    def verdict(self) -> Verdict:
        """The status of the run, finished or not."""
        return known_verdict(self.summary) or judge(self.records, self.chance)


def read_run(path: Path) -> SavedRun:
    """Read a run directory; checksums are not compared (see `verify`)."""
    table = read_config(path)
    try:
        environment = read_json(path / "environment.json")
    except CheckpointError:  # no result depends on it
        environment = {}
    return SavedRun(path, table, read_records(path / "metrics.jsonl"), environment, read_totals(path))


def read_config(path: Path) -> Table:
    """The settings of a run directory."""
    if not (path / "config.toml").is_file():
        raise CheckpointError(f"{path} is not a run directory: it has no config.toml")
    table = read_toml(path / "config.toml")
    table.pop("accounting", None)  # of earlier versions
    return table


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
    return read_lines(file, parse_record)


def parse_record(record: Any) -> Record:
    """The record of a line; one that is not valid raises an error."""
    record.setdefault("accuracy", None)
    counts = [*(record.get(key) for key in _COUNTS), record.get("bytes_abandoned", 0)]
    shares = (value for key in ("accuracy", "client_accuracy") if (value := record.get(key)) is not None)
    numbers: list[Any] = [record.get("loss"), record.get("seconds"), *shares]
    sound = all(map(_is_count, counts)) and all(type(one) is float or _is_count(one) for one in numbers)
    if not sound or not all(map(math.isfinite, numbers[1:])):
        raise ValueError("not the record of a round")
    return dict(record)


def read_clients(path: Path) -> list[Record]:
    """The numbers of each client at the end of a run, the worst first; empty if none was measured."""
    return read_lines(
        path / CLIENTS,
        lambda row: {"client": visible(str(row.pop("client")), 100), **unpack(dict[str, float], row)},
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def troubles(records: Iterable[Mapping[str, Any]]) -> str:
    """Clients that were refused or left out, in how many rounds, and the first reason; "" if none was.

    >>> troubles([{"round": 2, "why": {"5": "refused: it sent NaN", "6": "bounded: far"}}, {"round": 3}])
    'client 5 is not used in 1 round (round 2, refused: it sent NaN)'
    """
    first, counts = dict[str, str](), Counter[str]()
    for one in records:
        for client, why in (one.get("why") or {}).items():
            if not str(why).startswith("bounded"):
                counts[client] += 1
                first.setdefault(client, visible(f"round {one['round']}, {why}", 200))
    named = [f"client {i} is not used in {n} round{'s' * (n > 1)} ({first[i]})" for i, n in counts.most_common(5)]
    return "; ".join(named) + (f"; and {len(counts) - 5} more clients" if len(counts) > 5 else "")


def totals(records: Sequence[Mapping[str, Any]], abandoned: int | None = None) -> dict[str, Any]:
    """The totals of some rounds: the values of a summary that come from its records.

    Args:
        records: lines of `metrics.jsonl`.
        abandoned: bytes of abandoned rounds; by default those in the records.
    """
    if abandoned is None:
        abandoned = sum(record.get("bytes_abandoned", 0) for record in records)
    last, found = records[-1] if records else {}, dict[str, Any]()
    for name in ("accuracy", "client_accuracy"):
        known = [record[name] for record in records if record.get(name) is not None]
        found |= {f"final_{name}": known[-1] if known else None, f"best_{name}": max(known, default=None)}
    found["final_loss"] = last.get("loss")
    for name in ("metrics", "clients_eval"):  # which not all runs have
        found |= next(({f"final_{name}": one[name]} for one in reversed(records) if one.get(name)), {})
    sent = {f"bytes_{way}": sum(record[f"bytes_{way}"] for record in records) for way in ("up", "down", "catchup")}
    everything = sum(sent.values()) + abandoned
    found |= {**sent, "bytes_abandoned": abandoned, "bytes_total": everything, "bytes_total_honest": everything}
    found["bytes_total_ideal"] = sent["bytes_up"] + sent["bytes_down"]  # as many papers count
    found |= {} if last.get("clock") is None else {"clock": last["clock"]}
    return found | {"seconds": round(sum(record["seconds"] for record in records), 3)}


def columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a round by column: its fields, metrics by their names, and values over clients after `clients_`.

    >>> columns({"round": 1, "metrics": {"f1": 0.5}, "clients_eval": {"p10": 0.2}, "layers": {}})
    {'round': 1, 'f1': 0.5, 'clients_p10': 0.2}
    """
    nested = {key: record.get(key) or {} for key in ("metrics", "clients_eval", "sites_eval", "layers")}
    fields = {key: value for key, value in record.items() if key not in nested}
    return {**fields, **nested["metrics"], **{f"clients_{key}": one for key, one in nested["clients_eval"].items()}}


def honest_bytes(record: Mapping[str, Any]) -> int:
    """All bytes up to a round since the one before: up, down, catch-up, and those of rounds abandoned in between."""
    sent = record["bytes_up"] + record["bytes_down"] + record["bytes_catchup"]
    return int(sent + record.get("bytes_abandoned", 0))


# -- searches --------------------------------------------------------------------------------------------------------


class SearchRecord(NamedTuple):
    """A search for a setting.

    Args:
        setting: the key, such as `method.client_opt.lr`.
        value: the value that was found.
        tried: all values that were tried, ascending.
        rungs: number of runs and rounds of each rung.
        seed: the seed of the search.
        chosen_by: the criterion.
        rounds: rounds of all runs of the search.
        bytes: bytes that they sent.
    """

    setting: str
    value: float
    tried: tuple[float, ...]
    rungs: tuple[tuple[int, int], ...]
    seed: int
    chosen_by: str
    rounds: int
    bytes: int

    @property
    def at_end(self) -> bool:
        """Whether the value is the smallest or the largest that was tried."""
        return self.value in (min(self.tried), max(self.tried))


def write_search(run: Path, record: SearchRecord) -> None:
    """Write the record of a search into the directory of a run that uses its result."""
    write_json(run / SEARCH, record._asdict())


def read_search(run: Path) -> SearchRecord | None:
    """The record of a search in a run directory; None if there is none, or if it is not valid."""
    try:
        found: SearchRecord = unpack(SearchRecord, read_json(run / SEARCH))
    except (CheckpointError, *INVALID):
        return None
    return found if found.tried else None


# -- checksums -------------------------------------------------------------------------------------------------------


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """The contents of `SHA256SUMS` for files with these contents.

    >>> sums_of({"summary.json": b"{}"})
    b'44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a  summary.json\\n'
    """
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def read_totals(path: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if it is not finished."""
    return read_json(path / "summary.json") if (path / "summary.json").is_file() else None


def verify(path: Path) -> None:
    """Raise a CheckpointError if a file of a finished run does not match its checksum."""
    sums = (path / SUMS).read_bytes() if (path / SUMS).is_file() else b""
    listed = sums.decode("utf-8", "replace").splitlines()
    for name in (*COVERED, BEST, CLIENTS, CONFIG):
        file, wanted = path / name, [line for line in listed if line.endswith(f"  {name}")]
        if name == CONFIG and not wanted:
            continue
        found = []
        if file.is_file():
            with file.open("rb") as stream:
                found = [f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {name}"]
        if found != wanted:
            what = "is damaged, missing, or of another run: its SHA-256 is not the one in"
            remedy = "restore the file, or run it again" if name == CONFIG else _remedy(path)
            raise CheckpointError(f"{file} {what} {path / SUMS}; {remedy}")


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
