"""Bounds on what one client can add to a round, relative to the median client of the cohort.

    x_i <- x_i min(1, limit m / |x_i|),    m: the lower median of |x_j| over the cohort

x is in turn the change of the coordinates, what the correction and what the schedule report, the change of the buffers,
and the client's weight. As long as fewer than half of the clients lie, m is at most the norm of an honest client, so
that one client moves the mean by at most `limit / clients` honest changes. Clients are scaled down, not refused: an
honest client that trained on far more examples than others still counts.

The decision depends on a norm in float32, whose last digits depend on the machine. Where m is 0, nothing is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.core.tree import Tree, add, norm, scale, sub
from thinwire.protocol.fields import Upload

WEIGHT_LIMIT = 1000.0  # numbers of examples differ more between honest clients than their changes do


class Bounded(NamedTuple):
    """The uploads of a cohort within bounds, and for each client that was scaled down, why."""

    uploads: list[Upload]
    why: dict[int, str]


def factors(sizes: Sequence[float], limit: float) -> list[float]:
    """By how much each size is to be multiplied so that none is above `limit` times the lower median.

    >>> factors([1.0, 2.0, 3.0, 1e9], 10.0)
    [1.0, 1.0, 1.0, 2e-08]
    """
    most = limit * sorted(sizes)[(len(sizes) - 1) // 2]
    return [most / size if 0 < most < size else 1.0 for size in sizes]


def bound_uploads(
    clients: Sequence[int], uploads: Sequence[Upload], limit: float, start: Tree, buffers: Tree
) -> Bounded:
    """Scale down what is far beyond the cohort.

    Args:
        clients: their numbers, in the order of the uploads.
        uploads: what they sent, decoded.
        limit: the largest norm, in units of the median; 0 for no bound.
        start: what is subtracted from a client's values to get its change; empty where clients send changes.
        buffers: the buffers from which they trained.
    """
    out, why = list(uploads), dict[int, list[str]]()
    if not limit or len(out) < 2:
        return Bounded(out, {})

    def shrink(part: str, of: Sequence[Tree], origin: Tree, known: Sequence[float] = ()) -> list[Tree]:
        moved = [sub(tree, origin) for tree in of] if origin else list(of)
        by = factors(known or [norm(tree) for tree in moved], limit)
        for client, factor in zip(clients, by, strict=True):
            if factor < 1:
                why.setdefault(client, []).append(f"its {part} is {limit / factor:.3g} times as large")
        return [
            tree if factor == 1 else add(origin, scale(change, factor)) if origin else scale(change, factor)
            for tree, change, factor in zip(of, moved, by, strict=True)
        ]

    codes = shrink("change", [one.code for one in out], start, () if start else [one.norm for one in out])
    reports = shrink("report of the correction", [one.report for one in out], {})
    noted = shrink("report of the schedule", [one.noted for one in out], {})
    states = shrink("change of the buffers", [one.buffers for one in out], buffers)
    by_weight = factors([one.weight for one in out], WEIGHT_LIMIT)
    for client, factor in zip(clients, by_weight, strict=True):
        if factor < 1:
            why.setdefault(client, []).append(f"its weight is {WEIGHT_LIMIT / factor:.3g} times as large")
    weights = [one.weight * factor for one, factor in zip(out, by_weight, strict=True)]
    parts = zip(codes, weights, states, reports, noted, strict=True)
    said = {
        client: f"{' and '.join(words)} as the median of the cohort; it counts as {limit:g} times"
        for client, words in why.items()
    }
    return Bounded([Upload(*part) for part in parts], said)
