"""Summary of a metric over clients: the mean hides clients for which a model works badly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.errors import ConfigError


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Summarize the values of a metric of which more is better, one of each client. NaN in any value gives NaN.

    `worst_10` is the mean of the lowest tenth of the values, of at least one; quantiles are linear between two values.

    >>> summarize(range(11))
    {'count': 11, 'mean': 5.0, 'worst_10': 0.0, 'p10': 1.0, 'p50': 5.0, 'p90': 9.0}
    """
    if not len(values):
        raise ConfigError("no clients to summarize; give one value for each client")
    ordered = np.sort(np.asarray(values, np.float64))
    lowest = ordered if np.isnan(ordered).any() else ordered[: max(1, len(ordered) // 10)]
    found = {"count": len(ordered), "mean": float(ordered.mean()), "worst_10": float(lowest.mean())}
    return found | dict(zip(("p10", "p50", "p90"), np.quantile(ordered, (0.1, 0.5, 0.9)).tolist(), strict=True))
