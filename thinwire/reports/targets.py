"""The cost of reaching a target, and how many times fewer bytes a method needs than the baseline.

A target is reached in the first evaluated round from which on the objective stays as good or better, for each seed
separately; an accuracy may be lower by its noise. The baseline is the FedAvg setting with the best mean of the
objective, not the first one.

    noise           2 sqrt(a (1 - a) / n)      two standard errors of an accuracy a on n test examples
    factor          mean bytes of the baseline / mean bytes of the method
    error           d = log(bytes of the baseline / bytes of the method) for each shared seed;   std(d) / sqrt(n)
    95 % interval   factor * exp(-t * error) to factor * exp(t * error)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes
from thinwire.metrics.objective import Objective, metric_value
from thinwire.reports.rows import (
    ACCURACY,
    MeanInterval,
    Row,
    evaluations,
    number_text,
    objective_name,
    percent_text,
)
from thinwire.runs.link_time import seconds
from thinwire.runs.records import totals

SLOW = "2 Mbps"


class TargetCost(NamedTuple):
    """The cost of reaching a target, by seed: the `totals` until then, `rounds`, and `seconds` over `SLOW` links."""

    by_seed: dict[int, dict[str, Any]]

    def mean(self, key: str) -> float:
        """A mean over the seeds that reached it."""
        return statistics.fmean(one[key] for one in self.by_seed.values())

    @property
    def sent(self) -> dict[int, int]:
        """All bytes by seed: up, down, catch-up and abandoned rounds."""
        return {seed: one["bytes_total"] for seed, one in self.by_seed.items()}


Costs = dict[float, list[TargetCost | None]]  # by target, for each row


def cost_to_reach(row: Row, target: float) -> TargetCost | None:
    """The cost of reaching a target; None if no seed reached it.

    Args:
        row: the runs.
        target: a value of the objective; an accuracy from 0 to 1.
    """
    found, bar = {}, target - noise(row, target)
    for seed, run in zip(row.seeds, row.runs, strict=True):
        first = 0
        for i, record in enumerate(run.records, 1):
            value = metric_value(record, row.objective.key)
            if value is not None:
                first = 0 if row.objective.better(bar, value) else first or i
        if until := run.records[:first]:
            found[seed] = {**totals(until), "rounds": first, "seconds": seconds(until, SLOW)}
    return TargetCost(found) if found else None


def noise(row: Row, value: float) -> float:
    """Two standard errors of an accuracy on the test examples of a row; 0 for other objectives."""
    examples = metric_value(row.runs[0].environment, "test_examples")
    return 2 * math.sqrt(abs(value * (1 - value) / examples)) if examples and row.objective == ACCURACY else 0.0


def saving(theirs: Mapping[int, float], ours: Mapping[int, float]) -> tuple[float, str]:
    """How many times fewer bytes a method needs than the baseline, from the bytes of each by seed, and the interval.

    >>> saving({0: 400.0, 1: 500.0}, {0: 100.0, 1: 125.0})
    (4.0, '95 % interval over 2 shared seeds: 4 to 4 times')
    >>> saving({0: 400.0, 1: 100.0}, {0: 100.0, 1: 100.0})
    (2.5, '95 % interval over 2 shared seeds: 0.000374 to 1.67e+04 times, which includes 1')
    """
    factor = statistics.fmean(theirs.values()) / statistics.fmean(ours.values())
    apart = MeanInterval.of(math.log(theirs[seed] / ours[seed]) for seed in theirs if seed in ours)
    if apart is None or apart.half is None:
        return factor, "no interval, because they share fewer than two seeds"
    low, high = factor * math.exp(-apart.half), factor * math.exp(min(apart.half, 600.0))
    shared, one = len(theirs.keys() & ours.keys()), ", which includes 1" if low <= 1 <= high else ""
    return factor, f"95 % interval over {shared} shared seeds: {low:.3g} to {high:.3g} times{one}"


def target_text(objective: Objective, target: float) -> str:
    """A target in a sentence.

    >>> target_text(ACCURACY, 0.9), target_text(Objective("loss", False), 2912.0)
    ('90 %', 'test loss 2,912')
    """
    return percent_text(target) if objective == ACCURACY else f"{objective_name(objective)} {number_text(target)}"


def choose_targets(rows: Sequence[Row], baseline: Row) -> list[float]:
    """Targets that separate rows: what every run kept that did not fail, and two values near the baseline's last.

    These are 95 % and 99 % of the way to it, from 0 for accuracy and from the baseline's first value for others.
    Targets are rounded to the worse side, to three digits of that way. Duplicates and targets that no run reached are
    left out.
    """
    sign = 1 if baseline.objective.higher_is_better else -1
    pairs = [(row, run) for row in rows for run in row.runs]
    sound = [(row, run) for row, run in pairs if run not in row.broken] or pairs
    known = [sign * own[-1] for row, run in sound if (own := evaluations(run, row.objective.key))]
    first = [own[0] for run in baseline.runs if (own := evaluations(run, baseline.objective.key))]
    if not known or baseline.final is None:
        return []
    top = baseline.final.mean
    way = top if baseline.objective == ACCURACY else top - statistics.fmean(first)
    step = 10.0 ** math.floor(math.log10(abs(way)) - 2) if way else 1e-9
    wanted = [min(known), *(sign * (top - part * way) for part in (0.05, 0.01))]
    rounded = sorted({round(math.floor(one / step + 1e-9) * step, 12) for one in wanted})
    return [sign * one for one in rounded if one <= max(known) and one]


def headline(rows: Sequence[Row], baseline: Row, costs: Costs) -> str:
    """Who reaches the best target that the baseline and another reach with the fewest bytes; empty without one.

    Never the method that ends worst, by more than the noise below the best.
    """
    ends = [(row.final.mean, row.label) for row in rows if row.final and not row.broken]
    ends.sort(reverse=not baseline.objective.higher_is_better)
    worst = {name for end, name in ends if end == ends[0][0] and abs(ends[-1][0] - end) > noise(baseline, end)}
    for target in sorted(costs, reverse=baseline.objective.higher_is_better):
        able = {  # a collapsed run lost what it had reached
            row.label: cost.sent
            for row, cost in zip(rows, costs[target], strict=True)
            if cost and len(cost.by_seed) == len(row.runs) and not row.broken and all(cost.sent.values())
        }
        if baseline.label in able and len(able) > 1:
            means = {label: statistics.fmean(sent.values()) for label, sent in able.items()}
            best, goal = min(means, key=means.__getitem__), target_text(baseline.objective, target)
            if best in worst:
                continue
            start = f"Fewest bytes to reach {goal}: {best}, {human_bytes(means[best])} in total"
            if best == baseline.label:
                return f"{start}."
            factor, interval = saving(able[baseline.label], able[best])
            theirs = f"{baseline.label} ({human_bytes(means[baseline.label])}; {interval})"
            return f"{start}, {factor:.3g} times fewer than {theirs}."
    return ""
