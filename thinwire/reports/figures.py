"""Figures by matplotlib: curves, bars, layers and the clients of a partition, as a `Figure`, a file, or part of a page.

Series i has the same color, marker and dash pattern in every figure, so that a figure can be read without color. Sizes
are in pixels. In SVG the colors of the light theme become CSS variables, so that one drawing serves both themes.

>>> figure = curves([Curve("mapo", [(1e3, 0.5, 0.4, 0.6), (1e4, 0.9, 0.8, 1.0)])], "bytes", "accuracy", log_x=True)
>>> svg(figure, "accuracy against bytes").startswith("<svg")
True
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinwire.core.text import html_text, human_bytes, visible
from thinwire.errors import ConfigError
from thinwire.runs.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from thinwire.data.partition import PartitionDescription

WIDE, NARROW = 1020, 340
_NAMES = ("page", "card", "ink", "soft", "edge", "grid", "note", *(f"c{i}" for i in range(8)))
_LIGHT = ["#f4f5f7", "#ffffff", "#1b1f24", "#566069", "#d9dde2", "#e5e8ec", "#fff4d6"]
_LIGHT += ["#0063a8", "#c04a00", "#00785a", "#a03a86", "#7b5b00", "#3a3f9e", "#b3123f", "#4d5b66"]
_DARK = ["#0e1114", "#171b20", "#e8ebee", "#a3adb7", "#2c333b", "#2a3037", "#3a3116"]
_DARK += ["#5bb8f5", "#ff9650", "#38c99a", "#ee9bd2", "#e8c14a", "#a9a8ff", "#ff8499", "#b4c0ca"]
LIGHT, DARK = dict(zip(_NAMES, _LIGHT, strict=True)), dict(zip(_NAMES, _DARK, strict=True))
STYLE = "".join(
    start + "".join(f"--{name}:{color};" for name, color in colors.items()) + end
    for start, colors, end in ((":root{", LIGHT, "}"), ("@media(prefers-color-scheme:dark){:root{", DARK, "}}"))
) + (
    'svg{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans","DejaVu Sans",sans-serif;'
    "fill:var(--ink)}svg text{font-family:inherit!important}"  # matplotlib names its own font in every text
)
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 2)), (0, (2, 2)), (0, (9, 3)), (0, (4, 3, 1, 3)))
_MARKERS = "os^DvPpX"
_CHARACTER = 7.7  # pixels of a character of 12 pixels, in a wide font
_LOOK: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "legend.fontsize": 13,
    "text.color": LIGHT["ink"],
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["soft"]),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "legend.frameon": False,
    "lines.linewidth": 2,
    "text.parse_math": False,  # names of methods are not formulas
    "svg.fonttype": "none",
}
Point = tuple[float, float, float, float]
Format = Callable[[float], str]


class Curve(NamedTuple):
    """A series of points (x, y, lowest y, highest y); one whose runs all failed has no part in the scale."""

    label: str
    points: Sequence[Point]
    failed: bool = False


class Bar(NamedTuple):
    """A bar: its solid, pale and outlined segments, and the range over seeds."""

    label: str
    value: str
    segments: Sequence[float]
    spread: tuple[float, float] = (0.0, 0.0)
    series: int = 0


@contextmanager
def _styled() -> Iterator[None]:
    """The look of these figures, without changing that of others."""
    import matplotlib

    with matplotlib.rc_context(_LOOK):
        yield


@_styled()
def curves(
    lines: Sequence[Curve],
    x: str,
    y: str,
    width: int = WIDE,
    *,
    log_x: bool = False,
    integer_x: bool = False,
    x_text: Format = "{:g}".format,
    y_text: Format = "{:g}".format,
    limits: tuple[float, float] | None = None,
    marks: Mapping[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Curves with a band from the lowest to the highest seed.

    Args:
        lines: one series each.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        width: in pixels.
        log_x: logarithmic; points at 0 are left out.
        integer_x: ticks at integers only.
        x_text: a tick as text.
        y_text: likewise.
        limits: of y; values outside are drawn at the edge.
        marks: labeled horizontal lines; one close to an earlier one is left out.
        title: above the figure.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    figure, axes = _new()
    points = [np.array([p for p in line.points if p[0] > 0 or not log_x]).reshape(-1, 4) for line in lines]
    every = np.concatenate([np.empty((0, 4)), *points])
    every = every if len(every) else np.array([[1.0, 0.0, 0.0, 1.0]])
    low, high = limits or (every[:, 1:].min(), every[:, 1:].max())
    room = high - low or abs(low) or 1.0
    axes.set_ylim(low - 0.08 * room, high + 0.08 * room)
    for i, (line, own) in enumerate(zip(lines, points, strict=True)):
        own[:, 1:] = np.clip(own[:, 1:], low, high)
        shape, color = (i + i // 8) % 8, LIGHT[f"c{i % 8}"]
        some = (0.1 * (i % 8) / 8, 0.1) if len(own) > 12 else None  # markers of curves that coincide stay visible
        look = {"color": color, "ls": _DASHES[shape], "marker": _MARKERS[shape], "markeredgecolor": LIGHT["card"]}
        label = textwrap.shorten(line.label, max(20, width // 9), placeholder="…")
        axes.plot(own[:, 0], own[:, 1], label=label, clip_on=False, markersize=8, markevery=some, **look)
        if np.ptp(own[:, 2:], axis=1).any():
            axes.fill_between(own[:, 0], own[:, 2], own[:, 3], color=color, alpha=0.13, lw=0, clip_on=False)
    marked: list[float] = []
    for name, value in (marks or {}).items():
        if low <= value <= high and all(abs(value - other) > 0.08 * room for other in marked):
            axes.axhline(value, color=LIGHT["soft"], ls=":", lw=1)
            axes.annotate(name, (0, value), (6, 4), ("axes fraction", "data"), "offset points", color=LIGHT["soft"])
            marked.append(value)
    start, end = every[:, 0].min(), every[:, 0].max()
    if log_x:
        axes.set_xscale("log")
        start, end = (start / 1.06, end * 1.06) if end / start > 1.4 else (start / 1.3, end * 1.3)
    elif start == end:
        start, end = start - 0.5, end + 0.5
    axes.set_xlim(start, end)
    most = max(2, int(width / (_CHARACTER * max(len(x_text(start)), len(x_text(end)), 4) + 40)))
    ticks = FixedLocator(_log_ticks(start, end, most)) if log_x else MaxNLocator(most, integer=integer_x)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: x_text(value))
    axes.yaxis.set_major_locator(MaxNLocator(8 if width > 600 else 5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
    axes.set(xlabel=x, ylabel=y)
    left = 34 + _CHARACTER * max(len(y_text(tick)) for tick in axes.get_yticks())
    return _finish(figure, axes, width, 310 if width > 600 else 230, left, title=title)


@_styled()
def bars(rows: Sequence[Bar], width: int = WIDE, longest: float = 0, title: str = "") -> Figure:
    """Bars under their names and values; figures with the same `longest` have the same scale."""
    scale = (width - 4) / (longest or longest_bar(rows) or 1)
    room = max(8, int(width / 8.3) - 2 - max((len(row.value) for row in rows), default=0))
    labels = [textwrap.wrap(row.label, room) or [""] for row in rows]
    y = 24.0 if title else 0.0
    height = y + sum(30 + 16 * len(label) for label in labels)
    figure, axes = _new()
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))  # pixels
    axes.set_axis_off()
    axes.text(0, 14, visible(title, 110), weight="bold", size=13)
    for row, label in zip(rows, labels, strict=True):
        axes.text(width - 2, y + 14, row.value, ha="right", weight="bold", size=13)
        for line in label:
            axes.text(0, y + 14, line, size=13)
            y += 16
        x, color = 1.0, LIGHT[f"c{row.series % 8}"]
        outline = {"facecolor": "none", "edgecolor": color, "ls": (0, (3, 2)), "lw": 1.5}
        looks: list[dict[str, Any]] = [{"color": color}, {"color": color, "alpha": 0.55}, outline]
        for length, look in zip(row.segments, looks, strict=False):
            if length > 0:
                axes.barh(y + 11, max(length * scale, 1), 14, x, **look)
                x += length * scale
        low, high = (1 + end * scale for end in row.spread)
        if high - low > 4:  # a shorter line could not be seen
            axes.plot([low, high], [y + 11, y + 11], "|-", color=LIGHT["ink"], lw=1.5)
        y += 30
    figure.set_size_inches(width / 72, height / 72)
    figure.set_label(title)
    return figure


def longest_bar(rows: Sequence[Bar]) -> float:
    """The length of the longest bar, or of its highest seed."""
    return max((max(sum(row.segments), row.spread[1]) for row in rows), default=0)


def scale_limits(lines: Sequence[Curve]) -> tuple[float, float] | None:
    """The lowest and the highest value to show, so that a diverged run does not flatten the others; None if empty.

    These are all values of the curves that did not fail, or those of the last 80 % of their points if all would need
    more than five times as much room.

    >>> good = Curve("a", [(x, y, y, y) for x, y in enumerate((-90.0, 0.1, 0.2, 0.3, 0.4, 0.4))])
    >>> scale_limits([good, Curve("b", [(1.0, 1e9, 1e9, 1e9)], failed=True)])
    (0.1, 0.4)
    """
    drawn = [line for line in lines if line.points]
    sound = [np.array(line.points)[:, 1:] for line in drawn if not line.failed or all(one.failed for one in drawn)]
    if not sound:
        return None
    every = np.concatenate([own.ravel() for own in sound])
    late = np.concatenate([own[len(own) // 5 :].ravel() for own in sound])
    shown = every if np.ptp(every) <= 5 * np.ptp(late) or not np.ptp(late) else late
    return float(shown.min()), float(shown.max())


def layer_bars(layers: Sequence[Mapping[str, Any]], rounds: int | None, series: int = 0) -> tuple[str, list[Bar]]:
    """What the bars are, and one for each layer: its uploaded bytes, or its synchronizations if bytes are not known.

    >>> layer_bars([{"layer": "fc", "syncs": 3, "bytes_up": 72}], rounds=4)[1][0][:2]
    ('fc (3 of 4)', '72 B')
    """
    known = all(isinstance(row.get("bytes_up"), int) for row in layers)
    key, text = ("bytes_up", human_bytes) if known else ("syncs", "{:,}".format)
    of, rows = "" if rounds is None else f" of {rounds}", []
    for row in layers:
        value = row.get(key) or 0
        counted = f" ({row['syncs']}{of})" if isinstance(row.get("syncs"), int) else ""
        rows.append(Bar(f"{row['layer']}{counted}", text(value), [value], series=series))
    return f"{'bytes up' if known else 'synchronizations'} by layer", rows


@_styled()
def partition_figure(found: PartitionDescription, title: str) -> Figure:
    """The examples of each client, stacked by class.

    Up to 40 clients have a bar and a name each. More are an area: grouped by their most frequent class, larger first.
    """
    import matplotlib

    counts, names = found.counts.astype(np.float64), list(found.class_names)
    if found.kind == "labels":  # an example with several labels counts once
        counts *= (found.sizes / np.maximum(counts.sum(1), 1))[:, None]
    if len(names) > 20:
        order = np.argsort(-counts.sum(0), kind="stable")
        kept, rest = np.sort(order[:19]), order[19:]
        counts = np.concatenate([counts[:, kept], counts[:, rest].sum(1, keepdims=True)], 1)
        names = [*(names[k] for k in kept), f"{len(rest):,} other classes"]
    names = [visible(name, 30) for name in names]
    scale = matplotlib.colormaps["viridis" if found.kind == "numbers" else "tab20"]
    colors = list(scale(np.linspace(0, 1, len(names)) if found.kind == "numbers" else range(len(names))))
    (figure, axes), left = _new(), 80.0
    if len(found) <= 40:
        clients, start = [visible(name, 30) for name in found.client_names], np.zeros(len(found))
        for name, own, color in zip(names, counts.T, colors, strict=True):
            axes.barh(range(len(found)), own, 0.7, start, label=name, color=color)
            start = start + own
        axes.set_yticks(range(len(found)), clients)
        axes.set(xlabel="examples", ylim=(len(found) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
        left, height = 24 + 8.3 * max(map(len, clients)), 22 * len(found)
    else:
        order = np.lexsort((-counts.sum(1), counts.argmax(1)))
        groups = np.array_split(order, min(len(order), 450))  # as many as can be seen
        ends = np.cumsum([len(group) for group in groups])
        heights = np.stack([counts[group].mean(0) for group in groups])
        axes.stackplot(ends, heights.T, labels=names, colors=colors, step="mid")
        words = "clients, grouped by their most frequent class, larger ones first"
        axes.set(xlabel=words, ylabel="examples", xlim=(ends[0], ends[-1]))
        height = 310
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return _finish(figure, axes, WIDE, height, left, title=f"{title}: {found!r}")


def save(figure: Figure, file: Path) -> None:
    """Write a figure to a file whose name ends in `.svg`, `.png` or `.pdf`."""
    if file.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"the figure is an SVG, PNG or PDF file: write --plot {file.with_suffix('.svg')}, not {file}")
    drawn = io.BytesIO(standalone(figure).encode() if file.suffix == ".svg" else b"")
    if file.suffix != ".svg":
        figure.savefig(drawn, format=file.suffix[1:], dpi=144)
    write_atomically(file, drawn.getvalue())


def standalone(figure: Figure) -> str:
    """A figure as the contents of an SVG file, light or dark as its viewer is."""
    wide, high = (round(72 * size) + margin for size, margin in zip(figure.get_size_inches(), (24, 16), strict=True))
    space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    paper = '<rect x="-12" y="-8" width="100%" height="100%" style="fill:var(--card)"/>'
    drawn = svg(figure, str(figure.get_label()))
    box = f'viewBox="-12 -8 {wide} {high}" width="{wide}" height="{high}"'
    return f"<svg {space} {box}><style>{STYLE}</style>{paper}{drawn}</svg>\n"


@_styled()
def svg(figure: Figure, title: str, name: str = "") -> str:
    """A figure as an SVG element, with colors as CSS variables; the same figure gives the same text.

    Args:
        figure: the figure.
        title: for screen readers.
        name: unique among the figures of a page.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, dpi=72, metadata={"Date": None})
    # on a page: no global style, no metadata, no ids that other figures have too
    unfit = r'<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->| id="[\w.]+_\d+"'
    text = re.sub(r"\s+", " ", re.sub(unfit, "", file.getvalue(), flags=re.DOTALL)).replace("> <", "><")
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)
    for key, color in LIGHT.items():
        text = text.replace(color, f"var(--{key})")
    wide, high = (f"{size * 72:.0f}" for size in figure.get_size_inches())
    body = text[text.index(">", text.index("<svg")) + 1 :].strip()
    box = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    return f'<svg role="img" {box}><title>{html_text(title)}</title>{body}'


