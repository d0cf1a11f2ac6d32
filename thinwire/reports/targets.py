"""Targets of a comparison: values of the objective whose cost is compared, chosen from the runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from thinwire.reports.objectives import ACCURACY
from thinwire.reports.seed_groups import SeedGroup, TargetCost

Costs = dict[float, list[TargetCost | None]]  # by target, for each group


def choose_targets(groups: Sequence[SeedGroup], baseline: SeedGroup) -> list[float]:
    """Targets that separate groups: what every run reached that did not fail, and two values near the baseline's best.

    Of an accuracy these are 95 % and 99 % of it, rounded down to half a percent. Of another objective they are 95 % and
    99 % of the way there from the baseline's first value (at most ten times as far away as its median value), rounded
    to the worse side to a hundredth of that way. Duplicates and targets that no run reached are left out.
    """
    sound = [(group, run) for group in groups for run in group.runs if run not in group.failed]
    pairs = sound or [(group, run) for group in groups for run in group.runs]
    known = [value for group, run in pairs if (value := group.best_of(run)) is not None]
    top, objective = baseline.best, baseline.objective
    if not known or top is None:
        return []
    if objective == ACCURACY:
        wanted = [min(known), 0.95 * top.mean, 0.99 * top.mean]
        rounded = sorted({math.floor(200 * value) / 200 for value in wanted})
        return [target for target in rounded if 0 < target <= max(known)]
    sign = 1 if objective.higher_is_better else -1
    way = _way(baseline, top.mean)
    wanted = [sign * min(sign * value for value in known), *(top.mean - share * way for share in (0.05, 0.01))]
    step = 10.0 ** math.floor(math.log10(abs(way)) - 2) if way else 0.0
    rounded = sorted({_toward_worse(value, step, sign) for value in wanted}, key=lambda value: sign * value)
    return [target for target in rounded if any(sign * value >= sign * target for value in known)]


def _way(group: SeedGroup, best: float) -> float:
    """From the first value of a group to its best, over seeds; a start far off counts at most ten times the median."""
    ways = []
    for run in group.runs:
        if values := group.values(run):
            first, middle = best - values[0], best - statistics.median(values)
            ways.append(math.copysign(min(abs(first), 10 * abs(middle)) or abs(first), first))
    return statistics.fmean(ways) if ways else 0.0


def _toward_worse(value: float, step: float, sign: int) -> float:
    return round(sign * math.floor(sign * value / step + 1e-9) * step, 12) if step else value
