"""A run that was kept in memory as a run directory, and the results of a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save

from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.experiments.records import BEST, Recorded, read_run, verify
from thinwire.experiments.run_directory import RunFolder, records_of
from thinwire.experiments.watch import how_to_resume
from thinwire.runtime.job import RoundRecord


class Contents(NamedTuple):
    """What a run directory holds besides results: the configuration, and facts about the machine."""

    table: Mapping[str, Any] = {}
    environment: Mapping[str, Any] = {}


class Results(NamedTuple):
    """The results in a run directory; without weights if the run diverged."""

    run: Recorded
    records: list[RoundRecord]
    weights: Tree
    best: Tree | None


def write_run(
    path: Path,
    contents: Contents,
    records: Sequence[RoundRecord],
    summary: dict[str, Any],
    weights: Tree,
    best: Tree | None,
) -> Path:
    """Write a finished run; the directory must not exist, or be empty.

    Args:
        path: the directory.
        contents: its configuration and facts about the machine.
        records: one record a round.
        summary: the totals.
        weights: the final weights and buffers.
        best: those of the best round.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists; name a folder that does not, or an empty one")
    folder = RunFolder(path, dict(contents.table))
    with folder.locked():
        folder.create()
        folder.write_environment(dict(contents.environment))
        for record in records:
            folder.record(record)
        model = None
        if best is not None:
            number = str(summary.get("best", {}).get("round", ""))
            model = save({name: block.contiguous() for name, block in best.items()}, metadata={"round": number})
        folder.finish(summary, weights, model)
    return path


def read_results(path: Path) -> Results:
    """The results of a finished run, whose files are verified."""
    run = read_run(path)
    if run.summary is None:
        how = how_to_resume(path, run.table)
        raise CheckpointError(f"{path} is not finished ({len(run.records)} of {run.rounds} rounds); {how}")
    verify(path)
    final, best = path / "model.safetensors", path / BEST
    weights = dict(load_file(final)) if final.is_file() else {}
    records = records_of(run.records)
    return Results(run, records, weights, dict(load_file(best)) if best.is_file() else None)
