"""Figures by matplotlib: curves, bars, layers and the clients of a partition, as a `Figure`, a file, or part of a page.

Series i has the same color, marker and dash pattern in every figure, so that a figure can be read without color. Sizes
are in pixels. In SVG the colors of the light theme become CSS variables, so that one drawing serves both themes.

>>> figure = curves([Curve("mapo", [(1e3, 0.5, 0.4, 0.6), (1e4, 0.9, 0.8, 1.0)])], "bytes", "accuracy", log_x=True)
>>> svg(figure, "accuracy against bytes").startswith("<svg")
True
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinwire.core.text import html_text, visible
from thinwire.errors import ConfigError
from thinwire.runs.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from thinwire.data.task import PartitionDescription

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
    """A bar: its solid, pale and palest segments, and the range over seeds."""

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
    axes.set(xscale="log" if log_x else "linear", xlabel=x, ylabel=y)
    for i, line in enumerate(lines):
        own = np.array([point for point in line.points if point[0] > 0 or not log_x]).reshape(-1, 4)
        own[:, 1:] = np.clip(own[:, 1:], *(limits or (None, None)))
        shape, color = (i + i // 8) % 8, LIGHT[f"c{i % 8}"]
        some = (0.1 * (i % 8) / 8, 0.1) if len(own) > 12 else None  # markers of curves that coincide stay visible
        look = {"color": color, "ls": _DASHES[shape], "marker": _MARKERS[shape], "markeredgecolor": LIGHT["card"]}
        label = textwrap.shorten(line.label, max(20, width // 9), placeholder="…")
        axes.plot(own[:, 0], own[:, 1], label=label, clip_on=False, markersize=8, markevery=some, **look)
        axes.fill_between(own[:, 0], own[:, 2], own[:, 3], color=color, alpha=0.13, lw=0, clip_on=False)
    axes.margins(x=0.008, y=0.08)
    low, high = limits or axes.get_ylim()
    marked: list[float] = []
    for name, value in (marks or {}).items():
        if low <= value <= high and all(abs(value - other) > 0.08 * (high - low) for other in marked):
            axes.axhline(value, color=LIGHT["soft"], ls=":", lw=1)
            axes.annotate(name, (0, value), (6, 4), ("axes fraction", "data"), "offset points", color=LIGHT["soft"])
            marked.append(value)
    start, end = axes.get_xlim()
    most = max(2, int(width / (_CHARACTER * max(len(x_text(start)), len(x_text(end)), 4) + 40)))
    axes.xaxis.set_major_locator(
        FixedLocator(_log_ticks(start, end, most)) if log_x else MaxNLocator(most, integer=integer_x)
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: x_text(value))
    axes.yaxis.set_major_locator(MaxNLocator(8 if width > 600 else 5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
    return _finish(figure, axes, width, 360 if width > 600 else 280, title)


@_styled()
def bars(rows: Sequence[Bar], width: int = WIDE) -> Figure:
    """Bars under their names and values."""
    scale = (width - 4) / (max((max(sum(row.segments), row.spread[1]) for row in rows), default=0) or 1)
    room = max(8, int(width / 8.3) - 2 - max((len(row.value) for row in rows), default=0))
    figure, axes = _new()
    y = 0.0  # in pixels, downward
    for row in rows:
        label, color = textwrap.fill(row.label, room), LIGHT[f"c{row.series % 8}"]
        axes.text(width - 2, y + 14, row.value, ha="right", weight="bold", size=13)
        axes.text(0, y + 3, label, size=13, va="top", linespacing=1.25)
        y += 16 * (1 + label.count("\n"))
        starts = itertools.accumulate(row.segments, initial=0.0)
        for start, length, alpha in zip(starts, row.segments, (1, 0.55, 0.25), strict=False):
            if length > 0:
                axes.barh(y + 11, max(length * scale, 1), 14, 1 + start * scale, color=color, alpha=alpha)
        low, high = (1 + end * scale for end in row.spread)
        if high - low > 4:  # a shorter line could not be seen
            axes.plot([low, high], [y + 11, y + 11], "|-", color=LIGHT["ink"], lw=1.5)
        y += 30
    axes.set(xlim=(0, width), ylim=(max(y, 1), 0))
    axes.set_axis_off()
    return _finish(figure, axes, width, y, "")


def scale_limits(lines: Sequence[Curve]) -> tuple[float, float] | None:
    """The lowest and the highest value to show, so that a diverged run does not flatten the others; None if empty.

    These are all values of the curves that did not fail, or those of the last 80 % of their points if all would need
    more than five times as much room.

    >>> good = Curve("a", [(x, y, y, y) for x, y in enumerate((-90.0, 0.1, 0.2, 0.3, 0.4, 0.4))])
    >>> scale_limits([good, Curve("b", [(1.0, 1e9, 1e9, 1e9)], failed=True)])
    (0.1, 0.4)
    """
    drawn = [line for line in lines if line.points]
    sound = [np.array(line.points)[:, 1:] for line in [line for line in drawn if not line.failed] or drawn]
    if not sound:
        return None
    every = np.concatenate([own.ravel() for own in sound])
    late = np.concatenate([own[len(own) // 5 :].ravel() for own in sound])
    shown = every if np.ptp(every) <= 5 * np.ptp(late) or not np.ptp(late) else late
    return float(shown.min()), float(shown.max())


@_styled()
def partition_figure(found: PartitionDescription, title: str) -> Figure:
    """The examples of each client, stacked by class.

    Up to 40 clients have a bar and a name each. More are grouped by their most frequent class, larger first.
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
    (figure, axes), few = _new(), len(found) <= 40
    if not few:
        order = np.lexsort((-counts.sum(1), counts.argmax(1)))
        counts = np.stack([counts[group].mean(0) for group in np.array_split(order, min(len(order), 200))])
    numbers, scale = found.kind == "numbers", matplotlib.colormaps["viridis" if found.kind == "numbers" else "tab20"]
    for i, (name, own, start) in enumerate(zip(names, counts.T, (np.cumsum(counts, 1) - counts).T, strict=True)):
        color = scale(i / max(1, len(names) - 1) if numbers else i)
        axes.barh(range(len(own)), own, 0.7 if few else 1.0, start, label=visible(name, 30), color=color)
    axes.set(xlabel="examples", ylim=(len(counts) - 0.5, -0.5))
    axes.set_yticks(range(len(found)) if few else (), [visible(name, 30) for name in found.client_names] if few else ())
    axes.set_ylabel("" if few else f"{len(found):,} clients, grouped by most frequent class")
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return _finish(figure, axes, WIDE, 50 + 22 * len(found) if few else 460, f"{title}: {found!r}")


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

    figure: Any = Figure(dpi=72, layout="constrained")
    figure._repr_svg_ = lambda: standalone(figure)  # for notebooks
    return figure, figure.subplots()


