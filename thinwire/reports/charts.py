"""Small charts as SVG text: curves, bars, and dots on rows. No library, no script, no font of their own.

Lines of a report keep their number everywhere: number i has the colour `var(--c{i})` of the page's style sheet, a
marker, and a dash of its own, so that no chart depends on colour alone. Every label is placed so that it cannot touch
another: ticks are thinned until they fit, and names stand on rows of their own.

>>> svg = curves([Curve("a", 0, [(1.0, 0.5, 0.4, 0.6), (10.0, 0.9, 0.8, 1.0)])], Frame("t", "d", "x", "y"))
>>> svg.startswith("<svg") and svg.endswith("</svg>") and 'role="img"' in svg
True
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from thinwire.core.text import html_text as escape

COLOURS = 8
_DASHES = ("", "7 4", "3 3", "9 3 2 3", "5 2", "2 2", "12 4", "4 3 1 3")
_CHARACTER, _NAME = 7.7, 8.6  # the width of a character of ticks (12 pixels) and of names (13), in a wide font

Format = Callable[[float], str]


def plain_number(value: float) -> str:
    """A number without needless digits.

    >>> plain_number(20.0), plain_number(0.25)
    ('20', '0.25')
    """
    return f"{value:g}"


class Frame(NamedTuple):
    """What stands around a chart; `ident` must be unique in a page."""

    title: str
    about: str  # for those who cannot see it
    x: str
    y: str = ""
    ident: str = "chart"
    width: int = 1020
    height: int = 380
    log_x: bool = False
    whole_x: bool = False  # ticks at whole numbers only
    x_text: Format = plain_number
    y_text: Format = plain_number
    marks: tuple[tuple[float, str], ...] = ()  # horizontal lines with a name; one too close to an earlier is left out


class Curve(NamedTuple):
    """A line: (x, y, lowest, highest) at each of its points."""

    label: str
    number: int
    points: Sequence[tuple[float, float, float, float]]


class Bar(NamedTuple):
    """A bar made of pieces; a piece is its length and how strong its colour is, from 0 (an outline) to 1.

    `spread` is where the lowest and the highest seed end.
    """

    label: str
    value: str
    number: int
    pieces: Sequence[tuple[float, float]]
    spread: tuple[float, float] | None = None


class Row(NamedTuple):
    """A row of dots: (number of the line, position, what it says)."""

    label: str
    dots: Sequence[tuple[int, float, str]]


def curves(lines: Sequence[Curve], frame: Frame) -> str:
    """Lines with bands around them."""
    xs = [p[0] for line in lines for p in line.points if p[0] > 0 or not frame.log_x]
    ys = [v for line in lines for p in line.points for v in p[1:]]
    if not xs:
        return _svg(frame, ['<text x="16" y="30">nothing to draw yet</text>'], 60)
    y_low, y_high, y_ticks = _nice(min(ys), max(ys), 6 if frame.height > 300 else 5)
    left = 16 + 16 + max(len(frame.y_text(tick)) for tick in y_ticks) * _CHARACTER
    right, top, bottom = frame.width - 16.0, 14.0, frame.height - 46.0
    axis = _Axis(min(xs), max(xs), left, right, frame.log_x, frame.whole_x)

    def y_at(value: float) -> float:
        return bottom - (value - y_low) / (y_high - y_low) * (bottom - top)

    out = []
    for tick in y_ticks:
        out.append(f'<path class="grid" d="M{left:.1f} {y_at(tick):.1f}H{right:.1f}"/>')
        out.append(_text(left - 8, y_at(tick) + 4, frame.y_text(tick), "end"))
    out += axis.drawn(top, bottom, frame.x_text)
    middle = (top + bottom) / 2
    out.append(_text((left + right) / 2, frame.height - 6, frame.x, "middle", "axis"))
    out.append(
        f'<text class="axis" text-anchor="middle" transform="translate(13 {middle:.1f}) rotate(-90)">'
        f"{escape(frame.y)}</text>"
    )
    named_at: list[float] = []
    for value, name in frame.marks:
        if not y_low <= value <= y_high:
            continue
        y = y_at(value)
        if all(abs(y - other) > 18 for other in named_at):
            out.append(f'<path class="mark" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            out.append(_text(left + 6, y - 4, name, "start", "mark-name halo"))
            named_at.append(y)
    for line in lines:
        places = [(axis.at(x), y_at(y), y_at(lo), y_at(hi)) for x, y, lo, hi in line.points if x > 0 or not frame.log_x]
        if any(abs(hi - lo) > 0.5 for _, _, lo, hi in places):
            edge = [f"{x:.1f} {hi:.1f}" for x, _, _, hi in places]
            edge += [f"{x:.1f} {lo:.1f}" for x, _, lo, _ in reversed(places)]
            out.append(f'<path class="band f{line.number % COLOURS}" d="M{"L".join(edge)}Z"/>')
    for line in lines:
        points = [(x, y) for x, y, _, _ in line.points if x > 0 or not frame.log_x]
        if not points:
            continue
        path = "L".join(f"{axis.at(x):.1f} {y_at(y):.1f}" for x, y in points)
        out.append(f'<path class="line s{line.number % COLOURS}"{_dash(line.number)} d="M{path}"/>')
        for x, y in _spaced(points, axis, (right - left) / 9, line.number):
            says = f"{line.label}: {frame.y_text(y)} at {frame.x_text(x)}"
            out.append(_marker(line.number, axis.at(x), y_at(y), says))
    return _svg(frame, out, frame.height)


def reach(rows: Sequence[Bar]) -> float:
    """How far the longest bar goes, or the highest seed of any."""
    return max((max(sum(length for length, _ in row.pieces), (row.spread or (0, 0))[1]) for row in rows), default=0)


def bars(rows: Sequence[Bar], frame: Frame, longest: float = 0) -> str:
    """Bars from zero, each under its name and its value; charts with the same `longest` have the same scale."""
    longest = longest or reach(rows) or 1
    scale = (frame.width - 4) / longest
    out, y = [], 0.0
    for row in rows:
        room = frame.width - 12 - len(row.value) * _NAME
        out.append(_text(0, y + 14, _short(row.label, room), "start", "name"))
        out.append(_text(frame.width - 2, y + 14, row.value, "end", "value"))
        x = 1.0
        for length, strength in row.pieces:
            wide = max(0.0, length * scale)
            kind = f'class="bar f{row.number % COLOURS}" fill-opacity="{strength:.2f}"'
            if strength == 0:
                kind = f'class="outline s{row.number % COLOURS}"'
            if wide > 0:
                out.append(f'<rect {kind} x="{x:.1f}" y="{y + 20:.1f}" width="{max(wide, 1):.1f}" height="14"/>')
            x += wide
        low, high = (1 + end * scale for end in row.spread or (0, 0))
        if high - low > 4:  # shorter ones would be a blot
            ends = "".join(f"M{end:.1f} {y + 23:.1f}v8" for end in (low, high))
            out.append(f'<path class="whisker" d="M{low:.1f} {y + 27:.1f}H{high:.1f}{ends}"/>')
        y += 46
    return _svg(frame, out, max(y - 6, 20))


def dots(rows: Sequence[Row], frame: Frame) -> str:
    """Positions on rows of one logarithmic axis, each row under its name."""
    values = [value for row in rows for _, value, _ in row.dots if value > 0]
    if not values:
        return _svg(frame, ['<text x="0" y="20">nothing to draw yet</text>'], 40)
    axis = _Axis(min(values), max(values), 12, frame.width - 12.0, True)
    bottom = len(rows) * 46.0
    out = axis.drawn(0, bottom, frame.x_text)
    out.append(_text(frame.width / 2, bottom + 38, frame.x, "middle", "axis"))
    for i, row in enumerate(rows):
        y = i * 46.0
        out.append(_text(0, y + 14, _short(row.label, frame.width), "start", "name halo"))
        out.append(f'<path class="grid" d="M12 {y + 30:.1f}H{frame.width - 12}"/>')
        out += [_marker(number, axis.at(value), y + 30, says) for number, value, says in row.dots if value > 0]
    return _svg(frame, out, bottom + 46)


def swatch(number: int) -> str:
    """A line's colour, dash and marker, for a legend."""
    line = f'<path class="line s{number % COLOURS}"{_dash(number)} d="M1 8H33"/>'
    return f'<svg class="swatch" width="34" height="16" aria-hidden="true">{line}{_marker(number, 17, 8, "")}</svg>'


