"""Runs that differ by their seed only are one line of a report: its curve, its totals, what a target cost it.

    interval of the mean of n seeds = mean +- t(0.975, n - 1) * standard deviation / sqrt(n)

Curves are means over seeds, round by round, over the rounds that every seed has; a curve against bytes has the mean
bytes of those rounds. A target is reached in the first evaluated round that is at or above it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from thinwire.experiments.collapse import BROKEN
from thinwire.experiments.link_time import JOULES_PER_BYTE, energy, seconds_by_link
from thinwire.experiments.records import Record, Recorded, totals
from thinwire.experiments.toml import Table, dumps

# 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom
_T: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
WAYS = ("up", "down", "catchup")


class MeanInterval(NamedTuple):
    """A mean over seeds, their standard deviation, and half the width of its 95 % interval (None for one seed)."""

    mean: float
    std: float
    half: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanInterval | None:
        """Of the numbers that are there; None if there are none.

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
        t = _T[len(known) - 2] if len(known) - 2 < len(_T) else 1.96
        return cls(statistics.fmean(known), std, t * std / math.sqrt(len(known)))


class Point(NamedTuple):
    """One round of a line: bytes so far and a value, as means over seeds; the lowest and the highest seed."""

    round: int
    bytes: float
    value: float
    low: float
    high: float


class Reached(NamedTuple):
    """What a target cost; means over the seeds that reached it."""

    seeds: int
    rounds: MeanInterval
    bytes: MeanInterval  # honest: up, down and catch-up
    ideal: float  # without catch-up
    ways: dict[str, float]
    joules: float
    seconds: dict[str, float]  # by link
    spread: tuple[float, float]  # bytes of the seed that needed fewest, and of the one that needed most


class Line(NamedTuple):
    """Runs of one configuration, one a seed."""

    label: str
    runs: list[Recorded]

    @property
    def table(self) -> Table:
        """The settings that all of them share."""
        return without_seed(self.runs[0].table)

    @property
    def seeds(self) -> list[int]:
        """Their seeds."""
        return [run.table.get("seed", 0) for run in self.runs]

    @property
    def unfinished(self) -> bool:
        """Whether a run has fewer rounds than it was asked for and may go on."""
        return any(len(run.records) < run.rounds and run.verdict.status != "diverged" for run in self.runs)

    @property
    def broken(self) -> list[Recorded]:
        """Its runs that collapsed, diverged or are at chance."""
        return [run for run in self.runs if run.verdict.status in BROKEN]

    def total(self, key: str) -> MeanInterval | None:
        """One of the `totals` over seeds."""
        return MeanInterval.of(totals(run.records)[key] for run in self.runs)

    def curve(self, metric: str) -> list[Point]:
        """A metric by round, where every seed has it."""
        bytes_so_far = [
            list(itertools.accumulate(sum(r[f"bytes_{way}"] for way in WAYS) for r in run.records)) for run in self.runs
        ]
        points = []
        for i in range(min(len(run.records) for run in self.runs)):
            values = [run.records[i].get(metric) for run in self.runs]
            known = [value for value in values if value is not None and math.isfinite(value)]
            if len(known) == len(values):
                spent = statistics.fmean(so_far[i] for so_far in bytes_so_far)
                number = self.runs[0].records[i]["round"]
                points.append(Point(number, spent, statistics.fmean(known), min(known), max(known)))
        return points

    def reached(
        self, target: float, compute: float | None = None, joules_per_byte: float = JOULES_PER_BYTE
    ) -> Reached | None:
        """What it took to reach an accuracy; None if no seed did.

        Args:
            target: the accuracy, from 0 to 1.
            compute: seconds that a client trains in a round; by default the measured ones.
            joules_per_byte: of the energy model.
        """
        spent = [part for run in self.runs if (part := _until(run.records, target))]
        if not spent:
            return None
        sums = [totals(part) for part in spent]
        ways = {way: statistics.fmean(total[f"bytes_{way}"] for total in sums) for way in WAYS}
        honest, rounds = (
            MeanInterval.of(total["bytes_total"] for total in sums),
            MeanInterval.of(float(len(part)) for part in spent),
        )
        assert honest
        assert rounds
        times = [seconds_by_link(part, compute) for part in spent]
        return Reached(
            len(spent),
            rounds,
            honest,
            ways["up"] + ways["down"],
            ways,
            energy(honest.mean, joules_per_byte),
            {name: statistics.fmean(time[name] for time in times) for name in times[0]},
            (min(total["bytes_total"] for total in sums), max(total["bytes_total"] for total in sums)),
        )


