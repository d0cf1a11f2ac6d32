"""Summary of a metric over clients: the mean hides clients for which a model works badly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thinwire.errors import ConfigError


class ClientSummary(NamedTuple):
    """A metric over clients; more is better."""

    mean: float
    worst_10: float  # mean of the lowest tenth of the values, of at least one
    p10: float  # quantiles, linear between two values
    p50: float
    p90: float
    clients: int  # number of clients


def summarize(values: Sequence[float]) -> ClientSummary:
    """Summarize the values of a metric, one of each client. NaN in any value gives NaN.

    >>> summarize(range(11))
    ClientSummary(mean=5.0, worst_10=0.0, p10=1.0, p50=5.0, p90=9.0, clients=11)
    """
    if not len(values):
        raise ConfigError("no clients to summarize; give one value for each client")
    ordered = np.sort(np.asarray(values, np.float64))
    lowest = ordered if np.isnan(ordered).any() else ordered[: max(1, len(ordered) // 10)]
    p10, p50, p90 = np.quantile(ordered, (0.1, 0.5, 0.9)).tolist()
    return ClientSummary(float(ordered.mean()), float(lowest.mean()), p10, p50, p90, len(ordered))
