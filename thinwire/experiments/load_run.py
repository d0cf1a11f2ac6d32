"""`tw.load_run`: the results of a run directory, of a script or of the command line, as a `Run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.experiments.result import Run
from thinwire.experiments.retry import read_retries
from thinwire.experiments.run_files import Contents, read_results
from thinwire.experiments.selection import ValidationObjective
from thinwire.metrics.objective import Objective


def load_run(path: Path | str) -> Run:
    """Read a finished run. The architecture is not stored: `run.model(module)` takes a module of yours.

    Args:
        path: a run directory, written by `out=`, `run.save` or the command line.
    """
    found = read_results(Path(path))
    summary, environment = found.run.summary or {}, found.run.environment
    objective = _objective(summary.get("objective"))
    selected = objective
    if any(record.client_accuracy is not None or record.client_loss is not None for record in found.records):
        by_accuracy = objective.name == "accuracy"
        selected = ValidationObjective() if by_accuracy else ValidationObjective("loss", higher_is_better=False)
    return Run(
        found.records,
        found.weights,
        {},
        summary,
        objective,
        selected,
        str(environment.get("clients_trained_by", "")),
        str(environment.get("because", "")),
        Path(path),
        retries=read_retries(Path(path)),
        _contents=Contents(found.run.table, environment),
        _best=found.best,
    )


def _objective(value: Any) -> Objective:
    """The objective in a summary; accuracy in those of older versions."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Objective()
    return Objective(value["name"], value.get("higher_is_better") is not False)
