"""Several methods on one task, over several seeds: the same clients, the same batches, one table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from thinwire.experiments.collapse import count_broken
from thinwire.experiments.link_time import LINKS

Summary = dict[str, Any]


class MeanStd(NamedTuple):
    """A mean, and the standard deviation over seeds (0 for one seed)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanStd | None:
        """Of the numbers that are there; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0) if known else None


class Row(NamedTuple):
    """One method of a comparison."""

    method: str
    seeds: int
    final_accuracy: MeanStd | None
    best_accuracy: MeanStd | None
    bytes_up: float
    bytes_down: float
    bytes_catchup: float
    bytes_total: float  # by the accounting that was asked for
    ratio: float | None  # how many times fewer bytes than the yardstick, by the same
    seconds: float
    accounting: str
    bytes_total_honest: float
    bytes_total_ideal: float
    seconds_by_link: dict[str, float]  # see `network`; empty for runs of versions that did not know it
    broken: str = "-"  # how many runs collapsed, diverged or ended at chance, in words


def table(summaries: Sequence[Summary]) -> list[Row]:
    """A row for each method, in the order of first appearance; the yardstick is FedAvg, or else the first."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    # what is counted in two ways is compared by the one that leaves nothing out
    accounting = "ideal" if all(summary["accounting"] == "ideal" for summary in summaries) else "honest"
    counted = f"bytes_total_{accounting}"
    yardstick = _mean(groups.get("fedavg") or next(iter(groups.values())), counted) if groups else 0.0
    rows = []
    for method, group in groups.items():
        total = _mean(group, counted)
        rows.append(
            Row(
                method,
                len(group),
                MeanStd.of(summary["final_accuracy"] for summary in group),
                MeanStd.of(summary["best_accuracy"] for summary in group),
                _mean(group, "bytes_up"),
                _mean(group, "bytes_down"),
                _mean(group, "bytes_catchup"),
                total,
                yardstick / total if total else None,
                _mean(group, "seconds"),
                accounting,
                _mean(group, "bytes_total_honest"),
                _mean(group, "bytes_total_ideal"),
                _by_link(group),
                count_broken(summary.get("status") for summary in group),
            )
        )
    return rows


def _mean(group: Sequence[Summary], key: str) -> float:
    return statistics.fmean(summary[key] for summary in group)


def _by_link(group: Sequence[Summary]) -> dict[str, float]:
    known = [summary.get("seconds_by_link") for summary in group]
    if not all(known):
        return {}
    return {link.name: statistics.fmean(times[link.name] for times in known if times) for link in LINKS}


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [
        {key: value._asdict() if isinstance(value, MeanStd) else value for key, value in row._asdict().items()}
        for row in rows
    ]