def alone(chart: str, title: str, note: str, legend: Sequence[tuple[str, str]], style: str, width: int = 1020) -> str:
    """A chart with its title, a note, its legend (picture, words) and its style as the text of a file of its own."""
    size = re.search(r'height="(\d+)"', chart)
    top, rows = 52.0, [0.0]
    places = []
    for picture, words in legend:
        wide = 44 + len(words) * _NAME + 14
        if rows[-1] and rows[-1] + wide > width - 16:
            rows.append(0.0)
        places.append((16 + rows[-1], top + 22 * (len(rows) - 1), picture, words))
        rows[-1] += wide
    below = top + 22 * len(rows) + 8
    tall = below + (int(size[1]) if size else 0) + 8
    out = [_text(16, 21, title, "start", "value"), _text(16, 40, note, "start")]
    for x, y, picture, words in places:
        out.append(
            f'<g transform="translate({x:.1f} {y:.1f})">{picture}</g>{_text(x + 40, y + 13, words, "start", "name")}'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall:.0f}" width="{width}" height="{tall:.0f}">'
        f'<style>{style}</style><rect class="paper" width="100%" height="100%"/>'
        + "".join(out)
        + f'<g transform="translate(0 {below:.1f})">{chart}</g></svg>\n'
    )


def shade(strength: float) -> str:
    """The look of a piece of a bar, for a legend."""
    kind = f'class="bar f7" fill-opacity="{strength:.2f}"' if strength else 'class="outline s7"'
    box = f'<rect {kind} x="1" y="2" width="22" height="12"/>'
    return f'<svg class="swatch" width="24" height="16" aria-hidden="true">{box}</svg>'


