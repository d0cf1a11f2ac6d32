"""The chart of layers: what each sent and how often it spoke, on the page and as a picture of its own. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.units import human_bytes
from thinwire.errors import ConfigError
from thinwire.experiments.files import write_atomically
from thinwire.reports.charts import Bar, Frame, alone, bars
from thinwire.reports.style import ALONE

MOST_LAYERS = 16
WIDTH = 680  # of the picture alone


class LayerChart(NamedTuple):
    """Bars, what they show, and whether that is bytes."""

    what: str
    bars: list[Bar]
    bytes: bool


def layer_chart(layers: Sequence[dict[str, Any]], rounds: int | None, number: int = 0, most: int = 0) -> LayerChart:
    """A bar for each layer: its bytes up, or how often it spoke where no bytes belong to a layer.

    Args:
        layers: the table of a run.
        rounds: how many rounds it had, if that is known.
        number: of the line, which gives the colour.
        most: show only so many, the largest; 0 shows all.

    >>> layer_chart([{"layer": "fc", "numbers": 6, "syncs": 3, "bytes_up": 72}], rounds=4).bars[0][:2]
    ('fc (3 of 4)', '72 B')
    """
    known = all(isinstance(row.get("bytes_up"), int) for row in layers)
    key, text = ("bytes_up", human_bytes) if known else ("syncs", lambda count: f"{count:,}")
    ranked = sorted(layers, key=lambda row: -(row.get(key) or 0))[: most or None]
    shown = [row for row in layers if row in ranked]
    rest = f", the {most} largest of {len(layers)}" if 0 < most < len(layers) else ""
    drawn = [
        Bar(_spoke(row, rounds), text(row.get(key) or 0), number, [(float(row.get(key) or 0), 1.0)]) for row in shown
    ]
    return LayerChart(("bytes up" if known else "synchronisations") + f" by layer{rest}", drawn, known)


def draw_layers(layers: Sequence[dict[str, Any]], rounds: int, title: str, file: Path) -> None:
    """Write the chart as a picture of its own; the name of the file ends in `.svg`."""
    if file.suffix != ".svg":
        raise ConfigError(f"the picture is an SVG file: write --plot {file.with_suffix('.svg')}, not {file}")
    chart = layer_chart(layers, rounds)
    about = "; ".join(f"{bar.label}: {bar.value}" for bar in chart.bars) + "."
    picture = bars(chart.bars, Frame(f"{title}: {chart.what}", about, chart.what, ident="layers", width=WIDTH - 32))
    picture = f'<g transform="translate(16 0)">{picture}</g>'  # in line with the title
    note = "In brackets: rounds in which it spoke."
    write_atomically(file, alone(picture, f"{title}: {chart.what}", note, (), ALONE, WIDTH).encode())


def _spoke(row: dict[str, Any], rounds: int | None) -> str:
    """A layer, and in how many rounds it spoke."""
    of = "" if rounds is None else f" of {rounds}"
    return f"{row['layer']} ({row['syncs']}{of})" if isinstance(row.get("syncs"), int) else str(row["layer"])
