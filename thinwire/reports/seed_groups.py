"""Runs that differ only in their seed form a group: its curves, its totals, and its cost to reach a target.

    95 % interval of the mean of n seeds = mean +- t(0.975, n - 1) * standard deviation / sqrt(n)

Curves are means over seeds by round, over the rounds that every seed has; a curve against bytes uses the mean bytes of
these rounds. A target is reached in the first evaluated round whose objective is as good or better.

Files are not trusted: values that are not finite numbers are ignored. An unfinished run has the objective of a finished
run of its task, or else accuracy or the test loss.

The baseline of a comparison is the FedAvg setting with the best mean of the objective, not the first one. How many
times fewer bytes a method needs:

    factor          mean bytes of the baseline / mean bytes of the method
    error           d = a / mean(a) - b / mean(b) for each shared seed;   std(d) / sqrt(n)
    95 % interval   factor * exp(-t * error) to factor * exp(t * error)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.core.text import human_bytes, visible
from thinwire.metrics.objective import Objective
from thinwire.reports.figures import Point
from thinwire.runs.best import recorded_objective
from thinwire.runs.collapse import BROKEN
from thinwire.runs.link_time import link, seconds
from thinwire.runs.records import Record, SavedRun, honest_bytes, totals
from thinwire.runs.search_record import read_search
from thinwire.runs.toml import Table as TomlTable, dumps, flat

ACCURACY, SLOW = Objective(), "2 Mbps"
CLIENT_QUANTILES = ("count", "mean", "worst_10", "p10", "p50", "p90")
WORST_CLIENTS = "worst 10 % of clients"
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


class TargetCost(NamedTuple):
    """The cost of reaching a target; means over the seeds that reached it."""

    by_seed: dict[int, int]  # all bytes until then: up, down, catch-up and abandoned rounds
    by_direction: tuple[float, ...]  # up, down, catch-up
    rounds: float
    seconds: float  # over `SLOW` links

    @property
    def bytes(self) -> MeanInterval:
        """All bytes, over seeds."""
        found = MeanInterval.of(self.by_seed.values())
        assert found  # a target that no seed reached has no cost
        return found


Costs = dict[float, list[TargetCost | None]]  # by target, for each group


class SeedGroup(NamedTuple):
    """Runs of one configuration, one per seed."""

    label: str
    runs: list[SavedRun]
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
    def failed(self) -> list[SavedRun]:
        """Its runs that diverged, collapsed or are at chance."""
        return [run for run in self.runs if run.verdict.status in BROKEN]

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

    @property
    def best(self) -> MeanInterval | None:
        """The best value of its objective in each run, over seeds."""
        return MeanInterval.of(self.best_of(run) for run in self.runs)

    @property
    def final(self) -> MeanInterval | None:
        """The last value of its objective in each run, over seeds."""
        return self.final_of("")

    def final_of(self, metric: str) -> MeanInterval | None:
        """The last value of a metric (see `values`) in each run, over seeds."""
        return MeanInterval.of(next(reversed(self.values(run, metric)), None) for run in self.runs)

    def values(self, run: SavedRun, metric: str = "") -> list[float]:
        """The values of a metric (see `metric_value`), by default its objective, in the evaluated rounds of a run."""
        found = (metric_value(record, metric or objective_key(self.objective)) for record in run.records)
        return [value for value in found if value is not None]

    def best_of(self, run: SavedRun) -> float | None:
        """The best value of its objective in a run; None if it has none."""
        return (max if self.objective.higher_is_better else min)(self.values(run), default=None)

    def until(self, run: SavedRun, target: float) -> list[Record]:
        """The rounds of a run up to the first that reaches a target; empty if none does."""
        for i, record in enumerate(run.records):
            value = metric_value(record, objective_key(self.objective))
            if value is not None and not self.objective.better(target, value):
                return run.records[: i + 1]
        return []

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

    def cost_to_reach(self, target: float, compute: float | None = None) -> TargetCost | None:
        """The cost of reaching a target; None if no seed reached it.

        Args:
            target: a value of the objective; an accuracy from 0 to 1.
            compute: training seconds of a client per round; as measured by default.
        """
        pairs = zip(self.seeds, self.runs, strict=True)
        spent = {seed: part for seed, run in pairs if (part := self.until(run, target))}
        if not spent:
            return None
        sums = [totals(part) for part in spent.values()]
        ways = (statistics.fmean(one[f"bytes_{way}"] for one in sums) for way in ("up", "down", "catchup"))
        time = statistics.fmean(seconds(part, link(SLOW), compute) for part in spent.values())
        by_seed = dict(zip(spent, (one["bytes_total"] for one in sums), strict=True))
        return TargetCost(by_seed, tuple(ways), statistics.fmean(map(len, spent.values())), time)


def group(runs: Sequence[SavedRun]) -> list[SeedGroup]:
    """One group per configuration, in order of first appearance, with unique labels."""
    by_config: dict[str, dict[int, SavedRun]] = {}
    for run in runs:
        by_seed = by_config.setdefault(dumps(without_seed(run.table)), {})
        seed = run.table.get("seed", 0)
        if seed not in by_seed or len(by_seed[seed].records) < len(run.records):  # a copy of a run counts once
            by_seed[seed] = run
    groups = [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in by_config.values()]
    labels = unique_labels([members[0].name for members in groups], [members[0].table for members in groups])
    ranked = objectives([next((run for run in members if run.summary), members[0]) for members in groups])
    return [SeedGroup(*parts) for parts in zip(labels, groups, ranked, strict=True)]


def without_seed(config: TomlTable) -> TomlTable:
    """A configuration without the keys that runs of one group may differ in.

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


