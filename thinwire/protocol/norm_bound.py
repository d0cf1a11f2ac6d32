"""Bounds on the influence of one client in a round, relative to the median client.

    x_i <- x_i min(1, limit m / |x_i|),    m = min(median of |x_j| over the cohort, 3 r)

x is in turn the update of the coordinates, the reports of correction and schedule, the change of the buffers, and the
client's weight. r is the median of the latest rounds (`recent.py`), which a server of real clients remembers; without
it, or before three rounds, m is the lower median of the cohort. As long as fewer than half of the clients are
malicious, m is at most the norm of an honest client, so that one client moves the mean by at most `limit / clients`
honest updates.

Clients are scaled down, not refused: an honest client that trained on many more examples than others still counts. Only
an update or a weight above `REFUSED` times its bound is refused: no client trains that.

The decision depends on a norm in float32, whose last digits depend on the machine. Where m is 0, nothing is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.core.tree import Tree, add, norm, scale, sub
from thinwire.protocol.upload import Upload

WEIGHT_LIMIT = 1000.0  # numbers of examples differ more between honest clients than their updates do
REFUSED = 100.0  # times the bound
SLACK = 3.0  # times the median of the latest rounds: an honest cohort is below


class Bounded(NamedTuple):
    """The uploads of a cohort within bounds.

    Args:
        uploads: the uploads, those of refused clients included.
        why: for each client that was scaled down, the reason.
        refused: for each client whose upload must not be used, the reason.
        medians: m of each part of an upload.
        norms: of the update of each client.
    """

    uploads: list[Upload]
    why: dict[int, str]
    refused: Mapping[int, str] = {}
    medians: Mapping[str, float] = {}
    norms: Mapping[int, float] = {}


def reference(sizes: Sequence[float], recent: float = 0.0) -> float:
    """The lower median, but at most three times that of the latest rounds, where it is known.

    >>> reference([1.0, 2.0, 9.0]), reference([1e6, 1e6, 2.0], recent=1.5), reference([0.0, 1e6], recent=1.5)
    (2.0, 4.5, 1.5)
    """
    middle = sorted(sizes)[(len(sizes) - 1) // 2]
    return min(middle or recent, SLACK * recent) if recent else middle


def factors(sizes: Sequence[float], limit: float, recent: float = 0.0) -> list[float]:
    """The factor for each size so that none is above `limit` times the reference.

    >>> factors([1.0, 2.0, 3.0, 1e9], 10.0)
    [1.0, 1.0, 1.0, 2e-08]
    """
    most = limit * reference(sizes, recent)
    return [most / size if 0 < most < size else 1.0 for size in sizes]


def bound_uploads(
    clients: Sequence[int],
    uploads: Sequence[Upload],
    limit: float,
    start: Tree,
    buffers: Tree,
    recent: Mapping[str, float] | None = None,
) -> Bounded:
    """Scale down uploads far above the median of the cohort, or of the latest rounds.

    Args:
        clients: their numbers, in the order of the uploads.
        uploads: the decoded uploads.
        limit: the largest norm, in units of the median; 0 for no bound.
        start: what is subtracted from uploaded weights to get the update; empty where clients upload updates.
        buffers: the buffers that clients trained from.
        recent: the median of each part in the latest rounds, as far as it is known; None in a simulation.
    """
    out = list(uploads)
    if not limit or (len(out) < 2 and recent is None):
        return Bounded(out, {})
    known, why, refused = recent or {}, dict[int, list[str]](), dict[int, str]()
    medians, norms = dict[str, float](), dict[int, float]()
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
        sizes = [one.norm for one in out] if field == "code" and not origin else [norm(tree) for tree in moved]
        medians[field] = reference(sizes, known.get(field, 0.0))
        if field == "code":
            norms = dict(zip(clients, sizes, strict=True))
        for i, factor in enumerate(factors(sizes, limit, known.get(field, 0.0))):
            if factor < 1:
                far = f"its {words} is {limit / factor:.3g} times as large"
                why.setdefault(clients[i], []).append(far)
                if field == "code" and factor * REFUSED < 1:
                    refused[clients[i]] = f"{far} as the median, more than any client trains"
                change = scale(moved[i], factor)
                bounded: dict[str, Any] = {field: add(origin, change) if origin else change}
                out[i] = out[i]._replace(**bounded)
    weights = [one.weight for one in out]
    medians["weight"] = reference(weights, known.get("weight", 0.0))
    for i, factor in enumerate(factors(weights, WEIGHT_LIMIT, known.get("weight", 0.0))):
        if factor < 1:
            far = f"its weight is {WEIGHT_LIMIT / factor:.3g} times as large"
            why.setdefault(clients[i], []).append(far)
            if factor * REFUSED < 1:
                refused[clients[i]] = f"{far} as the median, more than any client has examples"
            out[i] = out[i]._replace(weight=out[i].weight * factor)
    reasons = {
        client: f"{' and '.join(words)} as the median of the cohort; it counts as {limit:g} times"
        for client, words in why.items()
        if client not in refused
    }
    return Bounded(out, reasons, refused, medians, norms)
