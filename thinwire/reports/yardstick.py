"""The yardstick of a comparison, FedAvg with its best settings, and how many times fewer bytes a method needs.

    factor            mean bytes of the yardstick / mean bytes of the method
    shared seeds      d = a / mean(a) - b / mean(b), seed by seed;   error = std(d) / sqrt(n)
    other seeds       error = sqrt(var(a) / n / mean(a)^2 + var(b) / m / mean(b)^2), Welch's degrees of freedom
    95 % interval     factor * exp(-t * error) to factor * exp(t * error)

The yardstick is the FedAvg setting with the best mean of the objective, not the first one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.experiments.search_record import read_search
from thinwire.reports.seed_groups import SeedGroup, student_t

METHOD = "fedavg"


class Saving(NamedTuple):
    """How many times fewer bytes, its 95 % interval (None for one seed), and the number of seeds that both have."""

    factor: float
    interval: tuple[float, float] | None
    shared: int  # 0 if the seeds are not paired

    @classmethod
    def of(cls, theirs: Mapping[int, float], ours: Mapping[int, float]) -> Saving | None:
        """From the bytes by seed of the yardstick and of a method.

        >>> Saving.of({0: 400.0}, {0: 100.0})
        Saving(factor=4.0, interval=None, shared=0)
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
        if paired:
            apart = [one / mean_a - other / mean_b for one, other in zip(a, b, strict=True)]
            half = student_t(len(both) - 1) * statistics.stdev(apart) / math.sqrt(len(both))
        elif min(len(a), len(b)) > 1:
            half = _unpaired([one / mean_a for one in a], [one / mean_b for one in b])
        else:
            return cls(factor, None, 0)
        half = min(half, 600.0)  # exp of more is not a number
        return cls(factor, (factor * math.exp(-half), factor * math.exp(half)), len(both) if paired else 0)

    @property
    def text(self) -> str:
        """The interval in words.

        >>> Saving(4.0, (0.5, 32.0), 2).text
        '95 % interval over 2 shared seeds: 0.5 to 32 times, which includes 1'
        """
        if self.interval is None:
            return "no interval, because one of them has one seed"
        over = f"{self.shared} shared seeds" if self.shared else "seeds that are not shared"
        low, high = self.interval
        one = ", which includes 1" if low <= 1 <= high else ""
        return f"95 % interval over {over}: {low:.3g} to {high:.3g} times{one}"


def _unpaired(a: Sequence[float], b: Sequence[float]) -> float:
    """Half the width of the interval of the difference of two means, by Welch."""
    errors = [statistics.variance(values) / len(values) for values in (a, b)]
    if not sum(errors):
        return 0.0
    freedom = sum(errors) ** 2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, (a, b), strict=True))
    return student_t(max(1, int(freedom))) * math.sqrt(sum(errors))


def yardsticks(groups: Sequence[SeedGroup]) -> list[SeedGroup]:
    """The groups of FedAvg."""
    return [group for group in groups if group.runs[0].name == METHOD]


def best_group(groups: Sequence[SeedGroup]) -> SeedGroup:
    """The group with the best mean of the objective; of groups that failed only if all did, and the first of equals."""
    best = groups[0]
    for group in groups[1:]:
        if _rank(group) > _rank(best):
            best = group
    return best


def baseline_of(groups: Sequence[SeedGroup]) -> SeedGroup:
    """FedAvg with its best settings, or else the first group."""
    return best_group(found) if (found := yardsticks(groups)) else groups[0]


def _rank(group: SeedGroup) -> tuple[bool, float]:
    sign = 1 if group.objective.higher_is_better else -1
    return not group.failed, sign * group.best.mean if group.best else -math.inf


def untuned(groups: Sequence[SeedGroup], baseline: SeedGroup) -> str:
    """One sentence if FedAvg has one setting only and no record of a search; else empty."""
    found = yardsticks(groups)
    if len(groups) < 2 or len(found) != 1 or any(read_search(run.path) for run in baseline.runs):
        return ""
    return f"{baseline.label} ran with one setting only and without a search, so a tuned {METHOD} may need fewer bytes."
