"""Recommend a method for a target accuracy or a budget of bytes, from runs or from a short pilot.

Runs that are there are used as they are: a target is reached where the mean of the last evaluations first is as high,
on every seed. A pilot trains each method for n / 2 and for n rounds, each with a whole learning-rate schedule, and
extrapolates its error by a power law:

    error(N) = error(n) (n / N)^c,    c = log2(error(n / 2) / error(n)), at least 0 and at most 1

Bytes grow with the rounds. Nothing is extrapolated beyond the rounds that are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.experiments.records import find_runs, read_run
from thinwire.experiments.toml import Table
from thinwire.reports.frontier import Row, SeedCurve, curve_of, read_rows
from thinwire.reports.seed_groups import group

_FREE = ("scale", "augment")  # settings of a task that are part of the training, not of the data


class Wish(NamedTuple):
    """What is wanted: an accuracy, or the best one within a budget of bytes; within so many rounds."""

    target: float | None
    budget: int | None
    rounds: int


class Estimate(NamedTuple):
    """What a method is expected to do.

    Args:
        row: the method and its runs.
        accuracy: the expected accuracy.
        bytes: the expected bytes, and those of the cheapest and of the dearest seed.
        rounds: the rounds that it takes.
        measured: whether runs did it; otherwise it is extrapolated.
        run_rounds: the rounds to configure: those of the schedule with which it was measured.
    """

    row: Row
    accuracy: float
    bytes: float
    spread: tuple[float, float]
    rounds: int
    measured: bool
    run_rounds: int

    def plain(self) -> dict[str, Any]:
        """The estimate as plain values."""
        return {
            "method": self.row.label,
            "settings": self.row.settings,
            "accuracy": self.accuracy,
            "bytes": round(self.bytes),
            "bytes_spread": [round(end) for end in self.spread],
            "rounds": self.rounds,
            "measured": self.measured,
            "seeds": [run.seed for run in self.row.runs],
        }


# -- runs that are there -----------------------------------------------------------------------------------------------


def rows_there(paths: Iterable[Path], wanted: Table) -> list[Row]:
    """The rows of run directories and of JSON files of frontiers that are on the same task as a configuration."""
    rows: list[Row] = []
    folders = []
    for path in paths:
        if path.suffix == ".json":
            rows += read_rows(path)
        else:
            folders.append(path)
    runs = [read_run(path) for path in find_runs(folders)] if folders else []
    finished = [run for run in runs if run.summary and run.records]
    for one in group(finished):
        curves = tuple(curve_of(run, run.path.name) for run in one.runs)
        rows.append(Row(one.label, "", one.config, tuple(curve for curve in curves if curve.points)))
    return [row for row in rows if row.runs and is_comparable(row.config, wanted)]


def is_comparable(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether two configurations have the same data, clients, model and cohort, and no attackers."""

    def key(table: Mapping[str, Any]) -> Any:
        task, cohort = table.get("task"), table.get("cohort")
        kept = {name: v for name, v in task.items() if name not in _FREE} if isinstance(task, dict) else task
        return kept, cohort, table.get("attack")

    return bool(key(config) == key(wanted))


def measured(rows: Iterable[Row], wish: Wish) -> list[Estimate]:
    """The estimates of rows whose runs did what is wanted, the best first; failed rows are left out."""
    found = []
    for row in rows:
        if row.failed or row.rounds > wish.rounds:
            continue
        one = _to_target(row, wish.target) if wish.target is not None else _within(row, wish.budget or 0)
        found += [one] if one else []
    return ranked(found, wish)


def ranked(found: Iterable[Estimate], wish: Wish) -> list[Estimate]:
    """Estimates, the best first: the fewest bytes to a target, or the highest accuracy within a budget."""
    by_bytes = wish.target is not None
    return sorted(found, key=lambda one: (one.bytes, -one.accuracy) if by_bytes else (-one.accuracy, one.bytes))


