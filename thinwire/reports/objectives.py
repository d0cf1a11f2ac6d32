"""The objective of recorded runs: read from `summary.json`, and shown in its own words and unit.

    accuracy    in percent, targets from 0 to 1
    others      in their own unit: r2, test loss, perplexity, a metric of one's own

A finished run without the entry is of an earlier version and ranked by accuracy. An unfinished run has no summary: it
has the objective of a finished run of its task that it recorded values of.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.text import visible
from thinwire.experiments.records import Recorded
from thinwire.metrics.objective import Objective
from thinwire.reports.evaluation import metric_value

ACCURACY = Objective()


def objective_key(objective: Objective) -> str:
    """Where records have the value of an objective (see `metric_value`).

    >>> [objective_key(Objective(name)) for name in ("accuracy", "loss", "r2")]
    ['accuracy', 'test_loss', 'metrics.r2']
    """
    return {"accuracy": "accuracy", "loss": "test_loss"}.get(objective.name, f"metrics.{objective.name}")


def objective_name(objective: Objective) -> str:
    """The name of an objective in titles, on one line: `test loss`, `r2`."""
    return visible(objective.label, 60)


def objectives(runs: Sequence[Recorded]) -> list[Objective]:
    """The objective of each run of a task."""
    stated = [_stated(run) for run in runs]
    known = list(dict.fromkeys(one for one in stated if one))
    return [one or _guessed(run, known) for one, run in zip(stated, runs, strict=True)]


def target_text(objective: Objective, target: float) -> str:
    """A target in a sentence.

    >>> target_text(ACCURACY, 0.9), target_text(Objective("loss", False), 2912.0)
    ('90 %', 'test loss 2,912')
    """
    return percent_text(target) if objective == ACCURACY else f"{objective_name(objective)} {number_text(target)}"


def percent_text(fraction: float) -> str:
    """A fraction in percent, with three digits.

    >>> percent_text(0.8125)
    '81.2 %'
    """
    return f"{100 * fraction:.3g} %"


def number_text(value: float, digits: int = 4) -> str:
    """A number in its own unit; thousands are written out.

    >>> number_text(0.48731), number_text(2912.4), number_text(1e9)
    ('0.4873', '2,912', '1e+09')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.{digits}g}"


def _stated(run: Recorded) -> Objective | None:
    """The objective in the summary of a run; accuracy for a finished run of an earlier version."""
    if run.summary is None:
        return None
    entry = run.summary.get("objective")
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str) or not name:
        return ACCURACY
    return Objective(name, entry.get("higher_is_better") is not False)


def _guessed(run: Recorded, known: Sequence[Objective]) -> Objective:
    """The objective of an unfinished run: one of those of its task, else accuracy or the test loss."""
    for one in (*known, ACCURACY, Objective("loss", higher_is_better=False)):
        if any(metric_value(record, objective_key(one)) is not None for record in run.records):
            return one
    return ACCURACY
