"""One row of a table: runs that differ only in their seed, with means over seeds, and columns of text.

    95 % interval of the mean of n seeds = mean +- t(0.975, n - 1) * standard deviation / sqrt(n)

Curves are means over seeds by round, over the rounds that every seed has; a curve against bytes uses the mean bytes of
these rounds. Files are not trusted: values that are not finite numbers are ignored.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes, visible
from thinwire.errors import ConfigError
from thinwire.metrics.objective import Objective
from thinwire.reports.figures import Point
from thinwire.runs.best import recorded_objective
from thinwire.runs.collapse import BROKEN, count_broken
from thinwire.runs.records import SavedRun, find_runs, honest_bytes, read_run
from thinwire.runs.search_record import SearchRecord, read_search
from thinwire.runs.toml import Table as TomlTable, dumps, flat

ACCURACY, LOSS = Objective(), Objective("loss", higher_is_better=False)
CLIENT_QUANTILES = ("count", "mean", "worst_10", "p10", "p50", "p90")
BASELINE = "fedavg"


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
        from scipy.special import stdtrit  # the quantile function of Student's t

        std = statistics.stdev(known)
        half = float(stdtrit(len(known) - 1, 0.975)) * std / math.sqrt(len(known))
        return cls(statistics.fmean(known), std, half)


class Row(NamedTuple):
    """Runs of one configuration, one for each seed.

    Args:
        label: the name of the method, with settings where several rows have the same name.
        runs: ascending by seed.
        objective: what they are ranked by.
        values: of a sweep, the values that were tried, by name.
        settings: of a sweep, the same by dotted path.
        validation: of a sweep, the clients' accuracy or loss on held-out examples; None without those.
        difference: of a sweep, to the best setting, of what ranks; None for settings that failed.
    """

    label: str
    runs: list[SavedRun]
    objective: Objective = ACCURACY
    values: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    validation: MeanInterval | None = None
    difference: MeanInterval | None = None

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
    def broken(self) -> list[SavedRun]:
        """Its runs that diverged, collapsed or are at chance."""
        return [run for run in self.runs if run.verdict.status in BROKEN]

    @property
    def failed(self) -> str:
        """How many runs diverged, collapsed or are at chance; `-` if none."""
        return count_broken(run.verdict.status for run in self.runs)

    @property
    def search(self) -> SearchRecord | None:
        """How a setting of it was found; None without a recorded search."""
        return read_search(self.runs[0].path)

    @property
    def bytes(self) -> float:
        """Bytes of all messages of a run."""
        return self.total("bytes_total_honest")

    @property
    def best(self) -> MeanInterval | None:
        """The objective in the best round of each run."""
        return MeanInterval.of(self.best_of(run) for run in self.runs)

    @property
    def final(self) -> MeanInterval | None:
        """The objective after the last round of each run."""
        return self.final_of("")

    @property
    def metrics(self) -> dict[str, MeanInterval]:
        """Its metrics after the last round, apart from accuracy."""
        found = (record.get("metrics") for run in self.runs for record in run.records)
        names = dict.fromkeys(name for one in found if isinstance(one, dict) for name in one)
        return {name: value for name in names if name != "accuracy" and (value := self.final_of(f"metrics.{name}"))}

    @property
    def clients(self) -> dict[str, MeanInterval]:
        """The distribution of accuracy over clients after the last round."""
        return {name: value for name in CLIENT_QUANTILES if (value := self.final_of(f"clients_eval.{name}"))}

    def final_of(self, metric: str) -> MeanInterval | None:
        """The last value of a metric in each run."""
        return MeanInterval.of(next(reversed(self.evaluations(run, metric)), None) for run in self.runs)

    def best_of(self, run: SavedRun) -> float | None:
        """The best value of the objective in a run; None if it has none."""
        return (max if self.objective.higher_is_better else min)(self.evaluations(run), default=None)

    def evaluations(self, run: SavedRun, metric: str = "") -> list[float]:
        """The values of a metric (see `metric_value`), by default the objective, in the evaluated rounds of a run."""
        found = (metric_value(record, metric or objective_key(self.objective)) for record in run.records)
        return [value for value in found if value is not None]

    def total(self, key: str) -> float:
        """The mean of one of the `totals` that every run has, such as bytes."""
        return statistics.fmean(run.totals[key] for run in self.runs)

    def curve(self, metric: str, by_bytes: bool = True) -> list[Point]:
        """A metric (see `metric_value`) against mean bytes so far or rounds, where every seed has it.

        A point is x, the mean over seeds, and the values of the lowest and the highest seed.
        """
        sent = zip(*(itertools.accumulate(map(honest_bytes, run.records)) for run in self.runs), strict=False)
        points = []
        for lines, so_far in zip(zip(*(run.records for run in self.runs), strict=False), sent, strict=False):
            known = [value for line in lines if (value := metric_value(line, metric)) is not None]
            if len(known) == len(lines):
                x = statistics.fmean(so_far) if by_bytes else lines[0]["round"]
                points.append((x, statistics.fmean(known), min(known), max(known)))
        return points


def read_runs(runs: Iterable[Any]) -> list[SavedRun]:
    """Read run directories, those in folders, and those of results of `tw.simulate(..., out=...)`."""
    paths = [run.path if hasattr(run, "history") else run for run in runs]
    if None in paths:
        raise ConfigError("this run was not written to a directory; write tw.simulate(..., out='runs/name')")
    return [read_run(path) for path in find_runs(map(Path, paths))]


def group(runs: Sequence[SavedRun]) -> list[Row]:
    """One row per configuration, in order of first appearance, with unique labels.

    An unfinished run has no objective: it gets the first of the others, of accuracy and of the test loss that it has.
    """
    by_config: dict[str, dict[int, SavedRun]] = {}
    for run in runs:
        by_seed = by_config.setdefault(dumps(without_seed(run.table)), {})
        seed = run.table.get("seed", 0)
        if seed not in by_seed or len(by_seed[seed].records) < len(run.records):  # a copy of a run counts once
            by_seed[seed] = run
    rows = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in by_config.values()]
    stated = [next(filter(None, (recorded_objective(run.summary) for run in own)), None) for own in rows]
    known = dict.fromkeys((*filter(None, stated), ACCURACY, LOSS))

    def recorded(own: list[SavedRun]) -> Objective:
        keys = {
            key for run in own for record in run.records for key, value in flat(record).items() if value is not None
        }
        return next((one for one in known if objective_key(one) in keys), ACCURACY)

    names, tables = [(own[0].task, own[0].name) for own in rows], [own[0].table for own in rows]
    labels = unique_labels(names, tables)
    return [Row(label, own, one or recorded(own)) for label, own, one in zip(labels, rows, stated, strict=True)]


def without_seed(config: TomlTable) -> TomlTable:
    """A configuration without the keys that runs of one row may differ in.

    These are the seed, the byte accounting, and the fingerprint of initial weights and data, which depend on the seed.
    """
    return {key: value for key, value in config.items() if key not in ("seed", "accounting", "fingerprint")}


def differing(configs: Sequence[TomlTable]) -> list[str]:
    """The dotted paths at which some configurations differ.

    >>> differing([{"rounds": 2, "local": {"lr": 0.1}}, {"rounds": 2, "local": {"lr": 0.2}}])
    ['local.lr']
    """
    flats = [flat(config) for config in configs]
    paths = dict.fromkeys(path for values in flats for path in values)
    return [path for path in paths if any(values.get(path) != flats[0].get(path) for values in flats)]


def unique_labels(names: Sequence[tuple[str, str]], configs: Sequence[TomlTable]) -> list[str]:
    """Names of configurations; of one task with the same name also with settings in which they differ, or a number.

    >>> unique_labels([("digits", "a"), ("digits", "a"), ("digits", "b")], [{"k": 1}, {"k": 2}, {}])
    ['a (k 1)', 'a (k 2)', 'b']
    """
    labels: list[str] = []
    for name, config in zip(names, configs, strict=True):
        values = flat(config)
        paths = differing([without_seed(other) for other, its in zip(configs, names, strict=True) if its == name])
        texts = [f"{path.rpartition('.')[2]} {values[path]}" for path in paths if path in values]
        labels.append(f"{name[1]} ({', '.join(texts[:3])})" if texts else name[1])
    every = list(zip([task for task, _ in names], labels, strict=True))
    before = [every[:i].count(one) for i, one in enumerate(every)]
    return [f"{label} #{count + 1}" if count else label for label, count in zip(labels, before, strict=True)]


def baseline_of(rows: Sequence[Row]) -> Row:
    """FedAvg with the best mean of the objective, of rows that failed only if all did; else the first row."""

    def rank(row: Row) -> tuple[bool, float]:
        sign = 1 if row.objective.higher_is_better else -1
        return not row.broken, sign * row.best.mean if row.best else -math.inf

    found = [row for row in rows if row.runs[0].name == BASELINE]
    return max(found, key=rank) if found else rows[0]


# -- metrics -----------------------------------------------------------------------------------------------------------


def metric_value(record: Mapping[str, Any], metric: str) -> float | None:
    """The value of a metric in a record; None if the round has none, or it is not a finite number.

    Args:
        record: a line of `metrics.jsonl`.
        metric: a key of the record, `metrics.NAME` or `clients_eval.NAME`.

    >>> record = {"accuracy": 0.9, "metrics": {"macro_f1": 0.8}, "clients_eval": None}
    >>> [metric_value(record, metric) for metric in ("accuracy", "metrics.macro_f1", "clients_eval.p10")]
    [0.9, 0.8, None]
    """
    field, _, name = metric.partition(".")
    found = record.get(field)
    if name:
        found = found.get(name) if isinstance(found, Mapping) else None
    known = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < 1e300
    return float(found) if known else None  # type: ignore[arg-type]


def objective_key(objective: Objective) -> str:
    """Where records have the value of an objective (see `metric_value`).

    >>> [objective_key(Objective(name)) for name in ("accuracy", "loss", "r2")]
    ['accuracy', 'test_loss', 'metrics.r2']
    """
    return {"accuracy": "accuracy", "loss": "test_loss"}.get(objective.name, f"metrics.{objective.name}")


# -- text --------------------------------------------------------------------------------------------------------------


def objective_name(objective: Objective) -> str:
    """The name of an objective in titles, on one line: `test loss`, `r2`."""
    return visible(objective.label, 60)


def percent_text(fraction: float) -> str:
    """A fraction in percent, with three digits.

    >>> percent_text(0.8125)
    '81.2 %'
    """
    return f"{100 * fraction:.3g} %"


def number_text(value: float, digits: int = 4) -> str:
    """A number in its own unit; thousands are written out.

    >>> number_text(0.48731), number_text(2912.4), number_text(1e9)
    ('0.4873', '2,912', '1e+09')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.{digits}g}"