def nearest(rows: Iterable[Row]) -> Row | None:
    """The row with the highest accuracy; None if there is none that did not fail."""
    sound = [(value.mean, row) for row in rows if not row.failed and (value := row.value())]
    return max(sound, key=lambda one: one[0])[1] if sound else None


def _to_target(row: Row, target: float) -> Estimate | None:
    reached = [_first(run, target) for run in row.runs]
    there = [one for one in reached if one is not None]
    if len(there) < len(reached):
        return None
    sent = [float(point[1]) for point in there]
    rounds = max(point[0] for point in there)
    return Estimate(row, target, sum(sent) / len(sent), (min(sent), max(sent)), rounds, True, row.rounds)


def _first(run: SeedCurve, target: float) -> tuple[int, int, float] | None:
    """The first evaluated round after which the mean of the last evaluations is a target; None if there is none."""
    for i, point in enumerate(run.points):
        value = run._replace(points=run.points[: i + 1]).value()
        if value is not None and value >= target:
            return point
    return None


def _within(row: Row, budget: float) -> Estimate | None:
    value = row.value(budget)
    if value is None:
        return None
    last = [[point for point in run.points if point[1] <= budget][-1] for run in row.runs]
    sent, rounds = [float(point[1]) for point in last], min(point[0] for point in last)
    return Estimate(row, value.mean, sum(sent) / len(sent), (min(sent), max(sent)), rounds, True, rounds)


# -- a pilot -----------------------------------------------------------------------------------------------------------


def from_pilot(half: Sequence[Row], whole: Sequence[Row], wish: Wish) -> list[Estimate]:
    """Estimates from runs of two lengths, the best first.

    Args:
        half: the rows over n / 2 rounds.
        whole: the same rows over n rounds.
        wish: what is wanted.
    """
    found = []
    for short, long in zip(half, whole, strict=True):
        if short.failed or long.failed:
            continue
        done = measured([long], wish)
        beyond = None
        if wish.target is None or not done:  # a longer run is better, within a budget
            beyond = _extrapolated(short, long, wish)
        better = beyond and (not done or beyond.accuracy > done[0].accuracy)
        found += [beyond] if beyond and better else done
    return ranked(found, wish)


def _extrapolated(short: Row, long: Row, wish: Wish) -> Estimate | None:
    before, after = short.value(), long.value()
    if before is None or after is None or long.rounds <= short.rounds:
        return None
    n, each, error = long.rounds, long.bytes / long.rounds, 1 - after.mean
    power = exponent(1 - before.mean, error, n / short.rounds)
    if wish.target is not None:
        rounds = rounds_to(1 - wish.target, error, n, power)
        accuracy = wish.target
    else:
        rounds = min(wish.rounds, int((wish.budget or 0) / each))
        accuracy = 1 - error * (n / max(rounds, 1)) ** power
    if not n < rounds <= wish.rounds:
        return None
    return Estimate(long, accuracy, rounds * each, (rounds * each, rounds * each), int(rounds), False, int(rounds))


def exponent(before: float, after: float, ratio: float) -> float:
    """The exponent of the power law through two errors; `ratio` is that of their rounds.

    >>> exponent(0.4, 0.2, 2.0), exponent(0.1, 0.2, 2.0), exponent(0.4, 0.0, 2.0)
    (1.0, 0.0, 1.0)
    """
    if before <= after:
        return 0.0
    return min(1.0, math.log(before / after) / math.log(ratio)) if after > 0 else 1.0


def rounds_to(wanted: float, error: float, rounds: int, power: float) -> float:
    """The rounds after which the error is expected to be as low as wanted; infinite if it never is.

    >>> rounds_to(0.1, 0.2, 50, 1.0), rounds_to(0.1, 0.2, 50, 0.0)
    (100.0, inf)
    """
    if error <= wanted:
        return rounds
    if power <= 0 or wanted <= 0 or math.log(error / wanted) / power > 20:
        return math.inf
    return float(math.ceil(rounds * (error / wanted) ** (1 / power) - 1e-9))
