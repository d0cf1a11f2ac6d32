"""Accuracy against bytes of several methods: values at the end of a run and within a budget, and the Pareto front.

    value of a run within B bytes = mean of its last evaluations (a tenth of them, at most five) in the rounds that cost
                                    at most B bytes together
    front                         = the rows that no other row beats by accuracy with at most its bytes

Bytes are honest: up, down, catch-up and abandoned rounds. Rows of which a run failed (diverged, collapsed, at chance)
are shown, and are never on the front.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.errors import CheckpointError
from thinwire.experiments.archive import Runs
from thinwire.experiments.collapse import BROKEN
from thinwire.experiments.experiment import to_table
from thinwire.experiments.files import read_json
from thinwire.experiments.frontier import REFERENCE
from thinwire.experiments.grid import Grid, Line, summary, training_failed
from thinwire.experiments.records import Recorded, honest_bytes
from thinwire.experiments.toml import Table
from thinwire.reports.seed_groups import MeanInterval
from thinwire.reports.settings import without_seed
from thinwire.search.validation import mean_of_last

SHARES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # budgets: the reference's bytes divided by these
_LARGEST = 1 << 63


class SeedCurve(NamedTuple):
    """One run: after each evaluated round its number, all bytes so far, and the accuracy on the test set."""

    seed: int
    run: str  # its name on the page: the beginning of the digest
    status: str
    points: tuple[tuple[int, int, float], ...]

    @property
    def bytes(self) -> int:
        """The bytes of the whole run; the last round is always evaluated."""
        return self.points[-1][1] if self.points else 0

    def value(self, budget: float | None = None) -> float | None:
        """The accuracy within a budget of bytes, or of the whole run; None if no evaluated round is within it.

        >>> run = SeedCurve(0, "", "finished", ((1, 10, 0.25), (2, 20, 0.5), (3, 30, 0.75)))
        >>> run.value(), run.value(25), run.value(5)
        (0.75, 0.5, None)
        """
        known = [{"accuracy": point[2]} for point in self.points if budget is None or point[1] <= budget]
        return mean_of_last(known, "accuracy")


class Row(NamedTuple):
    """A method with settings over its seeds; `config` is the whole configuration without the seed."""

    label: str
    settings: str
    config: Table
    runs: tuple[SeedCurve, ...]

    @property
    def failed(self) -> bool:
        """Whether training failed on a seed, or no run is there."""
        return not self.runs or any(run.status in BROKEN for run in self.runs)

    @property
    def bytes(self) -> float:
        """The mean bytes of its runs."""
        return statistics.fmean(run.bytes for run in self.runs)

    @property
    def rounds(self) -> int:
        """The rounds of its runs."""
        return max((run.points[-1][0] for run in self.runs if run.points), default=0)

    def value(self, budget: float | None = None) -> MeanInterval | None:
        """The accuracy over seeds; None if a seed has no evaluated round within the budget."""
        values = [run.value(budget) for run in self.runs]
        return None if None in values else MeanInterval.of(values)

    def curve(self) -> list[tuple[float, float]]:
        """Mean bytes and mean accuracy after each evaluated round that every seed has."""
        length = min((len(run.points) for run in self.runs), default=0)
        cut = [[run._replace(points=run.points[: i + 1]) for run in self.runs] for i in range(length)]
        return [
            (statistics.fmean(r.bytes for r in runs), statistics.fmean(r.value() or 0.0 for r in runs)) for runs in cut
        ]


class Winner(NamedTuple):
    """The best row within a budget, and the next one; `ahead` is the difference by seed."""

    share: int
    budget: float
    first: Row | None
    second: Row | None
    ahead: MeanInterval | None

    @property
    def seeds(self) -> list[int]:
        """The seeds of the difference: those that both rows have."""
        shown = [{run.seed for run in row.runs} for row in (self.first, self.second) if row]
        return sorted(set.intersection(*shown)) if shown else []

    @property
    def clear(self) -> bool:
        """Whether the 95 % interval of the difference excludes zero."""
        return self.ahead is not None and self.ahead.half is not None and self.ahead.mean > self.ahead.half


def rows_of_grid(grid: Grid, out: Path | Runs) -> list[Row]:
    """The rows of a grid from run directories or an archive; runs that are missing or not finished are left out."""
    return [_row(line, out) for line in grid.final(out)]


def missing(grid: Grid, out: Path | Runs) -> int:
    """The number of runs of a grid that did not finish and did not fail."""
    lines = [*grid.trials(), *grid.final(out)]
    runs = {e.digest(): e for line in lines for e in line.runs}
    return sum(not summary(e, out) and not training_failed(e, out) for e in runs.values())


def _row(line: Line, out: Path | Runs) -> Row:
    known = Runs.at(out)
    there = [e for e in line.runs if summary(e, known) or training_failed(e, known)]
    runs = tuple(curve_of(known.recorded(e), known.archive.name(e.digest())) for e in there)
    return Row(
        line.label, line.settings, without_seed(to_table(line.runs[0])), tuple(run for run in runs if run.points)
    )


def curve_of(run: Recorded, name: str) -> SeedCurve:
    """The curve of a run."""
    spent = itertools.accumulate(map(honest_bytes, run.records))
    both = zip(run.records, spent, strict=True)
    points = tuple((r["round"], so_far, r["accuracy"]) for r, so_far in both if r["accuracy"] is not None)
    return SeedCurve(run.table.get("seed", 0), name, run.verdict.status, points)


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows on the Pareto front, by their values at the end of the run, the fewest bytes first."""
    out: list[Row] = []
    best = -1.0
    sound = [(row.bytes, -value.mean, row) for row in rows if not row.failed and (value := row.value())]
    for _, negative, row in sorted(sound, key=lambda one: one[:2]):
        if -negative > best:
            best = -negative
            out.append(row)
    return out


