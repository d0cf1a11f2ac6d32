"""Results of runs in one JSON file, beside a page of tables, for when the run directories are gone.

    {"tables": {"mapo-3": {"scale": "gpu", "device": "cuda", "set": []}},
     "runs": {"1f93ab20": {"digest": ..., "commit": ..., "date": ..., "best_accuracy": ..., "curve": [...], ...}}}

`tables` are those of the page with the options that made them. A run is found by its `digest`, the hash of all its
settings: a table whose settings were changed has none of its earlier runs, which stay in the file. `curve` has [round,
bytes so far, accuracy] of every evaluated round, `curve_ideal` the bytes without catch-up, `curve_up` those of uploads,
`curve_client` the clients' accuracy. Runs that diverged are kept too, so that they are not run again.

The file may have more: that of a frontier has its rows, and no tables (`frontier_page.py`).

`Runs` looks in the run directories first and then in the archive; the functions of `grid.py` take either a folder or a
`Runs`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import CheckpointError
from thinwire.federation.settings import Settings
from thinwire.runs.collapse import is_broken
from thinwire.runs.config import digest, to_table
from thinwire.runs.execute import default_folder
from thinwire.runs.files import read_json
from thinwire.runs.records import Record, SavedRun, honest_bytes, read_run, read_totals
from thinwire.runs.toml import Table

SHORT = 8  # digits of a digest by which pages name a run
SUMMARY_KEYS = (  # of each run, in the .json file
    *("best_accuracy", "final_accuracy", "best_client_accuracy", "final_client_accuracy", "trainable", "bytes_total"),
    *("bytes_catchup", "seconds", "task", "status", "status_round", "chance_accuracy", "nonzero_b"),
    *("parameters", "bytes_up", "bytes_total_ideal"),
)


class Archive:
    """The contents of such a file.

    Args:
        tables: the tables of the page, with the options that made them.
        runs: the runs, by the name that the page has for them.
    """

    def __init__(self, tables: Mapping[str, Table] | None = None, runs: Mapping[str, Table] | None = None) -> None:
        self.tables, self.runs = dict(tables or {}), dict(runs or {})
        self._names = {run["digest"]: name for name, run in self.runs.items() if run.get("digest")}

    @classmethod
    def read(cls, file: Path) -> Archive:
        """Read an archive; a file that does not exist is an empty one."""
        if not file.exists():
            return cls()
        content = read_json(file)
        tables = content.get("tables", {})
        if not _all(tables, _sound_table) or not _all(content.get("runs"), _sound):
            raise CheckpointError(f"{file} is no archive of runs: it must hold tables and runs; name another --md")
        return cls(tables, content["runs"])

    def name(self, digest: str) -> str:
        """The name of a run on the page: that of the archive, or the first digits of its digest."""
        return self._names.get(digest, digest[:SHORT])

    def find(self, experiment: Settings) -> Table | None:
        """The run with all settings of an experiment; None if there is none."""
        name = self._names.get(digest(experiment))
        return None if name is None else self.runs[name]

    def text(self) -> str:
        """The file: one line for each run, so that versions can be compared."""
        return f'{{"tables": {json.dumps(self.tables, indent=1)},\n{self.runs_text()}}}\n'

    def runs_text(self) -> str:
        """The runs in the file."""
        runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(self.runs[name])}" for name in sorted(self.runs))
        return f'"runs": {{\n{runs}\n}}'


class Runs(NamedTuple):
    """Where results of runs are read from: run directories, then an archive."""

    out: Path
    archive: Archive

    @classmethod
    def at(cls, where: Path | Runs) -> Runs:
        """A folder of run directories without an archive, or what is given."""
        return where if isinstance(where, Runs) else cls(where, Archive())

    def kept(self, experiment: Settings) -> Table | None:
        """The archived run, if it did not end in a run directory."""
        here = (default_folder(experiment, self.out) / "summary.json").exists()
        return None if here else self.archive.find(experiment)

    def summary(self, experiment: Settings) -> dict[str, Any] | None:
        """The summary of a run; None if it did not finish, or diverged. That of an archived run has fewer keys."""
        found = self.kept(experiment) or read_totals(default_folder(experiment, self.out))
        return None if found is None or found.get("status") == "diverged" else found

    def failed(self, experiment: Settings) -> bool:
        """Whether a run is known to fail: it diverged, collapsed, or ended at chance (`collapse.py`)."""
        found = self.kept(experiment) or read_totals(default_folder(experiment, self.out))
        return found is not None and is_broken(found)

    def recorded(self, experiment: Settings) -> SavedRun:
        """A run with its records; an archived one has only those of evaluated rounds, each with all bytes since."""
        kept = self.kept(experiment)
        if kept is None:
            return read_run(default_folder(experiment, self.out))
        return SavedRun(default_folder(experiment, self.out), to_table(experiment), _records(kept), {}, kept)

    def provenance(self, experiment: Settings) -> dict[str, str]:
        """The commit and the time at which a run was made, as far as they are known."""
        kept = self.kept(experiment)
        source = kept if kept is not None else read_run(default_folder(experiment, self.out)).environment
        return {key: str(source.get(key) or "") for key in ("commit", "date")}

    def note(self, experiment: Settings) -> str:
        """The remark of a run about its data; empty if there is none."""
        kept = self.kept(experiment)
        source = kept if kept is not None else read_run(default_folder(experiment, self.out)).environment
        return str(source.get("note") or "")


def kept_values(e: Settings, runs: Runs) -> Table | None:
    """What an archive keeps of a run; None if it is neither finished nor diverged."""
    if kept := runs.kept(e):
        return dict(kept)
    found = runs.summary(e)
    if found is None and not runs.failed(e):
        return None
    if found is None:  # it diverged; early versions wrote no totals then
        found = {"rounds": 0, "status": "diverged", **(read_totals(default_folder(e, runs.out)) or {})}
    about = {"digest": digest(e), **runs.provenance(e), "seed": e.seed, "rounds": found["rounds"]}
    values = {key: found[key] for key in SUMMARY_KEYS if found.get(key) is not None}
    return {**about, "status": None, **values, "values": {}, **curves(runs.recorded(e).records)}


def merged(archive: Archive, tables: Iterable[Mapping[str, Table]]) -> dict[str, Table]:
    """All runs of an archive and of some tables; `tables` of a run are those that show it now."""
    out: dict[str, Table] = {name: {**run, "tables": []} for name, run in archive.runs.items()}
    for runs in tables:
        for name, run in runs.items():
            before = out.get(name, {"tables": [], "values": {}})
            also = {"tables": [*before["tables"], *run["tables"]], "values": {**before["values"], **run["values"]}}
            out[name] = run | also
    return out


def curves(records: list[Record]) -> Table:
    """The curves of a run for an archive: those of the accuracy, of bytes without catch-up and of clients' accuracy."""
    spent = list(itertools.accumulate(map(honest_bytes, records)))
    ideal = list(itertools.accumulate(record["bytes_up"] + record["bytes_down"] for record in records))
    up = list(itertools.accumulate(record["bytes_up"] for record in records))
    shown = [i for i, record in enumerate(records) if record["accuracy"] is not None]
    out: Table = {"curve": [[records[i]["round"], spent[i], records[i]["accuracy"]] for i in shown]}
    out |= {"curve_ideal": [ideal[i] for i in shown], "curve_up": [up[i] for i in shown]}
    of_clients = [records[i].get("client_accuracy") for i in shown]
    return out | ({"curve_client": of_clients} if any(value is not None for value in of_clients) else {})


