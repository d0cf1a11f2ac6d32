"""The frontier of a task: a set of methods and densities, each with the same search, as one grid.

    rates of a row = its center times 2^-1, 2^0, 2^1, ...        the same number for every row

The set is `papers/frontier.toml`: rows with a `label`, a `method`, settings (`set`), and where the size of a
subspace matters `k`, a multiple of the k that the space derives from the number of weights. The center of the rates is
that of the row for the task (`center`), else that of the set for rates of clients, else the rate of the method on the
task. The rates are tried on another seed than those of the result, over a share of the rounds, and judged by examples
that clients hold out; the test set chooses nothing.

    value of a run within B bytes = mean of its last evaluations (a tenth of them, at most five) in the rounds that cost
                                    at most B bytes together
    front                         = the rows that no other row beats by accuracy with at most its bytes

Bytes are honest: up, down, catch-up and abandoned rounds. Rows of which a run failed (diverged, collapsed, at chance)
are shown, and are never on the front.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from papers.archive import Runs
from papers.grid import Grid, Line, summary, training_failed
from papers.tables import read
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.federation.simulation import make_simulation
from thinwire.reports.rows import MeanInterval, without_seed
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN
from thinwire.runs.config import digest, resolve, to_table
from thinwire.runs.probe import rate_key
from thinwire.runs.records import SavedRun, honest_bytes
from thinwire.runs.toml import Table, flat, parse_overrides
from thinwire.search.trials import mean_of_last
from thinwire.search.tune import SEARCH_SEED, VALIDATION_FRACTION
from thinwire.spaces import MAPO

CRITERION = "final_client_accuracy"  # of the search: clients' accuracy on held-out examples after the last round
REFERENCE = "fedavg"  # the row whose bytes are the unit
CLIENT_RATE = "method.client_opt.lr"
EVALUATIONS = 0.02  # rounds between two evaluations, as a share of the run


class Work(NamedTuple):
    """How much is run for each row of a frontier.

    Args:
        seeds: number of seeds, from 0.
        rates: learning rates that each row tries; 1 for its own, without a search.
        share: rounds of the search, as a share of those of the run.
        rounds: rounds of the runs; None for those of the task.
    """

    seeds: int = 3
    rates: int = 3
    share: float = 0.5
    rounds: int | None = None

    def check(self) -> None:
        """Raise a ConfigError for numbers that make no sense."""
        if self.seeds < 1 or self.rates < 1 or (self.rounds is not None and self.rounds < 1):
            raise ConfigError("seeds, rates and rounds must be 1 or more; write for example --seeds 3 --rates 3")
        if self.seeds > SEARCH_SEED:
            raise ConfigError(f"seeds must be at most {SEARCH_SEED}: the search uses seed {SEARCH_SEED}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, a part of the rounds, not {self.share}")


class Where(NamedTuple):
    """On what a frontier is measured: the task, the recipe, the device, settings for all rows, the data folder."""

    on: str | None = None
    recipe: str | None = None
    device: str = "cpu"
    changes: tuple[str, ...] = ()
    data_dir: Path | None = None

    def experiment(self, method: str = REFERENCE, settings: Table | None = None) -> Settings:
        """A method on the task."""
        return resolve(method, self.on, {**(settings or {}), **parse_overrides(list(self.changes))}, self.recipe)


def rows_of(names: Sequence[str] = ()) -> list[Table]:
    """Rows of the documented set by label; a name that is none is a method. Without names, the whole set.

    >>> [row["label"] for row in rows_of(["fedavg", "thin, k/4", "mapo+int8"])]
    ['fedavg', 'thin, k/4', 'mapo+int8']
    """
    known: list[Table] = read("frontier.toml")["rows"]
    by_label = {row["label"]: row for row in known}
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{twice[0]} is given twice; write it once")
    return [by_label.get(name, {"label": name, "method": name}) for name in names] or known


def frontier_grid(rows: Sequence[Table], where: Where, work: Work) -> Grid:
    """The grid of a frontier; reads the dataset once, for the number of weights.

    Args:
        rows: methods and densities; of the whole set those whose k would be above the number of weights are left out.
        where: the task, and settings for all rows.
        work: seeds, and the search of each row.
    """
    work.check()
    rounds = where.experiment().rounds if work.rounds is None else work.rounds
    weights = _weights(where)
    fitting = _fitting(rows, weights)
    common: Table = {
        "eval.every": {"of_rounds": EVALUATIONS},
        "checkpoint.every": {"of_rounds": 1.0},  # of a method with client states it is large; runs are short
    }
    content: Table = {
        "on": where.on,
        "recipe": where.recipe,
        "rounds": rounds,
        "seeds": list(range(work.seeds)),
        "set": common,
        "rows": [_searched(row, where, work.rates, weights) for row in fitting],
        "tune": {
            "seeds": [SEARCH_SEED],
            "share": work.share,
            "validation_fraction": where.experiment().task.validation_fraction or VALIDATION_FRACTION,
            "by": CRITERION,
            "set": {"eval.every": {"of_rounds": 1.0}},  # evaluating all clients takes longer than a round
        },
    }
    return Grid(content, where.device, where.changes)


def factors(count: int) -> tuple[float, ...]:
    """Factors of a learning rate, 2 apart and around 1.

    >>> factors(1), factors(3), factors(4)
    ((1.0,), (0.5, 1.0, 2.0), (0.5, 1.0, 2.0, 4.0))
    """
    low = (count - 1) // 2
    return tuple(2.0**i for i in range(-low, count - low))


def _searched(row: Table, where: Where, rates: int, weights: int) -> Table:
    """A row of the grid: the settings of the row, with k as a number, and the rates to try."""
    settings = dict(row.get("set", {}))
    experiment = where.experiment(row["method"], settings)
    if "k" in row:
        settings["method.space.k"] = max(1, round(row["k"] * MAPO(k=0).sizes(weights).k))
    key = rate_key(experiment)
    own = _center(row, experiment, key)
    over = {key: [float(f"{own * factor:.6g}") for factor in factors(rates)]}
    return {"label": row["label"], "method": row["method"], "set": settings, "over": over}


def _fitting(rows: Sequence[Table], weights: int) -> list[Table]:
    """The rows whose k is at most the number of weights; raises a ConfigError for another that was named."""
    usual = MAPO(k=0).sizes(weights).k
    left_out = [row["label"] for row in rows if row.get("k", 0) * usual > weights]
    if left_out and list(rows) != rows_of():
        raise ConfigError(f"{left_out[0]}: k would be above the {weights:,} weights of the model; name a smaller one")
    return [row for row in rows if row["label"] not in left_out]


def _center(row: Table, experiment: Settings, key: str) -> float:
    """The middle of a row's rates: placed for this task in the row, or in the set for rates of clients, or its own."""
    task = experiment.task.label
    of_set = read("frontier.toml").get("center", {}) if key == CLIENT_RATE else {}
    return float(row.get("center", {}).get(task) or of_set.get(task) or flat(to_table(experiment))[key])


