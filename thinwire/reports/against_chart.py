"""Chart of a reproduced figure: the measure of each row against a number of the row, such as its size.

A file of presets/repro with `against = { x = "trained parameters", log = true }` has rows with `x`, the number, and
`series`, the name of the curve that the row is a point of. A row without `x` is a horizontal line, such as FedAvg.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.reports.charts import Curve, PlotArea, curves
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import standalone, swatch

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
    """The contents of an SVG file; "" without values to draw.

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
