"""Figure of a metric against bytes or rounds: one curve per method, a band over its seeds."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.reports.charts import Curve, PlotArea, curves
from thinwire.reports.formatting import NARROW, ident, percent_text
from thinwire.reports.page import Figure
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.svg import swatch

_NAMES = {"accuracy": "test accuracy", "client_accuracy": "client accuracy", "loss": "training loss"}


def curve_figure(
    task: str, groups: Sequence[SeedGroup], metric: str, targets: tuple[float, ...], against: str
) -> Figure:
    """A metric against `bytes` or `rounds`.

    Args:
        task: name of the task.
        groups: one curve each.
        metric: a key of a record, or `metrics.NAME` (see `evaluation.py`).
        targets: accuracies to mark in a chart against bytes.
        against: `bytes` or `rounds`.
    """
    name = _NAMES.get(metric) or metric.partition(".")[2]
    by_bytes = against == "bytes"
    drawn = [
        Curve(group.label, i, [(p.bytes if by_bytes else p.round, p.value, p.low, p.high) for p in group.curve(metric)])
        for i, group in enumerate(groups)
    ]
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
        marks=tuple((target, f"target {percent_text(target)}") for target in targets) if by_bytes else (),
    )
    several = any(len(group.runs) > 1 for group in groups)
    band = "Mean over seeds; the band spans the lowest to the highest seed." if several else ""
    direction = " Up and left is better." if by_bytes and metric.endswith("accuracy") else ""
    return Figure(
        title,
        band + direction,
        curves(drawn, area),
        curves(drawn, area._replace(width=NARROW, height=300)),
        [(swatch(curve.series), curve.label) for curve in drawn],
    )


def _value_text(metric: str, value: float) -> str:
    return percent_text(value) if metric in ("accuracy", "client_accuracy") else f"{value:.3g}"
