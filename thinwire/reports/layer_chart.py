"""Chart of layers: the bytes that each layer uploaded and how often it was synchronized. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.units import human_bytes
from thinwire.errors import ConfigError
from thinwire.experiments.files import write_atomically
from thinwire.reports.charts import Bar, PlotArea, bars
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import stacked, standalone
from thinwire.reports.window_chart import (
    Window,
    discrepancy_chart,
    discrepancy_legend,
    share_chart,
    share_legend,
    share_note,
)

MOST_LAYERS = 16
WIDTH = 680  # of the chart as a file
SYNC_NOTE = "In parentheses: rounds in which the layer was synchronized."


class LayerChart(NamedTuple):
    """Bars, what they show, and whether that is bytes."""

    what: str
    bars: list[Bar]
    bytes: bool


def layer_chart(layers: Sequence[dict[str, Any]], rounds: int | None, series: int = 0, most: int = 0) -> LayerChart:
    """One bar per layer: its uploaded bytes, or its synchronizations if bytes cannot be attributed to layers.

    Args:
        layers: the layers of a run's summary.
        rounds: number of rounds, if known.
        series: index of the method, which gives the color.
        most: show only the largest so many; 0 shows all.

    >>> layer_chart([{"layer": "fc", "syncs": 3, "bytes_up": 72}], rounds=4).bars[0][:2]
    ('fc (3 of 4)', '72 B')
    """
    known = all(isinstance(row.get("bytes_up"), int) for row in layers)
    key, text = ("bytes_up", human_bytes) if known else ("syncs", lambda count: f"{count:,}")
    ranked = sorted(layers, key=lambda row: -(row.get(key) or 0))[: most or None]
    shown = [row for row in layers if row in ranked]
    rest = f", the {most} largest of {len(layers)}" if 0 < most < len(layers) else ""
    drawn = [
        Bar(_label(row, rounds), text(row.get(key) or 0), series, [(float(row.get(key) or 0), 1.0)]) for row in shown
    ]
    return LayerChart(("bytes up" if known else "synchronizations") + f" by layer{rest}", drawn, known)


def draw_layers(
    layers: Sequence[dict[str, Any]], rounds: int, title: str, file: Path, windows: Sequence[Window] = ()
) -> None:
    """Write the chart to a file whose name ends in `.svg`; of a run with FedLAMA's windows those as well."""
    if file.suffix != ".svg":
        raise ConfigError(f"the chart is an SVG file: write --plot {file.with_suffix('.svg')}, not {file}")
    chart = layer_chart(layers, rounds)
    description = "; ".join(f"{bar.label}: {bar.value}" for bar in chart.bars) + "."
    area = PlotArea(f"{title}: {chart.what}", description, chart.what, ident="layers", width=WIDTH - 32)
    drawing = f'<g transform="translate(16 0)">{bars(chart.bars, area)}</g>'  # aligned with the title
    drawn = standalone(drawing, area.title, SYNC_NOTE, (), STANDALONE, WIDTH)
    write_atomically(file, (stacked([drawn, *_window_charts(windows)]) if windows else drawn).encode())


def _window_charts(windows: Sequence[Window]) -> list[str]:
    """delta and 1 - lambda, and the discrepancy of each layer, as the contents of SVG files."""
    shares = share_chart(windows, "delta and 1 - lambda", "shares", WIDTH)
    names = discrepancy_chart(windows, "Discrepancy between clients by layer", "discrepancy", WIDTH - 32)
    moved = f'<g transform="translate(16 0)">{names}</g>'
    note = "Layers in the order of the last window: the first agree most."
    return [
        standalone(
            shares, "Discrepancy taken against parameters left", share_note(windows), share_legend(), STANDALONE, WIDTH
        ),
        standalone(moved, "Discrepancy between clients by layer", note, discrepancy_legend(), STANDALONE, WIDTH),
    ]


def _label(row: dict[str, Any], rounds: int | None) -> str:
    """The name of a layer, and in how many rounds it was synchronized."""
    of = "" if rounds is None else f" of {rounds}"
    return f"{row['layer']} ({row['syncs']}{of})" if isinstance(row.get("syncs"), int) else str(row["layer"])
