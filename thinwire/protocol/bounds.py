"""Bounds on the influence of one client in a round, relative to the median client.

    x_i <- x_i min(1, limit m / |x_i|),    m = min(median of |x_j| over the cohort, 3 r)

x is in turn the update of the coordinates, the reports of correction and schedule, the change of the buffers, and the
client's weight. r is the median of the latest rounds (`Recent`), which a server of real clients remembers; without
it, or before three rounds, m is the lower median of the cohort. As long as fewer than half of the clients are
malicious, m is at most the norm of an honest client, so that one client moves the mean by at most `limit / clients`
honest updates.

Clients are scaled down, not refused: an honest client that trained on many more examples than others still counts. Only
an update or a weight above `REFUSED` times its bound is refused: no client trains that.

The decision depends on a norm in float32, whose last digits depend on the machine. Where m is 0, nothing is bounded.

Medians of the latest rounds, with which the uploads of the next round are compared.

A cohort of one or two clients, or one of mostly malicious clients, has no median that can be trusted. The median of the
rounds before it can: it is that of other cohorts.

    r      the median, over the latest ten rounds, of the median size of an upload in a round
    far    the update of a client whose norm is above 3 min(m, r), with m the median of its own round

The norm of an update is divided by the learning rate of the clients, so that a schedule does not change r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from thinwire.core.tree import Tree, add, norm, scale, sub
from thinwire.protocol.upload import Upload

WEIGHT_LIMIT = 1000.0  # numbers of examples differ more between honest clients than their updates do
REFUSED = 100.0  # times the bound
_PARTS = {
    "code": "update",
    "report": "report of the correction",
    "schedule_report": "report of the schedule",
    "buffers": "change of the buffers",
    "weight": "weight",
}
SLACK = 3.0  # times the median of the latest rounds: an honest cohort is below


class Bounded(NamedTuple):
    """The uploads of a cohort within bounds."""

    uploads: dict[int, Upload]  # those of refused clients included
    bounded: Mapping[int, str] = {}  # clients that were scaled down, with reasons
    refused: Mapping[int, str] = {}  # clients whose upload must not be used, with reasons
    medians: Mapping[str, float] = {}  # m of each part of an upload
    norms: Mapping[int, float] = {}  # of the update of each client


def reference(sizes: Sequence[float], recent: float = 0.0) -> float:
    """The lower median, but at most three times that of the latest rounds, where it is known.

    >>> reference([1.0, 2.0, 9.0]), reference([1e6, 1e6, 2.0], recent=1.5), reference([0.0, 1e6], recent=1.5)
    (2.0, 4.5, 1.5)
    """
    middle = sorted(sizes)[(len(sizes) - 1) // 2]
    return min(middle or recent, SLACK * recent) if recent else middle


def factors(sizes: Sequence[float], most: float) -> list[float]:
    """The factor for each size so that none is above `most`; 1 if that is 0.

    >>> factors([1.0, 2.0, 3.0, 1e9], 20.0)
    [1.0, 1.0, 1.0, 2e-08]
    """
    return [most / size if 0 < most < size else 1.0 for size in sizes]


def bound_uploads(
    uploads: Mapping[int, Upload],
    limit: float,
    start: Tree,
    buffers: Tree,
    recent: Mapping[str, float] | None = None,
) -> Bounded:
    """Scale down uploads far above the median of the cohort, or of the latest rounds.

    Args:
        uploads: the decoded uploads by client, in the order of the clients.
        limit: the largest norm, in units of the median; 0 for no bound.
        start: what is subtracted from uploaded weights to get the update; empty where clients upload updates.
        buffers: the buffers that clients trained from.
        recent: the median of each part in the latest rounds, as far as it is known; None in a simulation.
    """
    out = dict(uploads)
    if not limit or (len(out) < 2 and recent is None):
        return Bounded(out)
    known, why, refused = recent or {}, dict[int, list[str]](), dict[int, str]()
    medians, norms = dict[str, float](), dict[int, float]()
    for part, words in _PARTS.items():
        is_weight, origin = part == "weight", {"code": start, "buffers": buffers}.get(part)
        values: dict[int, Any] = {i: getattr(one, part) for i, one in out.items()}
        if not is_weight and not all(values.values()):
            continue
        if origin:
            values = {i: sub(tree, origin) for i, tree in values.items()}
        if part == "code" and not origin:
            sizes = {i: one.norm for i, one in out.items()}
        else:
            sizes = {i: value if is_weight else norm(value) for i, value in values.items()}
        norms = sizes if part == "code" else norms
        middle = medians[part] = reference(list(sizes.values()), known.get(part, 0.0))
        most = (WEIGHT_LIMIT if is_weight else limit) * middle
        for i, size in sizes.items():
            if not 0 < most < size:
                continue
            factor, far = most / size, f"its {words} is {size / middle:.3g} times as large"
            why.setdefault(i, []).append(far)
            if part in ("code", "weight") and factor * REFUSED < 1:
                refused[i] = f"{far} as the median, more than of any honest client"
            bounded = values[i] * factor if is_weight else scale(values[i], factor)
            changed: dict[str, Any] = {part: add(origin, bounded) if origin else bounded}
            out[i] = out[i]._replace(**changed)
    reasons = {
        i: f"{' and '.join(words)} as the median of the cohort; it counts as {limit:g} times"
        for i, words in why.items()
        if i not in refused
    }
    return Bounded(out, reasons, refused, medians, norms)


ROUNDS = 10  # that are remembered
ENOUGH = 3  # rounds without which nothing is compared
FAR = 3.0  # times the median: a client that is asked about first if the next state is not fit
UNFIT = 3.0  # times the loss of the latest rounds


class Recent(NamedTuple):
    """Medians of the latest rounds by part of an upload, oldest first, and the clients far off in the newest."""

    medians: Mapping[str, tuple[float, ...]] = {}
    far: tuple[int, ...] = ()

    def of(self, part: str) -> float:
        """The median of the latest rounds; 0 if there are too few.

        >>> Recent({"loss": (2.0, 1.0, 30.0)}).of("loss"), Recent({"loss": (2.0,)}).of("loss")
        (2.0, 0.0)
        """
        known = self.medians.get(part, ())
        return median(known) if len(known) >= ENOUGH else 0.0

    def sizes(self, lr: float) -> dict[str, float]:
        """The medians of all parts for clients with this learning rate; the loss is left out."""
        found = {part: self.of(part) * (lr if part == "code" else 1.0) for part in self.medians if part != "loss"}
        return {part: size for part, size in found.items() if size > 0}

    def after(self, medians: Mapping[str, float], lr: float, far: tuple[int, ...]) -> Recent:
        """What is remembered after one more round.

        >>> Recent().after({"code": 0.5, "loss": 2.0}, lr=0.1, far=()).medians
        {'code': (5.0,), 'loss': (2.0,)}
        """
        units = {"code": lr} if lr > 0 else {}
        news = {part: size / units.get(part, 1.0) for part, size in medians.items() if math.isfinite(size)}
        kept = {part: (*self.medians.get(part, ()), size)[-ROUNDS:] for part, size in news.items()}
        return Recent({**self.medians, **kept}, far)

    def loss_is_unfit(self, loss: float) -> bool:
        """Whether a median loss is far beyond the median of the latest rounds, and beyond each of the last three.

        >>> recent = Recent({"loss": (2.5, 0.5, 0.4, 0.3)})
        >>> recent.loss_is_unfit(1.4), recent.loss_is_unfit(1.6)
        (False, True)
        """
        known = self.medians.get("loss", ())
        return len(known) >= ENOUGH and loss > UNFIT * max(self.of("loss"), *known[-ENOUGH:]) > 0
