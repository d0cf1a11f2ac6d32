"""Figure of a metric against bytes or rounds: one curve per method, a band over its seeds."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.reports.charts import Curve, PlotArea, curves
from thinwire.reports.formatting import NARROW, ident
from thinwire.reports.objectives import number_text, objective_key, objective_name, percent_text, target_text
from thinwire.reports.page import Figure
from thinwire.reports.scale import limits, outside
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.svg import swatch

_NAMES = {
    "accuracy": "test accuracy",
    "client_accuracy": "client accuracy",
    "loss": "training loss",
    "test_loss": "test loss",
}


def curve_figure(
    task: str, groups: Sequence[SeedGroup], metric: str, targets: tuple[float, ...], against: str
) -> Figure:
    """A metric against `bytes` or `rounds`.

    Args:
        task: name of the task.
        groups: one curve each.
        metric: a key of a record, or `metrics.NAME` (see `evaluation.py`).
        targets: values of the objective to mark in a chart against bytes.
        against: `bytes` or `rounds`.
    """
    objective = groups[0].objective
    ranked = metric == objective_key(objective)
    name = objective_name(objective) if ranked else _NAMES.get(metric) or metric.partition(".")[2]
    by_bytes = against == "bytes"
    drawn = [_curve(group, i, metric, by_bytes) for i, group in enumerate(groups)]
    percent = metric in ("accuracy", "client_accuracy")
    higher = True if percent else objective.higher_is_better if ranked else False if metric == "loss" else None
    shown = limits(drawn, higher, bounded=percent)
    x = "bytes of all messages so far, catch-up included (log scale)" if by_bytes else "rounds"
    title = f"{name[:1].upper()}{name[1:]} against {'bytes' if by_bytes else 'rounds'}, {task}"
    last = [f"{curve.label} ends at {_value_text(metric, curve.points[-1][1])}" for curve in drawn if curve.points]
    area = PlotArea(
        title,
        f"x axis: {x}; y axis: {name}; " + "; ".join(last) + ".",
        "total bytes (log scale)" if by_bytes else "rounds",
        name,
        ident=f"{ident(task)}-{ident(metric)}-{against}",
        log_x=by_bytes,
        integer_x=not by_bytes,
        x_text=human_bytes if by_bytes else lambda value: f"{value:g}",
        y_text=lambda value: _value_text(metric, value),
        limits=shown,
        marks=tuple((one, f"target {target_text(objective, one)}") for one in targets) if by_bytes else (),
    )
    notes = ["Mean over seeds; the band spans the lowest to the highest seed."] if _several(groups) else []
    if by_bytes and (percent or ranked):
        notes.append(f"{'Up' if higher else 'Down'} and left is better.")
    if clipped := outside(drawn, shown):
        notes.append(f"Values outside the scale are drawn at its edge: {', '.join(clipped)}.")
    return Figure(
        title,
        " ".join(notes),
        curves(drawn, area),
        curves(drawn, area._replace(width=NARROW, height=300)),
        [(swatch(curve.series), curve.label) for curve in drawn],
    )


def _curve(group: SeedGroup, series: int, metric: str, by_bytes: bool) -> Curve:
    """The curve of a group, over its seeds that did not fail; if all failed, it is marked."""
    failed, runs = group.failed, group.runs
    label = group.label
    if failed and len(failed) < len(runs):
        group = group._replace(runs=[run for run in runs if run not in failed])
        label = f"{label} ({len(group.runs)} of {len(runs)} seeds; the others failed)"
    elif failed:
        label = f"{label} ({' or '.join(dict.fromkeys(run.verdict.status for run in failed))})"
    points = [(p.bytes if by_bytes else p.round, p.value, p.low, p.high) for p in group.curve(metric)]
    return Curve(label, series, points, len(failed) == len(runs))


def _several(groups: Sequence[SeedGroup]) -> bool:
    return any(len(group.runs) > 1 for group in groups)


def _value_text(metric: str, value: float) -> str:
    return percent_text(value) if metric in ("accuracy", "client_accuracy") else number_text(value, 3)
