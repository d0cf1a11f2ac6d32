"""Bounds on the influence of one client on the next public state, in units of the median client.

    weight       w_i <- min(w_i, known weight of i),  or at most limit times the median weight where it is not known
    influence    a_i = f_i |x_i| v_i / e_i      x_i <- x_i min(1, limit m / a_i)
    median       m = min(lower median of all a_j, 3 r)

x_i is in turn each thing that is averaged: the update of the coordinates, the report of the correction, and each block
of the buffers and of the report of the schedule. f_i is what the server multiplies the update by: FedNova's division
by the local steps, and the factor of a stale update. e_i is 1, and for a client that is known to take more local steps
than the median client, as many times more: a client with a million examples beside clients with one is not cut.
v_i is 1, and where the size of a client is not known, its weight in median weights if that is more: it claims weight
and update, and both together are bounded.
r is the median of m over the latest ten rounds (`Recent`); it bounds a cohort of one or two clients, and one of mostly
malicious clients. Before three rounds, m is the lower median of the cohort.

As long as fewer than half of the clients are malicious, m is at most the influence of an honest client. So one client
moves any part of the state by at most `limit` times the share of its known weight of an honest client's change.

Clients are scaled down, not refused; only an update above `REFUSED` medians is refused: no client trains that. Where
most updates are 0, m is the median of the others; where most changes of another part are 0, all of them become 0.

The decision depends on a norm in float32, whose last digits depend on the machine. The norm of an update is divided by
the learning rate of the clients before it is remembered, so that a schedule does not change r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from thinwire.core.tree import Tree, norm, scale, sub
from thinwire.protocol.upload import Upload

EXAMPLES_LIMIT = 1000.0  # medians: examples of such a client in the mean of losses, which decides nothing
LOSS_LIMIT = 10.0  # medians
REFUSED = 1000.0  # medians
FEW = 5  # clients of a cohort; below, its median says little, and the limit is at least `WIDE`
WIDE = 10.0
HEAVY = 4.0  # times the upper quartile of the cohort: a client that is scaled down and was so far off loses standing
WIDER = 2.0  # times the bound of updates, of other parts: their sizes differ more between honest clients
SLACK = 3.0  # times the median of the latest rounds: an honest cohort is below
_PARTS = {
    "report": "report of the correction",
    "schedule_report": "report of the schedule",
    "buffers": "change of the buffers",
    "code": "update",
}
_BLOCKWISE = ("schedule_report", "buffers")  # their blocks have different units


class Known(NamedTuple):
    """What a server knows about a client without its upload.

    Args:
        weight: its weight in the mean: of the task, or the first that it claimed.
        steps: its local steps in a round; 0 if its size is not known, and the weight is what it claimed.
    """

    weight: float
    steps: int = 0


class Bounded(NamedTuple):
    """The uploads of a cohort within bounds."""

    uploads: dict[int, Upload]  # those of refused clients included
    bounded: Mapping[int, str] = {}  # clients that were scaled down, with reasons
    refused: Mapping[int, str] = {}  # clients whose upload must not be used, with reasons
    medians: Mapping[str, float] = {}  # m of each part of an upload
    sizes: Mapping[int, float] = {}  # the influence of the update of each client
    heavy: frozenset[int] = frozenset()  # clients that were scaled down, and far above most others


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
    recent: Mapping[str, float] = {},
    known: Mapping[int, Known] = {},
    factor: Callable[[Upload], float] = lambda upload: 1.0,
) -> Bounded:
    """Scale down uploads far above the median of the cohort, or of the latest rounds.

    Args:
        uploads: the decoded uploads by client, in the order of the clients.
        limit: the largest influence, in units of the median; 0 for no bound.
        start: what is subtracted from uploaded weights to get the update; empty where clients upload updates.
        buffers: the buffers that clients trained from.
        recent: the median of each part in the latest rounds, as far as it is known.
        known: what is known about some of the clients.
        factor: what the update of an upload is multiplied by before it is averaged.
    """
    out = dict(uploads)
    if not limit:
        return Bounded(out)
    limit = max(limit, WIDE) if len(out) < FEW else limit
    why, refused, heavy = dict[int, list[str]](), dict[int, str](), set[int]()
    medians, sizes = dict[str, float](), dict[int, float]()

    def cut(client: int, size: float, most: float, usual: float, reason: str) -> float:
        """The factor of a size that is above `most`, where other clients have the `usual` one."""
        if size > HEAVY * usual > 0 and len(out) >= FEW:
            heavy.add(client)
        why.setdefault(client, []).append(reason)
        return most / size

    middle = medians["weight"] = reference([one.weight for one in out.values()], recent.get("weight", 0.0))
    for i, one in out.items():
        about = known.get(i, Known(math.inf))
        most = about.weight if about.steps else min(about.weight, limit * middle)
        if one.weight > most:
            share = cut(i, one.weight, most, about.weight, f"its weight is {one.weight:.6g} and counts as {most:.6g}")
            out[i] = one._replace(weight=one.weight * share)
    steps = [known.get(i, Known(0.0)).steps for i in out]
    usual = reference(steps)
    more = {i: max(1.0, its / usual) if usual else 1.0 for i, its in zip(out, steps, strict=True)}
    more |= {i: 1 / max(1.0, one.weight / middle) for (i, one), its in zip(out.items(), steps, strict=True) if not its}
    for part, words in _PARTS.items():
        if not all(getattr(one, part) for one in out.values()):
            continue
        first: Tree = getattr(next(iter(out.values())), part)
        origin = {"code": start, "buffers": buffers}.get(part, {})
        for unit in first if part in _BLOCKWISE else [""]:
            values: dict[int, Tree] = {i: _change(getattr(one, part), origin, unit) for i, one in out.items()}
            as_received = part == "code" and not origin
            got = {i: (one.norm if as_received else norm(values[i])) / more[i] for i, one in out.items()}
            key = part + unit
            if part == "code":
                key, got = f"code {len(first)}", {i: size * factor(out[i]) for i, size in got.items()}
            middle = medians[key] = _median([*got.values()], recent.get(key, 0.0), part == "code")
            sizes = got if part == "code" else sizes
            upper = sorted(got.values())[max(0, min((3 * len(got) - 1) // 4, len(got) - 2))]
            widest = limit * (1.0 if part == "code" else limit if part == "schedule_report" else WIDER)
            for i, size in got.items():
                if not widest * middle < size:
                    continue
                times = f"{size / middle:.3g} times as large as the median" if middle else "not 0, unlike the median"
                share = cut(i, size, widest * middle, upper, f"its {words} is {times}, and counts as {widest:g} times")
                if part == "code" and size > REFUSED * middle:
                    refused[i] = f"its {words} is {times}, more than of any honest client"
                changed: dict[str, Any] = {part: _with(getattr(out[i], part), origin, unit, values[i], share)}
                out[i] = out[i]._replace(**changed)
    reasons = {i: " and ".join(words) for i, words in why.items() if i not in refused}
    return Bounded(out, reasons, refused, medians, sizes, frozenset(heavy))


def _median(sizes: Sequence[float], recent: float, of_codes: bool) -> float:
    """`reference`; of updates that are mostly 0, that of the others, or infinite where there is one other at most."""
    middle = reference(sizes, recent)
    if middle or not of_codes:
        return middle
    others = [size for size in sizes if size]
    return reference(others) if len(others) > 1 else math.inf


def _change(tree: Tree, origin: Tree, unit: str) -> Tree:
    """The change of one block, or of all if it is ""."""
    tree = {unit: tree[unit]} if unit else tree
    return sub(tree, origin) if origin else tree


def _with(tree: Tree, origin: Tree, unit: str, change: Tree, share: float) -> Tree:
    """The tree with a share of that change."""
    part = scale(change, share)
    part = {name: (origin[name] + one).to(tree[name].dtype) for name, one in part.items()} if origin else part
    return {**tree, **part} if unit else part


ROUNDS = 10  # that are remembered
ENOUGH = 3  # rounds without which nothing is compared
FAR = 3.0  # times the median: a client that is asked about first if the next state is not fit
UNFIT = 3.0  # times the loss of the latest rounds


class Recent(NamedTuple):
    """Medians of the latest rounds by part of an upload, oldest first.

    Args:
        medians: by part.
        far: the clients far off in the newest round; if most of them are, those in the round before: then the state
            that all trained from is bad, and not they.
        good: the rounds done in the state that the round with these clients began from.
    """

    medians: Mapping[str, tuple[float, ...]] = {}
    far: tuple[int, ...] = ()
    good: int = 0

    def of(self, part: str) -> float:
        """The median of the latest rounds; 0 if there are too few.

        >>> Recent({"loss": (2.0, 1.0, 30.0)}).of("loss"), Recent({"loss": (2.0,)}).of("loss")
        (2.0, 0.0)
        """
        known = self.medians.get(part, ())
        return median(known) if len(known) >= ENOUGH else 0.0

    def sizes(self, lr: float) -> dict[str, float]:
        """The medians of all parts for clients with this learning rate; the loss is left out."""
        found = {part: self.of(part) * (lr if part[:4] == "code" else 1.0) for part in self.medians if part != "loss"}
        return {part: size for part, size in found.items() if size > 0}

    def after(self, medians: Mapping[str, float], lr: float, sizes: Mapping[int, float], done: int) -> Recent:
        """What is remembered after one more round.

        Args:
            medians: those of the round.
            lr: the learning rate of its clients.
            sizes: the influence of the update of each client.
            done: the rounds done before it.

        >>> recent = Recent().after({"code 4": 0.5, "loss": 2.0}, 0.1, {0: 1.0, 1: 1.2, 2: 9.0}, 6)
        >>> recent
        Recent(medians={'code 4': (5.0,), 'loss': (2.0,)}, far=(2,), good=6)
        >>> recent._replace(medians={"code 4": (5.0,) * 3}).after({"code 4": 30.0}, 1.0, {0: 30.0, 1: 40.0}, 7)[1:]
        ((2,), 6)
        """
        before = next((size for part, size in self.sizes(lr).items() if part in medians and part[:4] == "code"), 0.0)
        middle = reference([*sizes.values()]) if sizes else 0.0
        most = FAR * (min(middle, before) if before and middle else before or middle)
        far, good = tuple(client for client, size in sorted(sizes.items()) if size > most > 0), done
        if self.far and 2 * len(far) > len(sizes):
            far, good = self.far, self.good
        news = {part: size / lr if part[:4] == "code" and lr > 0 else size for part, size in medians.items()}
        kept = {
            part: (*self.medians.get(part, ()), size)[-ROUNDS:] for part, size in news.items() if math.isfinite(size)
        }
        return Recent({**self.medians, **kept}, far, good)

    def loss_is_unfit(self, loss: float) -> bool:
        """Whether a median loss is far beyond the median of the latest rounds, and beyond each of the last three.

        >>> recent = Recent({"loss": (2.5, 0.5, 0.4, 0.3)})
        >>> recent.loss_is_unfit(1.4), recent.loss_is_unfit(1.6)
        (False, True)
        """
        known = self.medians.get("loss", ())
        return len(known) >= ENOUGH and loss > UNFIT * max(self.of("loss"), *known[-ENOUGH:]) > 0
