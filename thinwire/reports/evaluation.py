"""Task metrics and the distribution of accuracy over clients, read from records of `metrics.jsonl` and summaries.

    record["metrics"]       {"macro_f1": 0.81, ...}                                       on the test set
    record["clients_eval"]  {"count", "mean", "worst_10", "p10", "p50", "p90"} or null    accuracy of each client

`worst_10` is the mean accuracy of the 10 % of clients with the lowest accuracy; p10, p50 and p90 are percentiles.
Files are not trusted: values that are not finite numbers are ignored, and runs of earlier versions have neither field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

CLIENT_QUANTILES = {"mean": "mean", "worst_10": "worst 10 %", "p10": "p10", "p50": "median", "p90": "p90"}
WORST_CLIENTS = "worst 10 % of clients"


def metric_value(record: Mapping[str, Any], metric: str) -> float | None:
    """The value of a metric in a record; None if the round has none.

    Args:
        record: a line of `metrics.jsonl`.
        metric: a key of the record, `metrics.NAME` or `clients_eval.NAME`.

    >>> record = {"accuracy": 0.9, "metrics": {"macro_f1": 0.8}, "clients_eval": None}
    >>> [metric_value(record, metric) for metric in ("accuracy", "metrics.macro_f1", "clients_eval.p10")]
    [0.9, 0.8, None]
    """
    field, _, name = metric.partition(".")
    if name:
        return numbers_of(record.get(field)).get(name)
    return numbers_of({metric: record.get(metric)}).get(metric)


def numbers_of(value: Any) -> dict[str, float]:
    """The finite numbers of an object, by name; empty for anything else.

    >>> numbers_of({"f1": 0.5, "auc": float("nan"), "note": "x"}), numbers_of(None)
    ({'f1': 0.5}, {})
    """
    if not isinstance(value, Mapping):
        return {}
    return {str(name): float(number) for name, number in value.items() if _is_number(number)}


def final_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of the last round that has any."""
    return _last(records, "metrics")


def final_clients_eval(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The distribution of client accuracy in the last round that has one."""
    return _last(records, "clients_eval")


def without_accuracy(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics other than accuracy, which tables always show."""
    return {name: value for name, value in metrics.items() if name != "accuracy"}


def metric_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of all metrics in some records other than accuracy, in order of first appearance."""
    names = dict.fromkeys(name for record in records for name in numbers_of(record.get("metrics")))
    return [name for name in names if name != "accuracy"]


def _last(records: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    for record in reversed(records):
        if found := numbers_of(record.get(field)):
            return found
    return {}


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )
