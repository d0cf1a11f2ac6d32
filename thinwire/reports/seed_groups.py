"""Runs that differ only in their seed form a group: its curves, its totals, and its cost to reach a target.

    95 % interval of the mean of n seeds = mean +- t(0.975, n - 1) * standard deviation / sqrt(n)

Curves are means over seeds by round, over the rounds that every seed has; a curve against bytes uses the mean bytes of
these rounds. A target is reached in the first evaluated round whose objective is as good or better.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from thinwire.experiments.collapse import BROKEN
from thinwire.experiments.link_time import JOULES_PER_BYTE, energy, seconds_by_link
from thinwire.experiments.records import Record, Recorded, honest_bytes, totals
from thinwire.experiments.toml import Table as TomlTable
from thinwire.experiments.toml import dumps
from thinwire.metrics.objective import Objective
from thinwire.reports.evaluation import (
    final_clients_eval,
    final_metrics,
    metric_names,
    metric_value,
    without_accuracy,
)
from thinwire.reports.objectives import ACCURACY, objective_key, objectives
from thinwire.reports.settings import unique_labels, without_seed

# 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom
_T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
DIRECTIONS = ("up", "down", "catchup")


class MeanInterval(NamedTuple):
    """A mean over seeds, their standard deviation, and half the width of the 95 % interval (None for one seed)."""

    mean: float
    std: float
    half: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanInterval | None:
        """Of the values that are not None; None if there are none.

        >>> mean, std, half = MeanInterval.of([1.0, 2.0, None, 3.0])
        >>> mean, std, round(half, 3)
        (2.0, 1.0, 2.484)
        >>> MeanInterval.of([0.5]), MeanInterval.of([])
        (MeanInterval(mean=0.5, std=0.0, half=None), None)
        """
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return cls(known[0], 0.0, None) if known else None
        std = statistics.stdev(known)
        return cls(statistics.fmean(known), std, student_t(len(known) - 1) * std / math.sqrt(len(known)))


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t.

    >>> student_t(1), student_t(1000)
    (12.706, 1.96)
    """
    return _T[freedom - 1] if freedom <= len(_T) else 1.96


class Point(NamedTuple):
    """One round of a curve: mean bytes so far, mean value, and the values of the lowest and the highest seed."""

    round: int
    bytes: float
    value: float
    low: float
    high: float


class TargetCost(NamedTuple):
    """The cost of reaching a target; means over the seeds that reached it."""

    seeds: int
    rounds: MeanInterval
    bytes: MeanInterval  # honest: up, down, catch-up and abandoned rounds
    ideal: float  # without catch-up
    by_direction: dict[str, float]
    joules: float
    seconds: dict[str, float]  # by link
    spread: tuple[float, float]  # bytes of the seed that needed the fewest, and of the one that needed the most