def unique_labels(names: Sequence[str], configs: Sequence[TomlTable]) -> list[str]:
    """Names of configurations; those with the same name also get the settings in which they differ, or a number.

    >>> unique_labels(["a", "a", "b"], [{"k": 1}, {"k": 2}, {}])
    ['a (k 1)', 'a (k 2)', 'b']
    """
    labels: list[str] = []
    for name, config in zip(names, configs, strict=True):
        same_name = [without_seed(other) for other, its in zip(configs, names, strict=True) if its == name]
        values = flat(config)
        texts = [f"{path.rsplit('.', 1)[-1]} {values[path]}" for path in differing(same_name) if path in values]
        labels.append(f"{name} ({', '.join(texts[:3])})" if texts else name)
    before = [labels[:i].count(label) for i, label in enumerate(labels)]
    return [f"{label} #{count + 1}" if count else label for label, count in zip(labels, before, strict=True)]


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


def objective_name(objective: Objective) -> str:
    """The name of an objective in titles, on one line: `test loss`, `r2`."""
    return visible(objective.label, 60)


def objectives(runs: Sequence[SavedRun]) -> list[Objective]:
    """The objective of each run of a task; of one without a summary, the first of the others' that it has recorded."""
    stated = [recorded_objective(run.summary) for run in runs]
    known = dict.fromkeys((*filter(None, stated), ACCURACY, Objective("loss", higher_is_better=False)))

    def has(run: SavedRun, objective: Objective) -> bool:
        return any(metric_value(record, objective_key(objective)) is not None for record in run.records)

    pairs = zip(runs, stated, strict=True)
    return [own or next((one for one in known if has(run, one)), ACCURACY) for run, own in pairs]


def target_text(objective: Objective, target: float) -> str:
    """A target in a sentence.

    >>> target_text(ACCURACY, 0.9), target_text(Objective("loss", False), 2912.0)
    ('90 %', 'test loss 2,912')
    """
    return percent_text(target) if objective == ACCURACY else f"{objective_name(objective)} {number_text(target)}"


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


def value_text(objective: Objective | None, value: MeanInterval | None) -> str:
    """Mean and standard deviation over seeds: accuracy in percent, others in their own unit.

    >>> value_text(ACCURACY, MeanInterval.of([0.5, 0.7])), value_text(None, MeanInterval.of([2912.4]))
    ('60.00 ± 14.14', '2,912')
    """
    if value is None:
        return "-"
    if objective == ACCURACY:
        mean, std = f"{100 * value.mean:.2f}", f"{100 * value.std:.2f}"
    else:
        mean, std = number_text(value.mean), number_text(value.std, 2)
    return mean if value.half is None else f"{mean} ± {std}"


