"""Table of several methods on one task: their objective, bytes and times, averaged over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.experiments.collapse import count_broken
from thinwire.experiments.link_time import LINKS
from thinwire.metrics.objective import Objective
from thinwire.reports.seed_groups import ACCURACY, numbers_of, without_accuracy

Summary = dict[str, Any]


class MeanStd(NamedTuple):
    """A mean, and the standard deviation over seeds (0 for one seed)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanStd | None:
        """Of the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0) if known else None


class ComparisonRow(NamedTuple):
    """One method of a comparison; means over seeds."""

    method: str
    seeds: int
    final_accuracy: MeanStd | None
    best_accuracy: MeanStd | None
    bytes_up: float
    bytes_down: float
    bytes_catchup: float
    bytes_total: float  # by the accounting of the runs
    ratio: float | None  # bytes of the baseline divided by bytes_total, by the same accounting
    seconds: float
    accounting: str
    bytes_total_honest: float
    bytes_total_ideal: float
    seconds_by_link: dict[str, float]  # empty for runs of versions that did not record it
    broken: str = "-"  # how many runs diverged, collapsed or ended at chance, as text
    final_metrics: Mapping[str, MeanStd] = {}
    final_clients_eval: Mapping[str, MeanStd] = {}  # distribution of accuracy over clients
    bytes_abandoned: float = 0.0  # of rounds before a run went back; in bytes_total_honest
    objective: Objective = ACCURACY
    final: MeanStd | None = None  # of the objective
    best: MeanStd | None = None
    compared_with: str = ""  # the method of which the ratio has the bytes

    @property
    def worst_clients(self) -> MeanStd | None:
        """Mean accuracy of the 10 % of clients with the lowest accuracy; None if it was not measured."""
        return self.final_clients_eval.get("worst_10")


def table(summaries: Sequence[Summary]) -> list[ComparisonRow]:
    """One row per method, in order of first appearance.

    The ratio compares with FedAvg on the same task (the setting that is best by the objective), or else with the first
    method.
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    # runs with different accounting are compared by all their bytes
    accounting = "ideal" if all(summary["accounting"] == "ideal" for summary in summaries) else "honest"
    return [_row(method, group, _baseline(group, groups), accounting) for method, group in groups.items()]


def _row(method: str, group: Sequence[Summary], baseline: Sequence[Summary], accounting: str) -> ComparisonRow:
    key = f"bytes_total_{accounting}"
    total, objective = _mean(group, key), _objective(group)
    return ComparisonRow(
        method,
        len(group),
        MeanStd.of(summary["final_accuracy"] for summary in group),
        MeanStd.of(summary["best_accuracy"] for summary in group),
        _mean(group, "bytes_up"),
        _mean(group, "bytes_down"),
        _mean(group, "bytes_catchup"),
        total,
        _mean(baseline, key) / total if total else None,
        _mean(group, "seconds"),
        accounting,
        _mean(group, "bytes_total_honest"),
        _mean(group, "bytes_total_ideal"),
        _seconds_by_link(group),
        count_broken(summary.get("status") for summary in group),
        means([without_accuracy(numbers_of(summary.get("final_metrics"))) for summary in group]),
        means([numbers_of(summary.get("final_clients_eval")) for summary in group]),
        statistics.fmean(summary.get("bytes_abandoned", 0) for summary in group),
        objective,
        _ranked(group, "final"),
        _ranked(group, "best"),
        baseline[0]["method"],
    )


def _baseline(group: Sequence[Summary], groups: Mapping[str, list[Summary]]) -> list[Summary]:
    """The best FedAvg runs on the task of a group by the same objective, or else the first runs of that task."""
    same = [one for one in groups.values() if one[0].get("task") == group[0].get("task")]
    objective = _objective(group)
    tested = [one for one in same if one[0].get("name", one[0]["method"]) == "fedavg" and _objective(one) == objective]
    found = tested[0] if tested else same[0]
    for one in tested[1:]:
        ours, theirs = _ranked(one, "best"), _ranked(found, "best")
        if objective.better(ours.mean if ours else None, theirs.mean if theirs else None):
            found = one
    return found


def _objective(group: Sequence[Summary]) -> Objective:
    """The objective of a group; accuracy for runs of versions that did not record one."""
    entry = group[0].get("objective")
    if not isinstance(entry, Mapping) or not isinstance(name := entry.get("name"), str):
        return ACCURACY
    return Objective(name, entry.get("higher_is_better") is not False)


def _ranked(group: Sequence[Summary], end: str) -> MeanStd | None:
    """The `best` or `final` value of the objective."""
    if _objective(group) == ACCURACY:
        return MeanStd.of(summary[f"{end}_accuracy"] for summary in group)
    return MeanStd.of(numbers_of(summary.get("objective")).get(end) for summary in group)


def metric_names(rows: Sequence[ComparisonRow]) -> list[str]:
    """Names of the metrics of some rows beside their objective, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.final_metrics if name != row.objective.name))


def means(values: Sequence[Mapping[str, float]]) -> dict[str, MeanStd]:
    """Mean and standard deviation by name, over the seeds that have the name.

    >>> means([{"f1": 0.5}, {"f1": 0.5, "auc": 0.75}])
    {'f1': MeanStd(mean=0.5, std=0.0), 'auc': MeanStd(mean=0.75, std=0.0)}
    """
    names = dict.fromkeys(name for value in values for name in value)
    found = {name: MeanStd.of(value.get(name) for value in values) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def as_json(rows: Sequence[ComparisonRow]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [{key: _plain(value) for key, value in row._asdict().items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, MeanStd):
        return value._asdict()
    if isinstance(value, Objective):
        return {"name": value.name, "higher_is_better": value.higher_is_better}
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _mean(group: Sequence[Summary], key: str) -> float:
    return statistics.fmean(summary[key] for summary in group)


def _seconds_by_link(group: Sequence[Summary]) -> dict[str, float]:
    known = [summary.get("seconds_by_link") for summary in group]
    if not all(known):
        return {}
    return {link.name: statistics.fmean(times[link.name] for times in known if times) for link in LINKS}
