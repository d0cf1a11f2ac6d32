"""Chart of a partition: the examples of each client, stacked by class, as SVG.

Up to `MOST_ROWS` clients have a bar and a name each. More clients are columns without names, grouped by their most
frequent class, which is at the bottom; if there are more columns than pixels, neighbors share one: their mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinwire.core.text import html_text as escape
from thinwire.errors import ConfigError
from thinwire.experiments.files import write_atomically
from thinwire.reports.axis import HorizontalAxis, round_ticks
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import COLORS, NAME_WIDTH, TICK_WIDTH, shortened, standalone, text

if TYPE_CHECKING:
    from thinwire.data.describe_partition import PartitionDescription

WIDTH = 1020
MOST_ROWS = 40
MOST_CLASSES = 24  # classes with a look of their own; the smallest others share one
_ROW, _BAR = 22, 15  # height of a row and of its bar
_SHADES = (1.0, 0.6, 0.3)  # a color is used for up to three classes


def draw_partition(found: PartitionDescription, title: str, file: Path) -> None:
    """Write the chart to a file whose name ends in `.svg` or `.html`."""
    if file.suffix not in (".svg", ".html"):
        raise ConfigError(f"the chart is an SVG or HTML file: write --plot {file.with_suffix('.svg')}, not {file}")
    drawing = partition_svg(found, title)
    if file.suffix == ".html":
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        )
        look = "<style>svg{max-width:100%;height:auto}</style>"
        drawing = f'<!doctype html><html lang="en"><head>{head}{look}</head><body>{drawing}</body></html>\n'
    write_atomically(file, drawing.encode())


def partition_svg(found: PartitionDescription, title: str) -> str:
    """The chart with title, legend and the two skews, as the contents of an SVG file."""
    counts, names = _grouped(found)
    what = {"classes": "examples by class", "labels": "labels", "numbers": "examples by target"}[found.kind]
    looks = _looks(found, counts.shape[1])
    chart = _rows(found, counts, looks) if len(found) <= MOST_ROWS else _columns(counts, looks, what)
    note = f"{found!r}; {what}"
    legend = [(_swatch(look), shortened(name, 220)) for look, name in zip(looks, names, strict=True)]
    return standalone(chart, title, note, legend, STANDALONE, WIDTH)


def _grouped(found: PartitionDescription) -> tuple[np.ndarray, list[str]]:
    """(clients, at most MOST_CLASSES) counts and the names of their columns; for labels, shares of the examples.

    An example with several labels counts once: its labels share it.
    """
    counts = found.counts.astype(np.float64)
    if found.kind == "labels":
        counts *= (found.sizes / np.maximum(counts.sum(1), 1))[:, None]
    names = list(found.class_names)
    if counts.shape[1] <= MOST_CLASSES:
        return counts, names
    order = np.argsort(-counts.sum(0), kind="stable")
    kept = np.sort(order[: MOST_CLASSES - 1])
    rest = np.sort(order[MOST_CLASSES - 1 :])
    grouped = np.concatenate([counts[:, kept], counts[:, rest].sum(1, keepdims=True)], 1)
    return grouped, [*(names[k] for k in kept), f"{len(rest):,} other classes"]


def _looks(found: PartitionDescription, classes: int) -> list[str]:
    """Color and opacity of each class, as attributes; bins of numbers are shades of one color."""
    if found.kind == "numbers":
        return [f'class="f0" fill-opacity="{0.15 + 0.85 * k / max(classes - 1, 1):.2f}"' for k in range(classes)]
    shades = [_SHADES[k // COLORS % len(_SHADES)] for k in range(classes)]
    return [f'class="f{k % COLORS}" fill-opacity="{shade:g}"' for k, shade in enumerate(shades)]


def _swatch(look: str) -> str:
    box = f'<rect {look} x="6" y="2" width="22" height="12"/>'
    return f'<svg class="swatch" width="34" height="16" aria-hidden="true">{box}</svg>'


def _svg(parts: list[str], height: float) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg role="img" {size}>{"".join(parts)}</svg>'


def _rows(found: PartitionDescription, counts: np.ndarray, looks: list[str]) -> str:
    """A bar with a name for each client."""
    totals = counts.sum(1)
    longest = max(map(len, found.client_names))
    left = 16 + min(max(longest * NAME_WIDTH, 40), 260) + 8
    right = WIDTH - 16 - 10 - len(f"{int(found.sizes.max()):,}") * NAME_WIDTH
    axis = HorizontalAxis(0, float(totals.max()), left, right, integers=True)
    bottom = 8 + _ROW * len(found)
    parts = axis.draw(4, bottom, lambda value: f"{value:,.0f}")
    for i, name in enumerate(found.client_names):
        y = 8 + _ROW * i
        parts.append(text(left - 8, y + 12, shortened(name, left - 24), "end", "name"))
        edges = np.concatenate(([0.0], np.cumsum(counts[i])))
        for k in np.flatnonzero(counts[i]).tolist():
            start, end = axis.at(edges[k]), axis.at(edges[k + 1])
            words = f"<title>{escape(name)}, {escape(_class_name(found, k, counts))}: {counts[i, k]:,.0f}</title>"
            box = f'x="{start:.2f}" y="{y}" width="{max(end - start - 0.4, 0.4):.2f}" height="{_BAR}"'
            parts.append(f"<rect {looks[k]} {box}>{words}</rect>")
        parts.append(text(axis.at(float(totals[i])) + 6, y + 12, f"{int(found.sizes[i]):,}", "start", "value"))
    parts.append(text((left + right) / 2, bottom + 36, "examples", "middle", "axis"))
    return _svg(parts, bottom + 44)


def _class_name(found: PartitionDescription, k: int, counts: np.ndarray) -> str:
    return found.class_names[k] if counts.shape[1] == len(found.class_names) else f"class group {k + 1}"


def _columns(counts: np.ndarray, looks: list[str], what: str) -> str:
    """One path for each class over all clients, grouped by their most frequent class."""
    top_class = counts.argmax(1)
    ordered = np.lexsort((-counts.sum(1), top_class))
    ticks = round_ticks(0, float(counts.sum(1).max()), 5)
    left, right, top, bottom = 32 + max(len(f"{t:,.0f}") for t in ticks) * TICK_WIDTH, WIDTH - 16.0, 10.0, 330.0
    groups = np.array_split(ordered, min(len(ordered), int(right - left)))
    edges = left + (right - left) * np.concatenate(([0], np.cumsum([len(group) for group in groups]))) / len(ordered)
    heights = np.stack([counts[group].mean(0) for group in groups]) * (bottom - top) / ticks[-1]
    first = np.array([top_class[group[0]] for group in groups])
    parts = []
    for tick in ticks:
        y = bottom - tick * (bottom - top) / ticks[-1]
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(text(left - 8, y + 4, f"{tick:,.0f}", "end"))
    starts = _starts(heights, first)
    for k in np.flatnonzero(heights.max(0) > 0.01).tolist():
        outline = _band(edges, bottom - starts[:, k] - heights[:, k], bottom - starts[:, k])
        parts.append(f'<path {looks[k]} d="{outline}"/>')
    axis = HorizontalAxis(0, len(ordered), left, right, integers=True)
    parts += axis.draw(bottom, bottom, lambda value: f"{value:,.0f}")
    words = "clients, grouped by their most frequent class, larger ones first"
    parts.append(text((left + right) / 2, bottom + 38, words, "middle", "axis"))
    middle = f"translate(13 {(top + bottom) / 2:.1f}) rotate(-90)"
    parts.append(f'<text class="axis" text-anchor="middle" transform="{middle}">{what}</text>')
    return _svg(parts, bottom + 46)


def _starts(heights: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Where each class of a column begins: class `first` at 0, the others in order above it."""
    columns = np.arange(len(heights))
    others = heights.copy()
    others[columns, first] = 0
    starts = np.cumsum(others, 1) - others + heights[columns, first][:, None]
    starts[columns, first] = 0
    return np.asarray(starts)


def _band(edges: np.ndarray, above: np.ndarray, below: np.ndarray) -> str:
    """The outline between two step functions."""
    there = " ".join(f"V{y:.1f}H{x:.1f}" for y, x in zip(above, edges[1:], strict=True))
    back = " ".join(f"V{y:.1f}H{x:.1f}" for y, x in zip(below[::-1], edges[-2::-1], strict=True))
    return f"M{edges[0]:.1f} {below[0]:.1f}{there}{back}Z"
