"""The scale of a chart of curves: from the runs that did not fail, so that a diverged run cannot flatten the others.

    center    the best last value of the curves (the one nearest to 0 if no direction is known)
    reach     the largest distance from it in the last 80 % of a curve; of all curves, the lower median
    near      values within 4 reaches of the center

The scale covers all values of the curves that did not fail, or only those that are near if all of them would need more
than five times as much room. Values outside are drawn at the edge, and the note of the chart names their curves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.reports.charts import Curve

Limits = tuple[float, float]


def limits(curves: Sequence[Curve], higher_is_better: bool | None, bounded: bool = False) -> Limits | None:
    """The lowest and the highest value to show; None without points.

    Args:
        curves: the curves; those that failed are `broken`.
        higher_is_better: the direction; None if it is not known.
        bounded: all values have one natural range, such as accuracy, so none is left out.

    >>> good = Curve("a", 0, [(x, y, y, y) for x, y in enumerate((-90.0, 0.1, 0.2, 0.3, 0.4, 0.4))])
    >>> wild = Curve("b", 1, [(1.0, 1e9, 1e9, 1e9)], broken=True)
    >>> limits([good, wild], higher_is_better=True)
    (0.1, 0.4)
    """
    drawn = [curve for curve in curves if curve.points]
    sound = [curve for curve in drawn if not curve.broken] or drawn
    values = [value for curve in sound for point in curve.points for value in point[1:]]
    if not values:
        return None
    full = min(values), max(values)
    ends = [curve.points[-1][1] for curve in sound]
    center = min(ends, key=abs) if higher_is_better is None else (max if higher_is_better else min)(ends)
    reach = statistics.median_low([_reach(curve, center) for curve in sound])
    near = [value for value in values if abs(value - center) <= 4 * reach]
    if bounded or not reach or full[1] - full[0] <= 5 * (max(near) - min(near)):
        return full
    return min(near), max(near)


def outside(curves: Sequence[Curve], shown: Limits | None) -> list[str]:
    """The labels of curves of which a mean is outside the scale."""
    if shown is None:
        return []
    return [c.label for c in curves if any(not shown[0] <= y <= shown[1] for _, y, _, _ in c.points)]


def _reach(curve: Curve, center: float) -> float:
    late = curve.points[len(curve.points) // 5 :]
    return max(abs(value - center) for point in late for value in point[1:])