def _interval_text(objective: Objective, value: MeanInterval | None) -> str:
    """The 95 % interval of the mean of an objective."""
    if value is None or value.half is None:
        return "-"
    low, high = value.mean - value.half, value.mean + value.half
    if objective == ACCURACY:
        return f"{100 * max(0.0, low):.1f} to {100 * min(1.0, high):.1f}"
    return f"{number_text(low)} to {number_text(high)}"


def result_columns(groups: Sequence[SeedGroup], interval: bool = False) -> dict[str, list[str]]:
    """The columns of a table with one row for each group: objective, metrics, and clients with the lowest accuracy."""
    columns = {}
    for one in dict.fromkeys(group.objective for group in groups):
        unit = "%" if one == ACCURACY else objective_name(one)
        own = [group if group.objective == one else None for group in groups]
        columns[f"final {unit}"] = [value_text(one, group and group.final) for group in own]
        columns[f"best {unit}"] = [value_text(one, group and group.best) for group in own]
        if interval:
            columns["95 % interval"] = [_interval_text(one, group and group.final) for group in own]
    found, ranked = [group.metrics for group in groups], [group.objective.name for group in groups]
    for name in dict.fromkeys(name for metrics in found for name in metrics if name not in ranked):
        columns[visible(name, 60)] = [value_text(None, metrics.get(name)) for metrics in found]
    worst = [group.clients.get("worst_10") for group in groups]
    return columns | ({WORST_CLIENTS: [value_text(ACCURACY, value) for value in worst]} if any(worst) else {})


def byte_columns(groups: Sequence[SeedGroup]) -> dict[str, list[str]]:
    """The columns with bytes of a table with one row for each group."""
    heads = {"up": "bytes_up", "down": "bytes_down", "catch-up": "bytes_catchup", "abandoned": "bytes_abandoned"}
    heads |= {"total": "bytes_total_honest", "ideal": "bytes_total_ideal"}
    sent = {head: [group.total(key) for group in groups] for head, key in heads.items()}
    return {head: list(map(human_bytes, own)) for head, own in sent.items() if head != "abandoned" or any(own)}


# -- the baseline ------------------------------------------------------------------------------------------------------


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
    found = [group for group in groups if group.runs[0].name == BASELINE]
    return max(found, key=_rank) if found else groups[0]


def _rank(group: SeedGroup) -> tuple[bool, float]:
    sign = 1 if group.objective.higher_is_better else -1
    return not group.failed, sign * group.best.mean if group.best else -math.inf


def untuned(groups: Sequence[SeedGroup], baseline: SeedGroup) -> str:
    """One sentence if FedAvg has one setting only and no record of a search; else empty."""
    found = [group for group in groups if group.runs[0].name == BASELINE]
    if len(groups) < 2 or len(found) != 1 or any(read_search(run.path) for run in baseline.runs):
        return ""
    return (
        f"{baseline.label} ran with one setting only and without a search, so a tuned {BASELINE} may need fewer bytes."
    )


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
            (cost, group)
            for group, cost in zip(groups, costs[target], strict=True)
            if cost
            and len(cost.by_seed) == len(group.runs)
            and not group.failed  # a collapsed run lost what it had reached
        ]
        if theirs is None or len(able) < 2:
            continue
        least, best = min(able, key=lambda pair: pair[0].bytes.mean)
        goal = target_text(baseline.objective, target)
        start = f"Fewest bytes to reach {goal}: {best.label}, {human_bytes(least.bytes.mean)} in total"
        saving = Saving.of(theirs.by_seed, least.by_seed)
        if best is baseline or saving is None:
            return f"{start}."
        total = human_bytes(theirs.bytes.mean)
        factor = f"{saving.factor:.3g} times fewer than" if f"{saving.factor:.3g}" != "1" else "as many as"
        return f"{start}, {factor} {baseline.label} ({total}; {saving.text})."
    return ""