class SeedGroup(NamedTuple):
    """Runs of one configuration, one per seed."""

    label: str
    runs: list[Recorded]
    objective: Objective = ACCURACY

    @property
    def config(self) -> TomlTable:
        """The settings that all its runs share."""
        return without_seed(self.runs[0].table)

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.runs[0].task

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.table.get("seed", 0) for run in self.runs]

    @property
    def unfinished(self) -> bool:
        """Whether a run that has not diverged has fewer rounds than configured."""
        return any(len(run.records) < run.rounds and run.verdict.status != "diverged" for run in self.runs)

    @property
    def failed(self) -> list[Recorded]:
        """Its runs that diverged, collapsed or are at chance."""
        return [run for run in self.runs if run.verdict.status in BROKEN]

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that its runs recorded, apart from accuracy."""
        return list(dict.fromkeys(name for run in self.runs for name in metric_names(run.records)))

    @property
    def best(self) -> MeanInterval | None:
        """The best value of its objective in each run, over seeds."""
        return MeanInterval.of(self.best_of(run) for run in self.runs)

    @property
    def final(self) -> MeanInterval | None:
        """The last value of its objective in each run, over seeds."""
        return MeanInterval.of(next(iter(self.values(run)[::-1]), None) for run in self.runs)

    def values(self, run: Recorded) -> list[float]:
        """The values of its objective in the evaluated rounds of a run."""
        found = (metric_value(record, objective_key(self.objective)) for record in run.records)
        return [value for value in found if value is not None]

    def best_of(self, run: Recorded) -> float | None:
        """The best value of its objective in a run; None if it has none."""
        return (max if self.objective.higher_is_better else min)(self.values(run), default=None)

    def until(self, run: Recorded, target: float) -> list[Record]:
        """The rounds of a run up to the first that reaches a target; empty if none does."""
        for i, record in enumerate(run.records):
            value = metric_value(record, objective_key(self.objective))
            if value is not None and not self.objective.better(target, value):
                return run.records[: i + 1]
        return []

    def bytes_by_seed(self, target: float | None) -> dict[int, float]:
        """Bytes to a target by seed, for the seeds that reached it; with None the bytes of all rounds."""
        if target is None:
            return {seed: run.totals["bytes_total"] for seed, run in zip(self.seeds, self.runs, strict=True)}
        parts = {seed: self.until(run, target) for seed, run in zip(self.seeds, self.runs, strict=True)}
        return {seed: totals(part)["bytes_total"] for seed, part in parts.items() if part}

    def total(self, key: str) -> MeanInterval | None:
        """One of the `totals` of a run, over seeds."""
        return MeanInterval.of(run.totals[key] for run in self.runs)

    def final_metric(self, name: str) -> MeanInterval | None:
        """The final value of a metric, over seeds."""
        return MeanInterval.of(without_accuracy(final_metrics(run.records)).get(name) for run in self.runs)

    def final_client_quantile(self, name: str) -> MeanInterval | None:
        """A key of `clients_eval` in the last round that has it, over seeds."""
        return MeanInterval.of(final_clients_eval(run.records).get(name) for run in self.runs)

    def curve(self, metric: str) -> list[Point]:
        """A metric (see `metric_value`) by round, where every seed has it."""
        bytes_so_far = [list(itertools.accumulate(map(honest_bytes, run.records))) for run in self.runs]
        points = []
        for i in range(min(len(run.records) for run in self.runs)):
            values = [metric_value(run.records[i], metric) for run in self.runs]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                sent = statistics.fmean(so_far[i] for so_far in bytes_so_far)
                number = self.runs[0].records[i]["round"]
                points.append(Point(number, sent, statistics.fmean(known), min(known), max(known)))
        return points

    def cost_to_reach(
        self, target: float, compute: float | None = None, joules_per_byte: float = JOULES_PER_BYTE
    ) -> TargetCost | None:
        """The cost of reaching a target; None if no seed reached it.

        Args:
            target: a value of the objective; an accuracy from 0 to 1.
            compute: training seconds of a client per round; as measured by default.
            joules_per_byte: of the energy model.
        """
        spent = [part for run in self.runs if (part := self.until(run, target))]
        if not spent:
            return None
        sums = [totals(part) for part in spent]
        by_direction = {way: statistics.fmean(total[f"bytes_{way}"] for total in sums) for way in DIRECTIONS}
        honest = MeanInterval.of(total["bytes_total"] for total in sums)
        rounds = MeanInterval.of(float(len(part)) for part in spent)
        assert honest
        assert rounds
        times = [seconds_by_link(part, compute) for part in spent]
        return TargetCost(
            len(spent),
            rounds,
            honest,
            by_direction["up"] + by_direction["down"],
            by_direction,
            energy(honest.mean, joules_per_byte),
            {name: statistics.fmean(time[name] for time in times) for name in times[0]},
            (min(total["bytes_total"] for total in sums), max(total["bytes_total"] for total in sums)),
        )


def group(runs: Sequence[Recorded]) -> list[SeedGroup]:
    """One group per configuration, in order of first appearance, with unique labels."""
    by_config: dict[str, dict[int, Recorded]] = {}
    for run in runs:
        by_seed = by_config.setdefault(dumps(without_seed(run.table)), {})
        seed = run.table.get("seed", 0)
        if seed not in by_seed or len(by_seed[seed].records) < len(run.records):  # a copy of a run counts once
            by_seed[seed] = run
    groups = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in by_config.values()]
    labels = unique_labels([members[0].name for members in groups], [members[0].table for members in groups])
    ranked = objectives([next((run for run in members if run.summary), members[0]) for members in groups])
    return [SeedGroup(*parts) for parts in zip(labels, groups, ranked, strict=True)]