def _records(kept: Table) -> list[Record]:
    """The evaluated rounds of an archived run as records.

    >>> run = {"curve": [[5, 100, 0.1], [9, 300, 0.2]], "curve_ideal": [80, 200]}
    >>> [(r["round"], r["bytes_up"], r["bytes_catchup"], r["accuracy"]) for r in _records(run)]
    [(5, 80, 20, 0.1), (9, 120, 80, 0.2)]
    """
    curve: list[tuple[int, int, float]] = kept.get("curve", [])
    ideal = kept.get("curve_ideal") or [spent for _, spent, _ in curve]
    of_clients = kept.get("curve_client") or [None] * len(curve)
    out: list[Record] = []
    before = (0, 0, 0)
    for (number, *_, accuracy), sums, client in zip(curve, _sums(curve, ideal, kept), of_clients, strict=True):
        up, plain, spent = (now - then for now, then in zip(sums, before, strict=True))
        sent = {"bytes_up": up, "bytes_down": plain - up, "bytes_catchup": spent - plain}
        out.append({"round": number, "accuracy": accuracy, "client_accuracy": client, "loss": None, **sent})
        before = sums
    return out


def _sums(curve: list[tuple[int, int, float]], ideal: list[int], kept: Table) -> list[tuple[int, int, int]]:
    """Bytes so far: uploads, without catch-up, and all; where uploads are not known, they have all of the second."""
    return list(zip(kept.get("curve_up") or ideal, ideal, (spent for _, spent, _ in curve), strict=True))


def _all(value: Any, sound: Callable[[Any], bool]) -> bool:
    """Whether a value is a table whose entries are all sound."""
    return isinstance(value, dict) and all(map(sound, value.values()))


def _sound_table(options: Any) -> bool:
    """Whether the options of a table are complete."""
    kinds = {"scale": str, "device": str, "set": list}
    return isinstance(options, dict) and all(isinstance(options.get(key), kind) for key, kind in kinds.items())


def _sound(run: Any) -> bool:
    """Whether an archived run has what tables are made of."""
    kinds = {"curve": list, "seed": int, "tables": list, "values": dict, "rounds": int}
    return isinstance(run, dict) and all(isinstance(run.get(key), kind) for key, kind in kinds.items())