def mean_text(value: MeanInterval | None, objective: Objective | None = None) -> str:
    """Mean and standard deviation over seeds: accuracy in percent, others in their own unit.

    >>> mean_text(MeanInterval.of([0.5, 0.7]), ACCURACY), mean_text(MeanInterval.of([2912.4]))
    ('60.00 ± 14.14', '2,912')
    """
    if value is None:
        return "-"
    if objective == ACCURACY:
        mean, std = f"{100 * value.mean:.2f}", f"{100 * value.std:.2f}"
    else:
        mean, std = number_text(value.mean), number_text(value.std, 2)
    return mean if value.half is None else f"{mean} ± {std}"


def interval_text(value: MeanInterval | None, objective: Objective) -> str:
    """The 95 % interval of the mean of an objective."""
    if value is None or value.half is None:
        return "-"
    low, high = value.mean - value.half, value.mean + value.half
    if objective == ACCURACY:
        return f"{100 * max(0.0, low):.1f} to {100 * min(1.0, high):.1f}"
    return f"{number_text(low)} to {number_text(high)}"


def result_columns(rows: Sequence[Row], interval: bool = False) -> dict[str, list[str]]:
    """The columns of a table about results: objective, metrics, and the clients with the lowest accuracy."""
    columns = {}
    for one in dict.fromkeys(row.objective for row in rows):
        unit = "%" if one == ACCURACY else objective_name(one)
        own = [row if row.objective == one else None for row in rows]
        columns[f"final {unit}"] = [mean_text(row and row.final, one) for row in own]
        columns[f"best {unit}"] = [mean_text(row and row.best, one) for row in own]
        if interval:
            columns["95 % interval"] = [interval_text(row and row.final, one) for row in own]
    found, ranked = [row.metrics for row in rows], [row.objective.name for row in rows]
    for name in dict.fromkeys(name for metrics in found for name in metrics if name not in ranked):
        columns[visible(name, 60)] = [mean_text(metrics.get(name)) for metrics in found]
    worst = [row.clients.get("worst_10") for row in rows]
    return columns | ({"worst 10 % of clients": [mean_text(one, ACCURACY) for one in worst]} if any(worst) else {})


def byte_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns of a table about bytes."""
    heads = {"up": "up", "down": "down", "catch-up": "catchup", "abandoned": "abandoned"}
    heads |= {"total": "total_honest", "ideal": "total_ideal"}
    sent = {head: [row.total(f"bytes_{key}") for row in rows] for head, key in heads.items()}
    return {head: [human_bytes(one) for one in own] for head, own in sent.items() if head != "abandoned" or any(own)}
