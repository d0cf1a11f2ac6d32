"""All charts of the pages, as contents of SVG files.

`bytes_chart` is accuracy against bytes of the rows of a table. `against_chart` is the chart of a reproduced figure: a
file of `papers/repro` with `against = { x = "trained parameters", log = true }` has rows with `x`, a number, and
`series`, the name of the curve that the row is a point of; a row without `x` is a horizontal line, such as FedAvg.
`frontier_chart` has one mark for each method, and a line of steps: the best accuracy that so many bytes can buy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from papers.frontier import Row, best_by_bytes
from thinwire.core.text import human_bytes
from thinwire.reports.figures import LIGHT, Curve, curves, standalone
from thinwire.reports.rows import Row as TableRow, percent_text
from thinwire.reports.table import Table
from thinwire.runs.records import SavedRun


def bytes_chart(paper: str, column: str, runs: Mapping[str, Sequence[SavedRun]], metric: str) -> str:
    """Accuracy against bytes of the rows of a column, each over its runs; "" if nothing was evaluated."""
    groups = [TableRow(label, list(found)) for label, found in runs.items() if found]
    if not any(group.curve(metric) for group in groups):
        return ""
    drawing = Table(column, groups).drawing(metric)
    return standalone(drawing.draw(title=f"{paper}: {drawing.title.rpartition(', ')[0]}, {column}"))


def frontier_chart(rows: Sequence[Row], task: str) -> str:
    """Accuracy against bytes: a mark for each method, a line over its seeds, and the best with so many bytes."""
    dots = []
    for row in rows:
        if not row.failed and (value := row.value()):
            seeds = [known for run in row.runs if (known := run.value()) is not None]
            dots.append(Curve(row.label, [(row.bytes, value.mean, min(seeds), max(seeds))]))
    figure = curves(
        dots,
        "total bytes (log scale)",
        "test accuracy",
        log_x=True,
        x_text=human_bytes,
        y_text=percent_text,
        title=f"Accuracy against bytes, {task}",
    )
    axes = figure.axes[0]
    for drawn, dot in zip(list(axes.lines), dots, strict=True):
        x, _, low, high = dot.points[0]
        axes.plot([x, x], [low, high], color=drawn.get_color(), alpha=0.6)
    lowest = min((dot.points[0][2] for dot in dots), default=0.0)
    if steps := [step for step in best_by_bytes(rows) if step[1] >= lowest]:
        xs, ys = zip(*steps, (axes.get_xlim()[1], steps[-1][1]), strict=True)
        axes.step(xs, ys, where="post", color=LIGHT["c7"], alpha=0.55, zorder=1)
    return standalone(figure)


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
    return [Curve(name, sorted(found)) for name, found in points.items()], lines


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
    shown = [value for curve in drawn for point in curve.points for value in point[1:]] + list(lines.values())
    figure = curves(
        drawn,
        axis["x"] + (" (log scale)" if axis.get("log") else ""),
        measure,
        log_x=bool(axis.get("log")),
        marks={f"{label} {value:.2f}": value for label, value in lines.items()},
        limits=(min(shown), max(shown)),
        title=f"{content['paper']}: {measure} against {axis['x']}, {column}",
    )
    return standalone(figure)