def best_by_bytes(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """The best accuracy of any row within so many bytes, as steps; runs may be stopped early."""
    steps: list[tuple[float, float]] = []
    for sent, value in sorted(point for row in rows if not row.failed for point in row.curve()):
        if not steps or value > steps[-1][1]:
            steps.append((sent, value))
    return steps


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The row whose bytes are the unit: FedAvg, or else the one with the most bytes; None without runs."""
    there = [row for row in rows if row.runs]
    return next((row for row in there if row.label == REFERENCE), max(there, key=lambda row: row.bytes, default=None))


def winners(rows: Sequence[Row], shares: Sequence[int] = SHARES) -> list[Winner]:
    """The best row within each share of the reference's bytes."""
    reference = reference_of(rows)
    if reference is None:
        return []
    found = []
    for share in shares:
        budget = reference.bytes / share
        ranked = sorted(
            ((value.mean, row) for row in rows if not row.failed and (value := row.value(budget))),
            key=lambda one: -one[0],
        )
        first, second = (ranked[i][1] if len(ranked) > i else None for i in (0, 1))
        ahead = _ahead(first, second, budget) if first and second else None
        found.append(Winner(share, budget, first, second, ahead))
    return found


def _ahead(one: Row, other: Row, budget: float) -> MeanInterval | None:
    """The difference of two rows within a budget, paired by seed."""
    values = {run.seed: run.value(budget) for run in other.runs}
    pairs = [(run.value(budget), values.get(run.seed)) for run in one.runs]
    return MeanInterval.of(a - b for a, b in pairs if a is not None and b is not None)


# -- as plain values ---------------------------------------------------------------------------------------------------


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for a JSON file, each with the names of its runs, which the file has too; `read_rows` reads them."""
    return [{**row._asdict(), "runs": [run.run for run in row.runs]} for row in rows]


def read_rows(file: Path) -> list[Row]:
    """The rows of the JSON file of a frontier; every value is checked."""
    content = read_json(file)
    try:
        return [_read_row(one, content["runs"]) for one in content["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not the JSON file of a frontier; `thinwire frontier` writes one") from error


def _read_row(value: Mapping[str, Any], known: Mapping[str, Any]) -> Row:
    label, settings, config = value["label"], value["settings"], value["config"]
    if not isinstance(label, str) or not isinstance(settings, str) or not isinstance(config, dict):
        raise TypeError(label)
    runs = []
    for name in value["runs"]:
        run = known[name]
        points = tuple((number, sent, float(accuracy)) for number, sent, accuracy in run["curve"])
        counts = [count for number, sent, _ in points for count in (number, sent)] + [run["seed"]]
        if not all(type(count) is int and 0 <= count < _LARGEST for count in counts):
            raise ValueError(label)
        if not points or not all(0 <= accuracy <= 1 for _, _, accuracy in points):
            raise ValueError(label)
        runs.append(SeedCurve(run["seed"], visible(name, 40), visible(str(run["status"]), 40), points))
    return Row(visible(label, 200), visible(settings, 400), config, tuple(runs))