def _weights(where: Where) -> int:
    """The number of weights of the model; raises a ConfigError for a task without accuracy or test set."""
    experiment = where.experiment()
    job = build_job(experiment, where.data_dir)
    if job.ranked_by.name != "accuracy" or job.task.test is None:
        raise ConfigError(
            f"a frontier compares accuracies on a test set, which {experiment.task.label} does not have; use "
            "`thinwire compare` for it"
        )
    return int(make_simulation(replace(experiment.engine, device="cpu", workers=0), job).contract.weights.size)


SHARES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # budgets: the reference's bytes divided by these


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
    runs = {digest(e): e for line in lines for e in line.runs}
    return sum(not summary(e, out) and not training_failed(e, out) for e in runs.values())


def _row(line: Line, out: Path | Runs) -> Row:
    known = Runs.at(out)
    there = [e for e in line.runs if summary(e, known) or training_failed(e, known)]
    runs = tuple(curve_of(known.recorded(e), known.archive.name(digest(e))) for e in there)
    return Row(
        line.label, line.settings, without_seed(to_table(line.runs[0])), tuple(run for run in runs if run.points)
    )


def curve_of(run: SavedRun, name: str) -> SeedCurve:
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
    """Rows for a JSON file, each with the names of its runs, which the file has too."""
    return [{**row._asdict(), "runs": [run.run for run in row.runs]} for row in rows]
