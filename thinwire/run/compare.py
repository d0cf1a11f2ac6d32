"""Several methods on one task, over several seeds: the same clients, the same batches, one table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from thinwire.run.folder import Summary


class Spread(NamedTuple):
    """A mean, and the standard deviation over seeds (0 for one seed)."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of the numbers that are there; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0) if known else None


class Row(NamedTuple):
    """One method of a comparison."""

    method: str
    seeds: int
    final_accuracy: Spread | None
    best_accuracy: Spread | None
    bytes_up: float
    bytes_down: float
    bytes_catchup: float
    bytes_total: float
    ratio: float | None  # bytes_total against that of the first method
    seconds: float


def table(summaries: Sequence[Summary]) -> list[Row]:
    """A row for each method, in the order of first appearance; the first (FedAvg, as a rule) is the yardstick."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    rows: list[Row] = []
    for method, group in groups.items():

        def mean(key: str, group: list[Summary] = group) -> float:
            return statistics.fmean(summary[key] for summary in group)

        yardstick = rows[0].bytes_total if rows else mean("bytes_total")
        rows.append(
            Row(
                method,
                len(group),
                Spread.of(summary["final_accuracy"] for summary in group),
                Spread.of(summary["best_accuracy"] for summary in group),
                mean("bytes_up"),
                mean("bytes_down"),
                mean("bytes_catchup"),
                mean("bytes_total"),
                yardstick / mean("bytes_total") if mean("bytes_total") else None,
                mean("seconds"),
            )
        )
    return rows


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [
        {key: value._asdict() if isinstance(value, Spread) else value for key, value in row._asdict().items()}
        for row in rows
    ]


def human_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1000.

    >>> human_bytes(999), human_bytes(1500), human_bytes(2.5e9)
    ('999 B', '1.50 kB', '2.50 GB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 1000 or unit == "TB":
            break
    return f"{count:.2f} {unit}"
