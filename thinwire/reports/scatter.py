"""Chart of points with whiskers over seeds, and a line of steps: the best value that so much of x can buy.

>>> area = PlotArea("t", "d", "x", "y", log_x=True)
>>> svg = scatter([Dot("a", 0, 10.0, 0.8, 0.7, 0.9)], [(1.0, 0.5), (10.0, 0.8)], area)
>>> svg.count('class="dot'), "H" in svg
(1, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.reports.axis import HorizontalAxis, round_ticks
from thinwire.reports.charts import Plot, PlotArea, drawing
from thinwire.reports.svg import TICK_WIDTH, marker


class Dot(NamedTuple):
    """A point, and the values of its lowest and its highest seed."""

    label: str
    series: int
    x: float
    y: float
    low: float
    high: float


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
