"""Summary of a metric over clients."""

import math

import numpy as np
import pytest

from thinwire.errors import ConfigError
from thinwire.metrics import summarize


@pytest.mark.parametrize(("count", "lowest"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (250, 25)])
def test_worst_tenth_is_the_mean_of_the_lowest_values(count, lowest):
    values = np.random.default_rng(count).random(count).tolist()
    found = summarize(values)
    assert found["worst_10"] == pytest.approx(sum(sorted(values)[:lowest]) / lowest)
    assert found["mean"] == pytest.approx(sum(values) / count)
    assert found["count"] == count
    assert [found["p10"], found["p50"], found["p90"]] == np.quantile(values, [0.1, 0.5, 0.9]).tolist()


def test_the_order_of_clients_does_not_matter():
    assert summarize([0.1, 0.4, 0.9, 0.2]) == summarize([0.9, 0.2, 0.4, 0.1])


def test_nan_of_one_client_is_not_hidden():
    found = summarize([0.5] * 20 + [math.nan])
    assert all(math.isnan(value) for name, value in found.items() if name != "count")
    assert found["count"] == 21


def test_no_clients_are_an_error():
    with pytest.raises(ConfigError, match="no clients to summarize"):
        summarize([])
