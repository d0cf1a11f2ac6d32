"""One row of a table: runs that differ only in their seed, with means over seeds.

    95 % interval of the mean of n seeds = mean +- t(0.975, n - 1) * standard deviation / sqrt(n)

Curves are means over seeds by round, over the rounds that every seed has; a curve against bytes uses the mean bytes of
these rounds. Files are not trusted: values that are not finite numbers are ignored.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.metrics.objective import Objective, metric_value
from thinwire.reports.figures import Point
from thinwire.runs.best import recorded_objective
from thinwire.runs.collapse import BROKEN, count_broken
from thinwire.runs.records import SavedRun, SearchRecord, honest_bytes, read_search
from thinwire.runs.toml import Table as TomlTable, dumps, flat

ACCURACY, LOSS = Objective(), Objective("loss", higher_is_better=False)
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
        >>> MeanInterval.of([0.1 + 0.2, 0.3]).std
        0.0
        >>> MeanInterval.of([0.5]), MeanInterval.of([])
        (MeanInterval(mean=0.5, std=0.0, half=None), None)
        """
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return cls(known[0], 0.0, None) if known else None
        from scipy.special import stdtrit  # the quantile function of Student's t

        std = statistics.stdev(known)
        std = 0.0 if std < 1e-12 * max(map(abs, known)) else std  # rounding
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
    def rounds(self) -> int:
        """The rounds of its shortest run."""
        return min(len(run.records) for run in self.runs)

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
        return self.final_of(self.objective.key)

    @property
    def others(self) -> dict[str, MeanInterval]:
        """Its other metrics after the last round, by dotted path: `metrics.f1`, `clients_eval.worst_10`."""
        kinds = [(kind, record.get(kind)) for run in self.runs for record in run.records for kind in _OTHERS]
        paths = dict.fromkeys(f"{kind}.{name}" for kind, found in kinds if isinstance(found, dict) for name in found)
        known = ("metrics.accuracy", self.objective.key)
        return {path: mean for path in paths if path not in known and (mean := self.final_of(path))}

    def final_of(self, metric: str) -> MeanInterval | None:
        """The last value of a metric in each run."""
        return MeanInterval.of(next(reversed(evaluations(run, metric)), None) for run in self.runs)

    def best_of(self, run: SavedRun) -> float | None:
        """The best value of the objective in a run; None if it has none."""
        best = max if self.objective.higher_is_better else min
        return best(evaluations(run, self.objective.key), default=None)

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


def group(runs: Sequence[SavedRun]) -> list[Row]:
    """One row per configuration, in order of first appearance, with unique labels.

    A run without an objective has the first of the others, of accuracy and of the test loss that it has.
    """
    by_config: dict[str, dict[int, SavedRun]] = {}
    for run in runs:
        by_seed = by_config.setdefault(dumps(without_seed(run.table)), {})
        seed = run.table.get("seed", 0)
        if seed not in by_seed or len(by_seed[seed].records) < len(run.records):  # a copy of a run counts once
            by_seed[seed] = run
    rows = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in by_config.values()]
    stated = [next(filter(None, (recorded_objective(run.summary) for run in own)), None) for own in rows]
    known = list(dict.fromkeys((*filter(None, stated), ACCURACY, LOSS)))
    labels = unique_labels([(own[0].task, own[0].name) for own in rows], [own[0].table for own in rows])

    def recorded(own: list[SavedRun]) -> Objective:
        return next((one for one in known if any(evaluations(run, one.key) for run in own)), known[0])

    return [Row(label, own, one or recorded(own)) for label, own, one in zip(labels, rows, stated, strict=True)]


def without_seed(config: TomlTable) -> TomlTable:
    """A configuration without the keys that runs of one row may differ in.

    These are the seed, and what depends on the seed: the fingerprint of initial weights and data,
    and a learning rate that was found by trials.
    """
    without = ("seed", "fingerprint", "lr_trials")
    kept = {key: value for key, value in config.items() if key not in without}
    if "lr_trials" in config:
        optimizer = {key: value for key, value in kept["method"]["client_opt"].items() if key != "lr"}
        kept["method"] = {**kept["method"], "client_opt": optimizer}
    return kept


def differing(configs: Sequence[TomlTable]) -> list[str]:
    """The dotted paths at which some configurations differ.

    >>> differing([{"rounds": 2, "local": {"lr": 0.1}}, {"rounds": 2, "local": {"lr": 0.2}}])
    ['local.lr']
    """
    flats = [flat(config) for config in configs]
    paths = dict.fromkeys(path for values in flats for path in values)
    return [path for path in paths if any(values.get(path) != flats[0].get(path) for values in flats)]


def unique_labels(names: Sequence[tuple[str, str]], configs: Sequence[TomlTable]) -> list[str]:
    """Names of configurations, by task and name; several with the same name also with the settings that differ.

    >>> unique_labels([("digits", "a"), ("digits", "a"), ("digits", "b")], [{"k": 1}, {"k": 2}, {}])
    ['a (k 1)', 'a (k 2)', 'b']
    """
    labels = []
    for name, config in zip(names, map(flat, configs), strict=True):
        paths = differing([without_seed(other) for other, its in zip(configs, names, strict=True) if its == name])
        texts = [f"{path.rpartition('.')[2]} {config[path]}" for path in paths if path in config]
        labels.append(f"{name[1]} ({', '.join(texts)})" if texts else name[1])
    return labels


def baseline_of(rows: Sequence[Row]) -> Row:
    """FedAvg with the best mean of the objective, of rows that failed only if all did; else the first row."""

    def rank(row: Row) -> tuple[bool, float]:
        sign = 1 if row.objective.higher_is_better else -1
        return not row.broken, sign * row.best.mean if row.best else -math.inf

    return max((row for row in rows if row.runs[0].name == BASELINE), key=rank, default=rows[0])


# -- metrics -----------------------------------------------------------------------------------------------------------

_OTHERS = ("metrics", "clients_eval")  # tables of a record


def evaluations(run: SavedRun, metric: str) -> list[float]:
    """The values of a metric in the evaluated rounds of a run."""
    return [value for record in run.records if (value := metric_value(record, metric)) is not None]


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


def value_text(value: Any) -> str:
    """The value of a setting: the kind of a part, `as it is` for None.

    >>> value_text(0.30), value_text({"kind": "topk"}), value_text(None)
    ('0.3', 'topk', 'as it is')
    """
    if isinstance(value, dict):
        value = value.get("kind", value)
    return "as it is" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
