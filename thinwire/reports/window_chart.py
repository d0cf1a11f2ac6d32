"""Charts of FedLAMA's windows: which layers can be synchronized less often, and what that costs. Needs no torch.

    delta        share of the discrepancy in the layers taken so far, those on which clients agree first
    1 - lambda   share of the parameters in the other layers

Where the two curves cross, the layers taken are synchronized once in the next window (the paper's Figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from thinwire.reports.charts import Curve, DotRow, PlotArea, curves, dots
from thinwire.reports.svg import swatch

Window: TypeAlias = Mapping[str, Mapping[str, float]]  # `RoundRecord.layers`
SHARES = {"delta": "delta: discrepancy of these layers", "left": "1 - lambda: parameters of the other layers"}
X = "layers with the long interval"


def windows_of(records: Iterable[Mapping[str, Any]]) -> list[Window]:
    """The windows of a run, from the lines of its rounds; values that are not finite numbers are left out.

    >>> rows = {"fc": {"discrepancy": 0.1, "interval": 2, "delta": 1.0, "left": 0.0}}
    >>> windows_of([{"round": 1, "layers": {}}, {"round": 2, "layers": rows}, {"round": 3}])
    [{'fc': {'discrepancy': 0.1, 'interval': 2, 'delta': 1.0, 'left': 0.0}}]
    """
    found = []
    for record in records:
        layers = record.get("layers")
        if isinstance(layers, Mapping) and layers and all(isinstance(facts, Mapping) for facts in layers.values()):
            found.append({str(name): _numbers(facts) for name, facts in layers.items()})
    return found


def share_curves(windows: Sequence[Window]) -> list[Curve]:
    """delta and 1 - lambda against the number of layers: the mean over windows, and the lowest and the highest.

    >>> rows = {"fc": {"delta": 0.2, "left": 0.1}, "conv": {"delta": 1.0, "left": 0.0}}
    >>> [curve.points for curve in share_curves([rows])]
    [[(1, 0.2, 0.2, 0.2), (2, 1.0, 1.0, 1.0)], [(1, 0.1, 0.1, 0.1), (2, 0.0, 0.0, 0.0)]]
    """
    drawn = []
    for series, (key, label) in enumerate(SHARES.items()):
        ranked = [[facts[key] for facts in window.values() if key in facts] for window in windows]
        longest = max(map(len, ranked), default=0)
        at = [[values[i] for values in ranked if i < len(values)] for i in range(longest)]
        points = [(i, sum(one) / len(one), min(one), max(one)) for i, one in enumerate(at, 1)]
        drawn.append(Curve(label, series, points))
    return drawn


def share_chart(windows: Sequence[Window], title: str, ident: str, width: int, height: int = 320) -> str:
    """The chart of `share_curves`."""
    drawn = share_curves(windows)
    description = "; ".join(
        f"{curve.label}: " + ", ".join(f"{y:.2f} at {x:g}" for x, y, _, _ in curve.points) for curve in drawn
    )
    area = PlotArea(title, f"{description}.", X, "share", ident=ident, width=width, height=height, integer_x=True)
    return curves(drawn, area._replace(limits=(0.0, 1.0)))


def share_legend() -> list[tuple[str, str]]:
    """Swatches and names of the two curves."""
    return [(swatch(series), label) for series, label in enumerate(SHARES.values())]


def share_note(windows: Sequence[Window]) -> str:
    """What the curves are, and how many layers were taken in the last window."""
    taken = sum(facts.get("interval", 1) > 1 for facts in windows[-1].values())
    spread = f"Mean over {len(windows)} windows; bands span all of them. " if len(windows) > 1 else ""
    return f"{spread}The last window chose {taken} of {len(windows[-1])} layers for the long interval."


def discrepancy_chart(windows: Sequence[Window], title: str, ident: str, width: int) -> str:
    """The discrepancy of each layer in the first and in the last window, layers in the order of the last."""
    rows = []
    for name, facts in windows[-1].items():
        ends = ((0, "first", windows[0].get(name, {})), (1, "last", facts))
        placed = [(series, one["discrepancy"], when) for series, when, one in ends if one.get("discrepancy", 0.0) > 0]
        rows.append(DotRow(name, [(series, d, f"{name}: {d:.3g} in the {when} window") for series, d, when in placed]))
    description = "; ".join(f"{row.label}: " + ", ".join(f"{d:.3g}" for _, d, _ in row.dots) for row in rows)
    area = PlotArea(title, f"{description}.", "d by parameter and round (log scale)", ident=ident, width=width)
    return dots(rows, area._replace(x_text=lambda value: f"{value:.0e}"))


def discrepancy_legend() -> list[tuple[str, str]]:
    """Swatches of the two windows."""
    return [(swatch(0), "first window"), (swatch(1), "last window")]


def _numbers(facts: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(key): value
        for key, value in facts.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