def group(runs: Sequence[Recorded]) -> list[Line]:
    """One line for each configuration, in the order of first appearance, each with a label of its own."""
    groups: dict[str, dict[int, Recorded]] = {}
    for run in runs:
        by_seed = groups.setdefault(dumps(without_seed(run.table)), {})
        seed = run.table.get("seed", 0)
        if seed not in by_seed or len(by_seed[seed].records) < len(run.records):  # a copy counts once
            by_seed[seed] = run
    lines = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in groups.values()]
    return [Line(label, mine) for label, mine in zip(_labels(lines), lines, strict=True)]


def without_seed(table: Table) -> Table:
    """A configuration without what the runs of a line may differ in: their seed, and how bytes are added up."""
    return {key: value for key, value in table.items() if key not in ("seed", "accounting")}


def flat(table: Table) -> dict[str, Any]:
    """Every value by its dotted path.

    >>> flat({"rounds": 2, "method": {"up": {"kind": "raw"}}})
    {'rounds': 2, 'method.up.kind': 'raw'}
    """
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            out.update({f"{key}.{inner}": deep for inner, deep in flat(value).items()})
        else:
            out[key] = value
    return out


def differing(tables: Sequence[Table]) -> list[str]:
    """The dotted paths at which some tables are not all alike."""
    flats = [flat(table) for table in tables]
    paths = dict.fromkeys(path for values in flats for path in values)
    return [path for path in paths if any(values.get(path) != flats[0].get(path) for values in flats)]


def choose_targets(lines: Sequence[Line], yardstick: Line) -> list[float]:
    """Targets that tell lines apart: what every run reached, then 95 % and 99 % of the yardstick's best accuracy.

    Each is rounded down to half a percent; those that coincide, or that nobody reached, are left out.
    """
    best = [totals(run.records)["best_accuracy"] for line in lines for run in line.runs]
    known = [value for value in best if value is not None]
    top = yardstick.total("best_accuracy")
    if not known or top is None:
        return []
    wanted = [min(known), 0.95 * top.mean, 0.99 * top.mean]
    rounded = sorted({math.floor(200 * value) / 200 for value in wanted})
    return [target for target in rounded if 0 < target <= max(known)]


def yardstick(lines: Sequence[Line]) -> Line:
    """FedAvg, or else the first."""
    return next((line for line in lines if line.runs[0].name == "fedavg"), lines[0])


def _until(records: Sequence[Record], target: float) -> list[Record]:
    """The rounds up to the one that reaches a target; none if none does."""
    for i, record in enumerate(records):
        if record["accuracy"] is not None and record["accuracy"] >= target:
            return list(records[: i + 1])
    return []


def _labels(lines: Sequence[Sequence[Recorded]]) -> list[str]:
    """Names; where two lines have one name, what they differ in is added."""
    names = [runs[0].name for runs in lines]
    out = []
    for name, runs in zip(names, lines, strict=True):
        alike = [other[0].table for other, theirs in zip(lines, names, strict=True) if theirs == name]
        if len(alike) > 1:
            own, paths = flat(runs[0].table), differing([without_seed(table) for table in alike])
            marks = [f"{path.rsplit('.', 1)[-1]} {own[path]}" for path in paths if path in own]
            name = f"{name} ({', '.join(marks[:3])})" if marks else name
        out.append(name)
    seen: dict[str, int] = {}
    for i, label in enumerate(out):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            out[i] = f"{label} #{seen[label]}"
    return out
