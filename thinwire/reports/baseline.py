"""The baseline of a comparison, FedAvg with its best settings, and how many times fewer bytes a method needs.

    factor          mean bytes of the baseline / mean bytes of the method
    error           d = a / mean(a) - b / mean(b) for each shared seed;   std(d) / sqrt(n)
    95 % interval   factor * exp(-t * error) to factor * exp(t * error)

The baseline is the FedAvg setting with the best mean of the objective, not the first one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.core.text import human_bytes
from thinwire.reports.seed_groups import ACCURACY, MeanInterval, SeedGroup, TargetCost, target_text
from thinwire.runs.search_record import read_search

METHOD = "fedavg"
Costs = dict[float, list[TargetCost | None]]  # by target, for each group


class Saving(NamedTuple):
    """How many times fewer bytes, its 95 % interval, and the number of seeds that both have (no interval below 2)."""

    factor: float
    interval: tuple[float, float] | None
    shared: int

    @classmethod
    def of(cls, theirs: Mapping[int, float], ours: Mapping[int, float]) -> Saving | None:
        """From the bytes by seed of the baseline and of a method.

        >>> Saving.of({0: 400.0}, {0: 100.0})
        Saving(factor=4.0, interval=None, shared=1)
        >>> found = Saving.of({0: 400.0, 1: 500.0}, {0: 100.0, 1: 125.0, 2: 900.0})
        >>> found.factor, found.shared, [round(end, 6) for end in found.interval]
        (4.0, 2, [4.0, 4.0])
        >>> Saving.of({}, {0: 1.0})
        """
        both = [seed for seed in theirs if seed in ours]
        paired = len(both) > 1
        a = [theirs[seed] for seed in both] if paired else list(theirs.values())
        b = [ours[seed] for seed in both] if paired else list(ours.values())
        if not a or not b or min(*a, *b) <= 0:
            return None
        mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
        factor = mean_a / mean_b
        apart = MeanInterval.of(one / mean_a - other / mean_b for one, other in zip(a, b, strict=False))
        if not paired or apart is None or apart.half is None:
            return cls(factor, None, len(both))
        half = min(apart.half, 600.0)  # exp of more is not a number
        return cls(factor, (factor * math.exp(-half), factor * math.exp(half)), len(both))

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


def baseline_of(groups: Sequence[SeedGroup]) -> SeedGroup:
    """FedAvg with the best mean of the objective, of groups that failed only if all did; else the first group."""
    found = [group for group in groups if group.runs[0].name == METHOD]
    return max(found, key=_rank) if found else groups[0]


def _rank(group: SeedGroup) -> tuple[bool, float]:
    sign = 1 if group.objective.higher_is_better else -1
    return not group.failed, sign * group.best.mean if group.best else -math.inf


def untuned(groups: Sequence[SeedGroup], baseline: SeedGroup) -> str:
    """One sentence if FedAvg has one setting only and no record of a search; else empty."""
    found = [group for group in groups if group.runs[0].name == METHOD]
    if len(groups) < 2 or len(found) != 1 or any(read_search(run.path) for run in baseline.runs):
        return ""
    return f"{baseline.label} ran with one setting only and without a search, so a tuned {METHOD} may need fewer bytes."


def choose_targets(groups: Sequence[SeedGroup], baseline: SeedGroup) -> list[float]:
    """Targets that separate groups: what every run reached that did not fail, and two values near the baseline's best.

    These are 95 % and 99 % of the way to it, from 0 for accuracy and from the baseline's first value for others (at
    most ten times as far away as its median value). Targets are rounded to the worse side, to half a percent or a
    hundredth of that way. Duplicates and targets that no run reached are left out.
    """
    sound = [(group, run) for group in groups for run in group.runs if run not in group.failed]
    pairs = sound or [(group, run) for group in groups for run in group.runs]
    known = [value for group, run in pairs if (value := group.best_of(run)) is not None]
    top, objective = baseline.best, baseline.objective
    if not known or top is None:
        return []
    sign = 1 if objective.higher_is_better else -1
    way, step = top.mean, 0.005
    if objective != ACCURACY:
        values = [found for run in baseline.runs if (found := baseline.values(run))]
        ways = [(top.mean - own[0], 10 * abs(top.mean - statistics.median(own))) for own in values]
        way = statistics.fmean(math.copysign(min(abs(first), most) or abs(first), first) for first, most in ways)
        step = 10.0 ** math.floor(math.log10(abs(way)) - 2) if way else 0.0
    wanted = [sign * min(sign * value for value in known), top.mean - 0.05 * way, top.mean - 0.01 * way]
    rounded = {round(sign * math.floor(sign * one / step + 1e-9) * step, 12) if step else one for one in wanted}
    best = max(sign * value for value in known)
    ordered = sorted(rounded, key=lambda value: sign * value)
    return [one for one in ordered if sign * one <= best and (objective != ACCURACY or one > 0)]


def headline(groups: Sequence[SeedGroup], baseline: SeedGroup, costs: Costs) -> str:
    """Who reaches the best target that the baseline and another reach with the fewest bytes; empty without one."""
    for target in sorted(costs, reverse=baseline.objective.higher_is_better):
        theirs = costs[target][groups.index(baseline)]
        able = [
            (cost.bytes.mean, group)
            for group, cost in zip(groups, costs[target], strict=True)
            if cost and cost.seeds == len(group.runs) and not group.failed  # a collapsed run lost what it had reached
        ]
        if theirs is None or len(able) < 2:
            continue
        least, best = min(able, key=lambda pair: pair[0])
        goal = target_text(baseline.objective, target)
        start = f"Fewest bytes to reach {goal}: {best.label}, {human_bytes(least)} in total"
        saving = Saving.of(baseline.bytes_by_seed(target), best.bytes_by_seed(target))
        if best is baseline or saving is None:
            return f"{start}."
        total = human_bytes(theirs.bytes.mean)
        factor = f"{saving.factor:.3g} times fewer than" if f"{saving.factor:.3g}" != "1" else "as many as"
        return f"{start}, {factor} {baseline.label} ({total}; {saving.text})."
    return ""