def _new() -> tuple[Figure, Any]:
    """A new figure and its axes, without the global state of pyplot."""
    from matplotlib.figure import Figure

    figure: Any = Figure(dpi=72)
    figure._repr_svg_ = lambda: standalone(figure)  # for notebooks
    return figure, figure.subplots()


def _finish(figure: Figure, axes: Any, width: int, height: float, left: float, title: str) -> Figure:
    """Set the size of a figure and of its axes, which are below the title and the legend."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, int(width / (max(map(len, names), default=0) * 8.3 + 60)))
    head = 26 if title else 0
    full = head + 16 + 21 * math.ceil(len(names) / columns) + height + 50
    figure.set_size_inches(width / 72, full / 72)
    axes.set_position((left / width, 50 / full, 1 - (left + 24) / width, height / full))
    place = {"loc": "upper left", "bbox_to_anchor": (0, 1 - (head + 4) / full), "borderaxespad": 0, "borderpad": 0}
    figure.legend(handles, names, ncols=columns, labelspacing=0.4, handlelength=2.6, **place)
    figure.set_label(title)
    figure.text(0, 1 - 16 / full, visible(title, 110), weight="bold", size=13)
    return figure


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most so many round values.

    >>> _log_ticks(800, 60_000, 5)
    [1000.0, 3000.0, 10000.0, 30000.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        inside = [tick for d in decades for step in steps if low <= (tick := step * 10.0**d) <= high]
        if 2 <= len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)] if len(inside) > most else [low, high]
