"""The runs of a page: what the archive keeps of each, where they come from, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from thinwire.core.units import human_bytes, human_seconds
from thinwire.experiments.archive import Archive, Runs, curves
from thinwire.experiments.config import Experiment
from thinwire.experiments.execute import default_folder
from thinwire.experiments.grid import Line, training_failed
from thinwire.experiments.records import read_totals
from thinwire.experiments.repro import Reproduction
from thinwire.experiments.toml import Table
from thinwire.reports.measures import heading, measured

SUMMARY_KEYS = (  # of each run, in the .json file
    *("best_accuracy", "final_accuracy", "best_client_accuracy", "final_client_accuracy", "trainable", "bytes_total"),
    *("bytes_catchup", "seconds", "task", "status", "status_round", "chance_accuracy", "nonzero_b"),
    *("parameters", "bytes_up", "bytes_total_ideal"),
)


def archived_runs(repro: Reproduction, lines: Sequence[Line], runs: Runs) -> dict[str, Table]:
    """The values of every run that finished or diverged, by its name on the page."""
    out: dict[str, Table] = {}
    for line in lines:
        measure = repro.grid.content["rows"][line.row]["measure"]
        for e in line.runs:
            if (known := kept_values(e, runs)) is None:
                continue
            about = {"tables": [repro.name], "method": line.label, "settings": line.settings}
            entry = out.setdefault(runs.archive.name(e.digest()), known | about)
            if entry["status"] != "diverged":
                entry["values"] = {**entry["values"], heading(measure): measured(measure, e, runs)}
    return out


def kept_values(e: Experiment, runs: Runs) -> Table | None:
    """What an archive keeps of a run; None if it is neither finished nor diverged."""
    if kept := runs.kept(e):
        return dict(kept)
    found = runs.summary(e)
    if found is None and not training_failed(e, runs):
        return None
    if found is None:  # it diverged; early versions wrote no totals then
        found = {"rounds": 0, "status": "diverged", **(read_totals(default_folder(e, runs.out)) or {})}
    about = {"digest": e.digest(), **runs.provenance(e), "seed": e.seed, "rounds": found["rounds"]}
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


def made_text(run: Mapping[str, Any]) -> str:
    """The day and the commit that made a run.

    >>> made_text({"commit": "4e48f0d6c1aa", "date": "2026-11-15T19:19:36Z"}), made_text({})
    ('2026-11-15, 4e48f0d', 'unknown')
    """
    commit = str(run.get("commit") or "")
    short = commit[:7] + ("+" if commit.endswith("+") else "")
    return ", ".join(word for word in (str(run.get("date") or "")[:10], short) if word) or "unknown"


def provenance_text(runs: Iterable[Mapping[str, Any]]) -> str:
    """When and at which commits the runs of a table were made, as a sentence; empty if nothing is known.

    >>> provenance_text([{"commit": "4e48f0d", "date": "2026-11-15"}] * 2 + [{}])
    'Made on 2026-11-15, 4e48f0d (2 runs); unknown (1 run). '
    """
    counts = Counter(map(made_text, runs))
    if not counts or set(counts) == {"unknown"}:
        return ""
    parts = [f"{made} ({run_count(counts[made])})" for made in sorted(counts)]
    return f"Made on {'; '.join(parts)}. "


def cost_text(runs: Sequence[Mapping[str, Any]], device: str) -> str:
    """What the runs of a table cost, as a sentence; empty without runs.

    >>> cost_text([{"seconds": 1800.0, "bytes_total": 5_000_000}] * 3, "cuda")
    'Cost: 3 runs, 1.5 h of training on cuda (the sum over runs; some shared the device), 15 MB of messages. '
    """
    if not runs:
        return ""
    seconds, sent = (sum(run.get(key) or 0 for run in runs) for key in ("seconds", "bytes_total"))
    unknown = sum(run.get("seconds") is None for run in runs)
    beyond = f"; that of {run_count(unknown)} is not known" if unknown else ""
    return (
        f"Cost: {run_count(len(runs))}, {human_seconds(seconds)} of training on {device} (the sum over runs; some "
        f"shared the device{beyond}), {human_bytes(sent)} of messages. "
    )


def run_count(count: int) -> str:
    """A number of runs in words.

    >>> run_count(1), run_count(1200)
    ('1 run', '1,200 runs')
    """
    return "1 run" if count == 1 else f"{count:,} runs"
