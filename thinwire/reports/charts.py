"""Charts as SVG text: curves, bars, and dots on rows. They need no library, script or font.

Labels never overlap: ticks are thinned until they fit, and names have rows without other text.

>>> svg = curves([Curve("a", 0, [(1.0, 0.5, 0.4, 0.6), (10.0, 0.9, 0.8, 1.0)])], PlotArea("t", "d", "x", "y"))
>>> svg.startswith("<svg") and svg.endswith("</svg>") and 'role="img"' in svg
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.text import html_text as escape
from thinwire.reports.axis import Format, HorizontalAxis, round_ticks
from thinwire.reports.svg import COLORS, NAME_WIDTH, TICK_WIDTH, dash, marker, shortened, text, wrapped

ROW_HEIGHT = 46.0  # of a bar or a row of dots with its name


def plain_number(value: float) -> str:
    """A number without trailing zeros.

    >>> plain_number(20.0), plain_number(0.25)
    ('20', '0.25')
    """
    return f"{value:g}"


class PlotArea(NamedTuple):
    """Title, axes and size of a chart; `ident` must be unique in a page."""

    title: str
    description: str  # for screen readers
    x: str
    y: str = ""
    ident: str = "chart"
    width: int = 1020
    height: int = 380
    log_x: bool = False
    integer_x: bool = False  # ticks at integers only
    x_text: Format = plain_number
    y_text: Format = plain_number
    limits: tuple[float, float] | None = None  # of y; values outside are drawn at the edge
    marks: tuple[tuple[float, str], ...] = ()  # labeled horizontal lines; one too close to an earlier one is left out


class Curve(NamedTuple):
    """A series of points (x, y, lowest y, highest y)."""

    label: str
    series: int  # gives color, dash and marker
    points: Sequence[tuple[float, float, float, float]]
    broken: bool = False  # all its runs failed, so that it has no part in the scale


class Bar(NamedTuple):
    """A bar of segments, each a length and an opacity from 0 (an outline) to 1.

    `spread` is the total length of the lowest and of the highest seed.
    """

    label: str
    value: str
    series: int
    segments: Sequence[tuple[float, float]]
    spread: tuple[float, float] | None = None


class DotRow(NamedTuple):
    """A row of dots (series, position, tooltip)."""

    label: str
    dots: Sequence[tuple[int, float, str]]


def curves(series: Sequence[Curve], area: PlotArea) -> str:
    """Curves with a band from the lowest to the highest seed."""
    xs = [p[0] for curve in series for p in curve.points if p[0] > 0 or not area.log_x]
    ys = area.limits or [v for curve in series for p in curve.points for v in p[1:]]
    if not xs:
        return drawing(area, ['<text x="16" y="30">nothing to draw yet</text>'], 60)
    y_ticks = round_ticks(min(ys), max(ys), 6 if area.height > 300 else 5)
    left = 16 + 16 + max(len(area.y_text(tick)) for tick in y_ticks) * TICK_WIDTH
    right, top, bottom = area.width - 16.0, 14.0, area.height - 46.0
    plot = Plot(HorizontalAxis(min(xs), max(xs), left, right, area.log_x, area.integer_x), top, bottom, y_ticks)
    parts = [*plot.grid(area), *plot.marks(area)]
    parts += [band for curve in series if (band := plot.band(curve, area))]
    for curve in series:
        parts += plot.curve(curve, area)
    return drawing(area, parts, area.height)


class Plot:
    """The rectangle in which curves are drawn."""

    def __init__(self, axis: HorizontalAxis, top: float, bottom: float, y_ticks: Sequence[float]) -> None:
        self.axis, self.top, self.bottom, self.y_ticks = axis, top, bottom, y_ticks

    def y_at(self, value: float) -> float:
        """The position of a value, in pixels; values outside are at the edge."""
        low, high = self.y_ticks[0], self.y_ticks[-1]
        value = min(max(value, low), high)
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def grid(self, area: PlotArea) -> list[str]:
        """Grid lines, ticks and the names of both axes."""
        left, right = self.axis.left, self.axis.right
        parts = []
        for tick in self.y_ticks:
            parts.append(f'<path class="grid" d="M{left:.1f} {self.y_at(tick):.1f}H{right:.1f}"/>')
            parts.append(text(left - 8, self.y_at(tick) + 4, area.y_text(tick), "end"))
        parts += self.axis.draw(self.top, self.bottom, area.x_text)
        middle = (self.top + self.bottom) / 2
        parts.append(text((left + right) / 2, area.height - 6, area.x, "middle", "axis"))
        parts.append(
            f'<text class="axis" text-anchor="middle" transform="translate(13 {middle:.1f}) rotate(-90)">'
            f"{escape(area.y)}</text>"
        )
        return parts

    def marks(self, area: PlotArea) -> list[str]:
        """Labeled horizontal lines."""
        left, right = self.axis.left, self.axis.right
        parts: list[str] = []
        drawn_at: list[float] = []
        for value, name in area.marks:
            if not self.y_ticks[0] <= value <= self.y_ticks[-1]:
                continue
            y = self.y_at(value)
            if all(abs(y - other) > 18 for other in drawn_at):
                parts.append(f'<path class="mark" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
                parts.append(text(left + 6, y - 4, name, "start", "mark-name halo"))
                drawn_at.append(y)
        return parts

    def band(self, curve: Curve, area: PlotArea) -> str:
        """The band of a curve from its lowest to its highest seed; "" if it could not be seen."""
        points = [
            (self.axis.at(x), self.y_at(low), self.y_at(high))
            for x, _, low, high in curve.points
            if x > 0 or not area.log_x
        ]
        if not any(abs(high - low) > 0.5 for _, low, high in points):
            return ""
        edge = [f"{x:.1f} {high:.1f}" for x, _, high in points]
        edge += [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(points)]
        return f'<path class="band f{curve.series % COLORS}" d="M{"L".join(edge)}Z"/>'

    def curve(self, curve: Curve, area: PlotArea) -> list[str]:
        """The line of a curve and its markers."""
        points = [(x, y) for x, y, _, _ in curve.points if x > 0 or not area.log_x]
        if not points:
            return []
        path = "L".join(f"{self.axis.at(x):.1f} {self.y_at(y):.1f}" for x, y in points)
        parts = [f'<path class="line s{curve.series % COLORS}"{dash(curve.series)} d="M{path}"/>']
        for x, y in _marker_points(points, self.axis, curve.series):
            tooltip = f"{curve.label}: {area.y_text(y)} at {area.x_text(x)}"
            parts.append(marker(curve.series, self.axis.at(x), self.y_at(y), tooltip))
        return parts


def longest_bar(rows: Sequence[Bar]) -> float:
    """The length of the longest bar, or of its highest seed."""
    return max((max(sum(length for length, _ in row.segments), (row.spread or (0, 0))[1]) for row in rows), default=0)


def bars(rows: Sequence[Bar], area: PlotArea, longest: float = 0) -> str:
    """Bars from zero, each under its name and value; charts with the same `longest` have the same scale."""
    longest = longest or longest_bar(rows) or 1
    scale = (area.width - 4) / longest
    parts, y = [], 0.0
    for row in rows:
        lines = wrapped(row.label, area.width - 12 - len(row.value) * NAME_WIDTH)
        parts += [text(0, y + 14 + 16 * i, line, "start", "name") for i, line in enumerate(lines)]
        parts.append(text(area.width - 2, y + 14, row.value, "end", "value"))
        y += 16 * (len(lines) - 1)
        x = 1.0
        for length, opacity in row.segments:
            wide = max(0.0, length * scale)
            look = f'class="bar f{row.series % COLORS}" fill-opacity="{opacity:.2f}"'
            if opacity == 0:
                look = f'class="outline s{row.series % COLORS}"'
            if wide > 0:
                parts.append(f'<rect {look} x="{x:.1f}" y="{y + 20:.1f}" width="{max(wide, 1):.1f}" height="14"/>')
            x += wide
        low, high = (1 + end * scale for end in row.spread or (0, 0))
        if high - low > 4:  # a shorter whisker could not be seen
            ends = "".join(f"M{end:.1f} {y + 23:.1f}v8" for end in (low, high))
            parts.append(f'<path class="whisker" d="M{low:.1f} {y + 27:.1f}H{high:.1f}{ends}"/>')
        y += ROW_HEIGHT
    return drawing(area, parts, max(y - 6, 20))


def dots(rows: Sequence[DotRow], area: PlotArea) -> str:
    """Dots on one logarithmic axis, in rows under their names."""
    values = [value for row in rows for _, value, _ in row.dots if value > 0]
    if not values:
        return drawing(area, ['<text x="0" y="20">nothing to draw yet</text>'], 40)
    axis = HorizontalAxis(min(values), max(values), 12, area.width - 12.0, log=True)
    bottom = len(rows) * ROW_HEIGHT
    parts = axis.draw(0, bottom, area.x_text)
    parts.append(text(area.width / 2, bottom + 38, area.x, "middle", "axis"))
    for i, row in enumerate(rows):
        y = i * ROW_HEIGHT
        parts.append(text(0, y + 14, shortened(row.label, area.width), "start", "name halo"))
        parts.append(f'<path class="grid" d="M12 {y + 30:.1f}H{area.width - 12}"/>')
        parts += [marker(series, axis.at(value), y + 30, tooltip) for series, value, tooltip in row.dots if value > 0]
    return drawing(area, parts, bottom + 46)


def _marker_points(
    points: Sequence[tuple[float, float]], axis: HorizontalAxis, series: int
) -> list[tuple[float, float]]:
    """The last point, and earlier ones that are far enough apart for a marker each.

    The first distance depends on the series, so that markers of curves that coincide do not cover each other.
    """
    apart = (axis.right - axis.left) / 9
    chosen, gap = [points[-1]], apart * (0.4 + 0.75 * (series % COLORS) / COLORS)
    for x, y in reversed(points):
        if axis.at(chosen[-1][0]) - axis.at(x) >= gap:
            chosen.append((x, y))
            gap = apart
    return chosen[::-1]


def drawing(area: PlotArea, parts: Sequence[str], height: float) -> str:
    """A chart of these parts as SVG text, with its title and its description."""
    name = f"{area.ident}-{area.width}"
    return (
        f'<svg viewBox="0 0 {area.width} {height:.0f}" width="{area.width}" height="{height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-about"><title id="{name}-title">{escape(area.title)}</title>'
        f'<desc id="{name}-about">{escape(area.description)}</desc>' + "".join(parts) + "</svg>"
    )
