"""SVG text for charts: markers, dashes, labels, legends, and a chart as a file.

Series i of a report has the same look in every chart: the color `var(--c{i})` of the style sheet, a marker and a dash
pattern, so that charts can be read without color.

>>> swatch(0).startswith("<svg")
True
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinwire.core.text import html_text as escape

COLORS = 8
TICK_WIDTH, NAME_WIDTH = 7.7, 8.6  # width of a character of a tick (12 pixels) and of a name (13), in a wide font

_DASHES = ("", "7 4", "3 3", "9 3 2 3", "5 2", "2 2", "12 4", "4 3 1 3")
_MARKERS = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",  # disc
    "M-3.7 -3.7H3.7V3.7H-3.7Z",  # square
    "M0 -4.8L4.6 3.6H-4.6Z",  # triangle
    "M0 -5.2L5.2 0L0 5.2L-5.2 0Z",  # diamond
    "M0 4.8L4.6 -3.6H-4.6Z",  # triangle, upside down
    "M-1.5 -5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z",  # plus
    "M0 -5L4.8 -1.5L2.9 4H-2.9L-4.8 -1.5Z",  # pentagon
    "M-5 -2.5H5L0 0L5 2.5H-5L0 0Z",  # bow tie
)


def text(x: float, y: float, label: str, anchor: str, kind: str = "tick") -> str:
    """A label at a position; `kind` is its class in the style sheet."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def shortened(label: str, width: float) -> str:
    """A name cut to a width in pixels."""
    most = max(4, int(width / NAME_WIDTH))
    return label if len(label) <= most else label[: most - 1] + "…"


def wrapped(label: str, width: float) -> list[str]:
    """A name in lines of at most a width in pixels, broken after a space, `+`, `-`, `.`, `,` or `/` where possible.

    >>> wrapped("topk+a-long-name (lr 0.1)", 120)
    ['topk+a-long-', 'name (lr 0.1)']
    """
    most, lines, rest = max(4, int(width / NAME_WIDTH)), [], label
    while len(rest) > most:
        breaks = [i for i in range(1, most + 1) if rest[i - 1] in " +-.,/"]
        at = breaks[-1] if breaks and breaks[-1] > most // 3 else most
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return [*lines, rest]


def marker(series: int, x: float, y: float, tooltip: str) -> str:
    """The marker of a series at a position."""
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    shape = _MARKERS[(series + series // COLORS) % len(_MARKERS)]
    return f'<path class="dot f{series % COLORS}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{title}</path>'


def dash(series: int) -> str:
    """The dash pattern of a series, as an attribute."""
    pattern = _DASHES[(series + series // COLORS) % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def swatch(series: int) -> str:
    """Color, dash and marker of a series, for a legend."""
    line = f'<path class="line s{series % COLORS}"{dash(series)} d="M1 8H33"/>'
    return f'<svg class="swatch" width="34" height="16" aria-hidden="true">{line}{marker(series, 17, 8, "")}</svg>'


def shade(opacity: float) -> str:
    """A segment of a bar, for a legend; opacity 0 is an outline."""
    look = f'class="bar f7" fill-opacity="{opacity:.2f}"' if opacity else 'class="outline s7"'
    box = f'<rect {look} x="1" y="2" width="22" height="12"/>'
    return f'<svg class="swatch" width="24" height="16" aria-hidden="true">{box}</svg>'


def stacked(charts: Sequence[str]) -> str:
    """The contents of several SVG files one below the other, as those of one file."""
    sizes = [re.search(r'width="(\d+)" height="(\d+)"', chart) for chart in charts]
    wide, tops = max(int(size[1]) for size in sizes if size), [0]
    for size in sizes:
        tops.append(tops[-1] + (int(size[2]) if size else 0))
    parts = [f'<g transform="translate(0 {top})">{chart}</g>' for top, chart in zip(tops, charts, strict=False)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tops[-1]}" width="{wide}" height="{tops[-1]}">'
        + "".join(parts)
        + "</svg>\n"
    )


def standalone(
    chart: str, title: str, note: str, legend: Sequence[tuple[str, str]], style: str, width: int = 1020
) -> str:
    """A chart as the contents of an SVG file.

    Args:
        chart: the chart.
        title: above it.
        note: a second line under the title.
        legend: pairs of a swatch and a label.
        style: the style sheet.
        width: in pixels.
    """
    size = re.search(r'height="(\d+)"', chart)
    top, line_widths = 52.0, [0.0]  # the legend wraps into lines
    entries = []
    for symbol, label in legend:
        wide = 44 + len(label) * NAME_WIDTH + 14
        if line_widths[-1] and line_widths[-1] + wide > width - 16:
            line_widths.append(0.0)
        entries.append((16 + line_widths[-1], top + 22 * (len(line_widths) - 1), symbol, label))
        line_widths[-1] += wide
    below = top + 22 * len(line_widths) + 8
    height = below + (int(size[1]) if size else 0) + 8
    parts = [text(16, 21, title, "start", "value"), text(16, 40, note, "start")]
    for x, y, symbol, label in entries:
        parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{symbol}</g>')
        parts.append(text(x + 40, y + 13, label, "start", "name"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}"><style>{style}</style><rect class="paper" width="100%" height="100%"/>'
        + "".join(parts)
        + f'<g transform="translate(0 {below:.1f})">{chart}</g></svg>\n'
    )
