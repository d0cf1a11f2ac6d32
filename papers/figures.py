"""All charts of the pages, as contents of SVG files.

`bytes_chart` is accuracy against bytes of the rows of a table. `against_chart` is the chart of a reproduced figure: a
file of `papers/repro` with `against = { x = "trained parameters", log = true }` has rows with `x`, a number, and
`series`, the name of the curve that the row is a point of; a row without `x` is a horizontal line, such as FedAvg.
`frontier_chart` has one mark for each method, and a line of steps: the best accuracy that so many bytes can buy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from papers.frontier import Row, best_by_bytes
from thinwire.core.units import human_bytes
from thinwire.experiments.records import Recorded
from thinwire.reports.axis import HorizontalAxis, round_ticks
from thinwire.reports.charts import Curve, Plot, PlotArea, curves, drawing
from thinwire.reports.curve_figure import curve_figure
from thinwire.reports.objectives import percent_text
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import TICK_WIDTH, marker, standalone, swatch


class Dot(NamedTuple):
    """A point, and the values of its lowest and its highest seed."""

    label: str
    series: int
    x: float
    y: float
    low: float
    high: float


def bytes_chart(paper: str, column: str, runs: Mapping[str, Sequence[Recorded]], metric: str) -> str:
    """Accuracy against bytes of the rows of a column, each over its runs; "" if nothing was evaluated."""
    groups = [SeedGroup(label, list(found)) for label, found in runs.items() if found]
    if not any(group.curve(metric) for group in groups):
        return ""
    figure = curve_figure(column, groups, metric, (), against="bytes")
    return standalone(figure.wide, f"{paper}: {figure.title}", figure.note, figure.legend, STANDALONE)


def frontier_chart(rows: Sequence[Row], task: str) -> str:
    """Accuracy against bytes of the rows of a frontier on a task."""
    dots, legend = [], []
    for series, row in enumerate(rows):
        if row.failed or not (value := row.value()):
            continue
        seeds = [known for run in row.runs if (known := run.value()) is not None]
        dots.append(Dot(row.label, series, row.bytes, value.mean, min(seeds), max(seeds)))
        legend.append((swatch(series), row.label))
    title = f"Accuracy against bytes, {task}"
    ends = "; ".join(f"{dot.label} {percent_text(dot.y)} with {human_bytes(dot.x)}" for dot in dots)
    low = min((dot.low for dot in dots), default=0.0)
    steps = [step for step in best_by_bytes(rows) if step[1] >= low]
    area = PlotArea(
        title,
        f"x axis: bytes of all messages of a run; y axis: test accuracy; {ends}.",
        "total bytes (log scale)",
        "test accuracy",
        ident="frontier",
        height=520,
        log_x=True,
        x_text=human_bytes,
        y_text=percent_text,
    )
    note = "One mark a method: mean of the seeds, line from the lowest to the highest. Gray: best with so many bytes."
    return standalone(scatter(dots, steps, area), title, note, legend, STANDALONE)


def scatter(dots: Sequence[Dot], steps: Sequence[tuple[float, float]], area: PlotArea) -> str:
    """Dots, and steps that keep their value to the right until the next one."""
    xs = [dot.x for dot in dots if dot.x > 0] + [x for x, _ in steps if x > 0]
    if not dots or not xs:
        return drawing(area, ['<text x="16" y="30">nothing to draw yet</text>'], 60)
    ys = area.limits or [value for dot in dots for value in (dot.low, dot.high)]
    y_ticks = round_ticks(min(ys), max(ys), 6)
    left = 16 + 16 + max(len(area.y_text(tick)) for tick in y_ticks) * TICK_WIDTH
    right, top, bottom = area.width - 16.0, 14.0, area.height - 46.0
    plot = Plot(HorizontalAxis(min(xs), max(xs), left, right, area.log_x), top, bottom, y_ticks)
    parts = plot.grid(area)
    if steps:
        path = f"M{plot.axis.at(steps[0][0]):.1f} {plot.y_at(steps[0][1]):.1f}"
        path += "".join(f"H{plot.axis.at(x):.1f}V{plot.y_at(y):.1f}" for x, y in steps[1:])
        parts.append(f'<path class="line s7" stroke-opacity="0.55" d="{path}H{plot.axis.right:.1f}"/>')
    for dot in dots:
        x = plot.axis.at(dot.x)
        if abs(plot.y_at(dot.low) - plot.y_at(dot.high)) > 1:
            line = f"M{x:.1f} {plot.y_at(dot.low):.1f}V{plot.y_at(dot.high):.1f}"
            parts.append(f'<path class="line s{dot.series % 8}" stroke-opacity="0.6" d="{line}"/>')
        parts.append(
            marker(dot.series, x, plot.y_at(dot.y), f"{dot.label}: {area.y_text(dot.y)}, {area.x_text(dot.x)}")
        )
    return drawing(area, parts, area.height)


Values = Mapping[str, Sequence[float | None]]  # by label of a row, one for each seed


def against_curves(rows: Sequence[Mapping[str, Any]], values: Values) -> tuple[list[Curve], dict[str, float]]:
    """The curves of all series, each point a mean with the lowest and the highest seed; and the lines, by label.

    >>> rows = [{"label": "FedAvg"}, *({"label": f"k {k}", "x": k, "series": "fresh"} for k in (8, 4))]
    >>> drawn, lines = against_curves(rows, {"FedAvg": [90.0], "k 8": [80.0, 82.0], "k 4": [70.0]})
    >>> drawn[0].points, lines
    ([(4, 70.0, 70.0, 70.0), (8, 81.0, 80.0, 82.0)], {'FedAvg': 90.0})
    """
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    lines: dict[str, float] = {}
    for row in rows:
        label = row.get("label", row.get("method", ""))
        known = [value for value in values.get(label, ()) if value is not None]
        if known and "x" in row:
            point = (row["x"], statistics.fmean(known), min(known), max(known))
            points.setdefault(row.get("series", ""), []).append(point)
        elif known:
            lines[label] = statistics.fmean(known)
    return [Curve(name, i, sorted(found)) for i, (name, found) in enumerate(points.items())], lines


def against_chart(content: Mapping[str, Any], column: str, measure: str, values: Values) -> str:
    """The measure of each row against a number of the row, such as its size; "" without values to draw.

    Args:
        content: the table, with `against`, `paper` and `rows`.
        column: name of the column.
        measure: name of the measure.
        values: the values of each row.
    """
    axis = content["against"]
    drawn, lines = against_curves(content["rows"], values)
    if not drawn:
        return ""
    title = f"{content['paper']}: {measure} against {axis['x']}, {column}"
    several = any(low != high for curve in drawn for _, _, low, high in curve.points)
    note = "Mean over seeds; the band spans the lowest to the highest seed." if several else ""
    shown = [value for curve in drawn for point in curve.points for value in point[1:]] + list(lines.values())
    area = PlotArea(
        title,
        "; ".join(f"{curve.label} at {x:g}: {y:.2f}" for curve in drawn for x, y, _, _ in curve.points) + ".",
        axis["x"] + (" (log scale)" if axis.get("log") else ""),
        measure,
        ident="against",
        log_x=bool(axis.get("log")),
        marks=tuple((value, f"{label} {value:.2f}") for label, value in lines.items()),
        limits=(min(shown), max(shown)),
    )
    legend = [(swatch(curve.series), curve.label) for curve in drawn]
    return standalone(curves(drawn, area), title, note, legend, STANDALONE)