def _finish(figure: Figure, axes: Any, width: int, height: float, title: str) -> Figure:
    """Set the size of a figure, and put the title and the legend above its axes."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, int(width / (max(map(len, names), default=0) * 8.3 + 60)))
    full = height + 21 * (math.ceil(len(names) / columns) + bool(title)) + 16
    figure.set_size_inches(width / 72, full / 72)
    place: Any = {"loc": "outside upper left", "borderaxespad": 0.4, "borderpad": 0, "alignment": "left"}
    place |= {"title": visible(title, 110) or None, "title_fontproperties": {"weight": "bold", "size": 13}}
    figure.legend(handles, names, ncols=columns, labelspacing=0.4, handlelength=2.6, **place)
    figure.set_label(title)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # another drawing would place everything again, and elsewhere
    return figure


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most so many of 1, 2, 5, 10, 20, 50, ... in a range; its ends if they are fewer than two.

    >>> _log_ticks(800, 60_000, 6), _log_ticks(800, 60_000, 3)
    ([1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0], [2000.0, 10000.0, 50000.0])
    """
    first, last = math.ceil(3 * math.log10(low)), math.floor(3 * math.log10(high))  # thirds of a decade
    every = max(1, math.ceil((last - first + 1) / most))
    ticks = [float(f"{10 ** (k / 3):.0e}") for k in range(first, last + 1) if k % every == 0]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside if len(inside) > 1 else [low, high]
