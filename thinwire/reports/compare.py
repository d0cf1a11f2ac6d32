"""Table of several methods on one task: accuracy, bytes and times, averaged over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.experiments.collapse import count_broken
from thinwire.experiments.link_time import LINKS
from thinwire.reports.evaluation import numbers_of, without_accuracy

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

    @property
    def worst_clients(self) -> MeanStd | None:
        """Mean accuracy of the 10 % of clients with the lowest accuracy; None if it was not measured."""
        return self.final_clients_eval.get("worst_10")


def table(summaries: Sequence[Summary]) -> list[ComparisonRow]:
    """One row per method, in order of first appearance; the baseline is FedAvg, or else the first method."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    # runs with different accounting are compared by all their bytes
    accounting = "ideal" if all(summary["accounting"] == "ideal" for summary in summaries) else "honest"
    key = f"bytes_total_{accounting}"
    baseline = _mean(groups.get("fedavg") or next(iter(groups.values())), key) if groups else 0.0
    rows = []
    for method, group in groups.items():
        total = _mean(group, key)
        rows.append(
            ComparisonRow(
                method,
                len(group),
                MeanStd.of(summary["final_accuracy"] for summary in group),
                MeanStd.of(summary["best_accuracy"] for summary in group),
                _mean(group, "bytes_up"),
                _mean(group, "bytes_down"),
                _mean(group, "bytes_catchup"),
                total,
                baseline / total if total else None,
                _mean(group, "seconds"),
                accounting,
                _mean(group, "bytes_total_honest"),
                _mean(group, "bytes_total_ideal"),
                _seconds_by_link(group),
                count_broken(summary.get("status") for summary in group),
                means([without_accuracy(numbers_of(summary.get("final_metrics"))) for summary in group]),
                means([numbers_of(summary.get("final_clients_eval")) for summary in group]),
                statistics.fmean(summary.get("bytes_abandoned", 0) for summary in group),
            )
        )
    return rows


def metric_names(rows: Sequence[ComparisonRow]) -> list[str]:
    """Names of the metrics of some rows, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.final_metrics))


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
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _mean(group: Sequence[Summary], key: str) -> float:
    return statistics.fmean(summary[key] for summary in group)


def _seconds_by_link(group: Sequence[Summary]) -> dict[str, float]:
    known = [summary.get("seconds_by_link") for summary in group]
    if not all(known):
        return {}
    return {link.name: statistics.fmean(times[link.name] for times in known if times) for link in LINKS}
