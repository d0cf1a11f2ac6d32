"""Chapter about layers: uploaded bytes or synchronizations of each layer."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.reports.charts import PlotArea, bars, longest_bar
from thinwire.reports.formatting import NARROW, ident
from thinwire.reports.layer_chart import MOST_LAYERS, SYNC_NOTE, LayerChart, layer_chart
from thinwire.reports.page import Chapter, Figure, Piece
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.window_chart import Window, share_chart, share_legend, share_note, windows_of


def layers_chapter(task: str, groups: Sequence[SeedGroup]) -> Chapter | None:
    """Traffic by layer of the methods whose runs recorded it; None if none did. Bytes have one scale."""
    charts: list[tuple[SeedGroup, LayerChart]] = []
    uniform: list[str] = []  # every layer in every round, and no bytes by layer: nothing to draw
    for i, group in enumerate(groups):
        summary = group.runs[0].summary or {}
        layers = [row for row in summary.get("layers") or [] if isinstance(row, dict) and "layer" in row]
        if not layers:
            continue
        chart = layer_chart(layers, summary.get("rounds"), i, MOST_LAYERS)
        if chart.bytes or any(row.get("syncs") != summary.get("rounds") for row in layers):
            charts.append((group, chart))
        else:
            uniform.append(group.label)
    longest = max((longest_bar(chart.bars) for _, chart in charts if chart.bytes), default=0)
    pieces: list[Piece] = []
    if uniform:
        names = " and ".join(filter(None, (", ".join(uniform[:-1]), uniform[-1])))
        pieces.append(
            f"{names}: every layer was synchronized in every round, and the codec encodes all layers together, so "
            "bytes cannot be attributed to layers."
        )
    shared_scale = len(charts) > 1
    for i, (group, chart) in enumerate(charts):
        name = f"{ident(task)}-layers-{i}"
        pieces.append(_figure(task, name, group, chart, longest if chart.bytes else 0, shared_scale))
        if windows := windows_of(group.runs[0].records):
            pieces.append(_shares(task, f"{name}-shares", group, windows))
    return Chapter("Layers", pieces) if pieces else None


def _figure(task: str, name: str, group: SeedGroup, chart: LayerChart, longest: float, shared_scale: bool) -> Figure:
    title = f"{group.label}: {chart.what}, {task}"
    description = "; ".join(f"{bar.label}: {bar.value}" for bar in chart.bars) + "."
    area = PlotArea(title, description, chart.what, ident=name)
    seed = f"Seed {group.seeds[0]}. " if len(group.runs) > 1 else ""
    scale = " All methods have the same scale." if chart.bytes and shared_scale else ""
    return Figure(
        title,
        f"{seed}{SYNC_NOTE}{scale}",
        bars(chart.bars, area, longest),
        bars(chart.bars, area._replace(width=NARROW), longest),
    )


def _shares(task: str, name: str, group: SeedGroup, windows: list[Window]) -> Figure:
    """Why layers were synchronized less often, of a method that measures their discrepancy."""
    title = f"{group.label}: discrepancy taken against parameters left, {task}"
    seed = f"Seed {group.seeds[0]}. " if len(group.runs) > 1 else ""
    wide, narrow = (share_chart(windows, title, name, width) for width in (PlotArea("", "", "").width, NARROW))
    return Figure(title, f"{seed}{share_note(windows)}", wide, narrow, share_legend())