class _Axis:
    """A horizontal axis, with ticks that fit."""

    def __init__(self, low: float, high: float, left: float, right: float, log: bool, whole: bool = False) -> None:
        if log:
            low, high = low / 1.06, high * 1.06
            if high / low < 1.5:
                low, high = low / 1.25, high * 1.25
        elif high == low:
            low, high = low - 0.5, high + 0.5
        self.low, self.high, self.left, self.right, self.log, self.whole = low, high, left, right, log, whole

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + share * (self.right - self.left)

    def ticks(self, text: Format) -> list[float]:
        """As many as fit side by side."""
        choices: list[list[float]] = []
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
                choices.append([step * 10.0**d for d in decades for step in steps])
            choices += [choices[-1][::2], choices[-1][1::2], choices[1][::4]]
        else:
            choices = [_nice(self.low, self.high, wanted)[2] for wanted in (12, 9, 6, 4, 3, 2)]
        for choice in choices:
            inside = [tick for tick in choice if self.low <= tick <= self.high]
            if self.whole and any(tick % 1 for tick in inside):
                continue
            if len(inside) > 1 and self._fit(inside, text):
                return inside
        if self.whole:
            return [float(math.ceil(self.low))]
        ends = [self.low, self.high]
        return ends if self._fit(ends, text) else ends[:1]

    def _fit(self, ticks: Sequence[float], text: Format) -> bool:
        edge = -math.inf
        for tick in ticks:
            wide = len(text(tick)) * _CHARACTER
            start, end = self._span(tick, wide)
            if start < edge + 10:
                return False
            edge = end
        return True

    def _span(self, tick: float, wide: float) -> tuple[float, float]:
        """From where to where a label goes: centred, but never over the ends."""
        start = min(max(self.at(tick) - wide / 2, 0), self.right + 14 - wide)
        return start, start + wide

    def drawn(self, top: float, bottom: float, text: Format) -> list[str]:
        out = []
        for tick in self.ticks(text):
            x, words = self.at(tick), text(tick)
            start, end = self._span(tick, len(words) * _CHARACTER)
            out.append(f'<path class="grid" d="M{x:.1f} {top:.1f}V{bottom + 4:.1f}"/>')
            out.append(_text((start + end) / 2, bottom + 18, words, "middle"))
        return out


def _spaced(points: Sequence[tuple[float, float]], axis: _Axis, apart: float, number: int) -> list[tuple[float, float]]:
    """The last point, and those before it that stand far enough apart for a marker each.

    Lines begin at different distances from their end, so that markers of curves that run together do not cover each
    other.
    """
    chosen, gap = [points[-1]], apart * (0.4 + 0.75 * (number % COLOURS) / COLOURS)
    for x, y in reversed(points):
        if axis.at(chosen[-1][0]) - axis.at(x) >= gap:
            chosen.append((x, y))
            gap = apart
    return chosen[::-1]


def _nice(low: float, high: float, wanted: int) -> tuple[float, float, list[float]]:
    """Round ends around a range, and about so many round ticks from one to the other."""
    if high == low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _marker(number: int, x: float, y: float, says: str) -> str:
    shapes = (
        "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",  # disc
        "M-3.7 -3.7H3.7V3.7H-3.7Z",  # square
        "M0 -4.8L4.6 3.6H-4.6Z",  # triangle
        "M0 -5.2L5.2 0L0 5.2L-5.2 0Z",  # diamond
        "M0 4.8L4.6 -3.6H-4.6Z",  # triangle on its tip
        "M-1.5 -5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",  # plus
        "M0 -5L4.8 -1.5L2.9 4H-2.9L-4.8 -1.5Z",  # pentagon
        "M-5 -2.5H5L0 0L5 2.5H-5L0 0Z",  # bow
    )
    title = f"<title>{escape(says)}</title>" if says else ""
    shape = shapes[(number + number // COLOURS) % len(shapes)]
    return f'<path class="dot f{number % COLOURS}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{title}</path>'


def _dash(number: int) -> str:
    dash = _DASHES[(number + number // COLOURS) % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _short(label: str, room: float) -> str:
    most = max(4, int(room / _NAME))
    return label if len(label) <= most else label[: most - 1] + "…"


def _text(x: float, y: float, words: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(frame: Frame, inside: Sequence[str], height: float) -> str:
    name = f"{frame.ident}-{frame.width}"
    return (
        f'<svg viewBox="0 0 {frame.width} {height:.0f}" width="{frame.width}" height="{height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-about"><title id="{name}-title">{escape(frame.title)}</title>'
        f'<desc id="{name}-about">{escape(frame.about)}</desc>' + "".join(inside) + "</svg>"
    )
