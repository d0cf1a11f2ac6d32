"""Bounds on the influence of one client in a round, relative to the median client of the cohort.

    x_i <- x_i min(1, limit m / |x_i|),    m: the lower median of |x_j| over the cohort

x is in turn the update of the coordinates, the reports of correction and schedule, the change of the buffers, and the
client's weight. As long as fewer than half of the clients are malicious, m is at most the norm of an honest client, so
that one client moves the mean by at most `limit / clients` honest updates. Clients are scaled down, not refused: an
honest client that trained on many more examples than others still counts.

The decision depends on a norm in float32, whose last digits depend on the machine. Where m is 0, nothing is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.core.tree import Tree, add, norm, scale, sub
from thinwire.protocol.upload import Upload

WEIGHT_LIMIT = 1000.0  # numbers of examples differ more between honest clients than their updates do


class Bounded(NamedTuple):
    """The uploads of a cohort within bounds, and for each client that was scaled down, the reason."""

    uploads: list[Upload]
    why: dict[int, str]


def factors(sizes: Sequence[float], limit: float) -> list[float]:
    """The factor for each size so that none is above `limit` times the lower median.

    >>> factors([1.0, 2.0, 3.0, 1e9], 10.0)
    [1.0, 1.0, 1.0, 2e-08]
    """
    most = limit * sorted(sizes)[(len(sizes) - 1) // 2]
    return [most / size if 0 < most < size else 1.0 for size in sizes]


def bound_uploads(
    clients: Sequence[int], uploads: Sequence[Upload], limit: float, start: Tree, buffers: Tree
) -> Bounded:
    """Scale down uploads far above the median of the cohort.

    Args:
        clients: their numbers, in the order of the uploads.
        uploads: the decoded uploads.
        limit: the largest norm, in units of the median; 0 for no bound.
        start: what is subtracted from uploaded weights to get the update; empty where clients upload updates.
        buffers: the buffers that clients trained from.
    """
    out, why = list(uploads), dict[int, list[str]]()
    if not limit or len(out) < 2:
        return Bounded(out, {})
    parts: dict[str, tuple[str, Tree]] = {
        "code": ("update", start),
        "report": ("report of the correction", {}),
        "schedule_report": ("report of the schedule", {}),
        "buffers": ("change of the buffers", buffers),
    }
    for field, (words, origin) in parts.items():
        trees: list[Tree] = [getattr(one, field) for one in out]
        if not trees[0]:
            continue
        moved = [sub(tree, origin) for tree in trees] if origin else trees
        known = field == "code" and not origin
        by = factors([one.norm for one in out] if known else [norm(tree) for tree in moved], limit)
        for i, factor in enumerate(by):
            if factor < 1:
                why.setdefault(clients[i], []).append(f"its {words} is {limit / factor:.3g} times as large")
                change = scale(moved[i], factor)
                bounded: dict[str, Any] = {field: add(origin, change) if origin else change}
                out[i] = out[i]._replace(**bounded)
    for i, factor in enumerate(factors([one.weight for one in out], WEIGHT_LIMIT)):
        if factor < 1:
            why.setdefault(clients[i], []).append(f"its weight is {WEIGHT_LIMIT / factor:.3g} times as large")
            out[i] = out[i]._replace(weight=out[i].weight * factor)
    reasons = {
        client: f"{' and '.join(words)} as the median of the cohort; it counts as {limit:g} times"
        for client, words in why.items()
    }
    return Bounded(out, reasons)
