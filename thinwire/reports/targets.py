"""The cost of reaching a target, and how many times fewer bytes a method needs than the baseline.

A target is reached in the first evaluated round whose objective is as good or better, for each seed separately. The
baseline is the FedAvg setting with the best mean of the objective, not the first one.

    factor          mean bytes of the baseline / mean bytes of the method
    error           d = a / mean(a) - b / mean(b) for each shared seed;   std(d) / sqrt(n)
    95 % interval   factor * exp(-t * error) to factor * exp(t * error)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.core.text import human_bytes
from thinwire.metrics.objective import Objective
from thinwire.reports.rows import (
    ACCURACY,
    MeanInterval,
    Row,
    metric_value,
    number_text,
    objective_key,
    objective_name,
    percent_text,
)
from thinwire.runs.link_time import seconds
from thinwire.runs.records import Record, SavedRun, totals

SLOW = "2 Mbps"


class TargetCost(NamedTuple):
    """The cost of reaching a target; means over the seeds that reached it."""

    by_seed: dict[int, int]  # all bytes until then: up, down, catch-up and abandoned rounds
    by_direction: tuple[float, ...]  # up, down, catch-up
    rounds: float
    seconds: float  # over `SLOW` links

    @property
    def bytes(self) -> float:
        """All bytes."""
        return statistics.fmean(self.by_seed.values())


Costs = dict[float, list[TargetCost | None]]  # by target, for each row


def cost_to_reach(row: Row, target: float, compute: float | None = None) -> TargetCost | None:
    """The cost of reaching a target; None if no seed reached it.

    Args:
        row: the runs.
        target: a value of the objective; an accuracy from 0 to 1.
        compute: training seconds of a client per round; as measured by default.
    """

    def until(run: SavedRun) -> list[Record]:
        for i, record in enumerate(run.records):
            value = metric_value(record, objective_key(row.objective))
            if value is not None and not row.objective.better(target, value):
                return run.records[: i + 1]
        return []

    spent = {seed: part for seed, run in zip(row.seeds, row.runs, strict=True) if (part := until(run))}
    if not spent:
        return None
    sums = [totals(part) for part in spent.values()]
    ways = tuple(statistics.fmean(one[f"bytes_{way}"] for one in sums) for way in ("up", "down", "catchup"))
    time = statistics.fmean(seconds(part, SLOW, compute) for part in spent.values())
    by_seed = {seed: one["bytes_total"] for seed, one in zip(spent, sums, strict=True)}
    return TargetCost(by_seed, ways, statistics.fmean(map(len, spent.values())), time)


class Saving(NamedTuple):
    """How many times fewer bytes, its 95 % interval, and the number of seeds that both have (no interval below 2)."""

    factor: float
    interval: tuple[float, float] | None
    shared: int

    @classmethod
    def of(cls, theirs: Mapping[int, float], ours: Mapping[int, float]) -> Saving | None:
        """From the bytes by seed of the baseline and of a method; over the seeds of both, if there are two.

        >>> Saving.of({0: 400.0}, {0: 100.0})
        Saving(factor=4.0, interval=None, shared=1)
        >>> found = Saving.of({0: 400.0, 1: 500.0}, {0: 100.0, 1: 125.0, 2: 900.0})
        >>> found.factor, found.shared, [round(end, 6) for end in found.interval]
        (4.0, 2, [4.0, 4.0])
        >>> Saving.of({}, {0: 1.0})
        """
        both = [seed for seed in theirs if seed in ours]
        a, b = ([own[seed] for seed in (both if len(both) > 1 else own)] for own in (theirs, ours))
        if not a or not b or min(*a, *b) <= 0:
            return None
        mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
        factor, interval = mean_a / mean_b, None
        if len(both) > 1 and (apart := MeanInterval.of(x / mean_a - y / mean_b for x, y in zip(a, b, strict=True))):
            half = min(apart.half or 0.0, 600.0)  # exp of more is not a number
            interval = (factor * math.exp(-half), factor * math.exp(half))
        return cls(factor, interval, len(both))

    @property
    def text(self) -> str:
        """The interval in words.

        >>> Saving(4.0, (0.5, 32.0), 2).text
        '95 % interval over 2 shared seeds: 0.5 to 32 times, which includes 1'
        """
        if self.interval is None:
            return "no interval, because they share fewer than two seeds"
        low, high = self.interval
        one = ", which includes 1" if low <= 1 <= high else ""
        return f"95 % interval over {self.shared} shared seeds: {low:.3g} to {high:.3g} times{one}"


def target_text(objective: Objective, target: float) -> str:
    """A target in a sentence.

    >>> target_text(ACCURACY, 0.9), target_text(Objective("loss", False), 2912.0)
    ('90 %', 'test loss 2,912')
    """
    return percent_text(target) if objective == ACCURACY else f"{objective_name(objective)} {number_text(target)}"


def choose_targets(rows: Sequence[Row], baseline: Row) -> list[float]:
    """Targets that separate rows: what every run reached that did not fail, and two values near the baseline's best.

    These are 95 % and 99 % of the way to it, from 0 for accuracy and from the baseline's first value for others.
    Targets are rounded to the worse side, to half a percent or a hundredth of that way. Duplicates and targets that no
    run reached are left out.
    """
    pairs = [(row, run) for row in rows for run in row.runs]
    sound = [(row, run) for row, run in pairs if run not in row.broken] or pairs
    known = [value for row, run in sound if (value := row.best_of(run)) is not None]
    top, objective = baseline.best, baseline.objective
    if not known or top is None:
        return []
    sign = 1 if objective.higher_is_better else -1
    way, step = top.mean, 0.005
    if objective != ACCURACY:
        way -= statistics.fmean(own[0] for run in baseline.runs if (own := baseline.evaluations(run)))
        step = 10.0 ** math.floor(math.log10(abs(way)) - 2) if way else 1e-9
    best, worst = max(sign * value for value in known), min(sign * value for value in known)
    wanted = [worst, *(sign * (top.mean - part * way) for part in (0.05, 0.01))]
    rounded = sorted({round(math.floor(one / step + 1e-9) * step, 12) for one in wanted})
    return [sign * one for one in rounded if one <= best and (objective != ACCURACY or one > 0)]


def headline(rows: Sequence[Row], baseline: Row, costs: Costs) -> str:
    """Who reaches the best target that the baseline and another reach with the fewest bytes; empty without one."""
    for target in sorted(costs, reverse=baseline.objective.higher_is_better):
        pairs = list(zip(rows, costs[target], strict=True))
        theirs = next(cost for row, cost in pairs if row is baseline)
        able = [  # a collapsed run lost what it had reached
            (cost, row) for row, cost in pairs if cost and len(cost.by_seed) == len(row.runs) and not row.broken
        ]
        if theirs is None or len(able) < 2:
            continue
        least, best = min(able, key=lambda pair: pair[0].bytes)
        goal = target_text(baseline.objective, target)
        start = f"Fewest bytes to reach {goal}: {best.label}, {human_bytes(least.bytes)} in total"
        saving = Saving.of(theirs.by_seed, least.by_seed)
        if best is baseline or saving is None:
            return f"{start}."
        factor = f"{saving.factor:.3g} times fewer than" if f"{saving.factor:.3g}" != "1" else "as many as"
        return f"{start}, {factor} {baseline.label} ({human_bytes(theirs.bytes)}; {saving.text})."
    return ""
