"""Mixing with nearest neighbors: against its definition, and where honest clients differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigError


def trees(points) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.as_tensor(point, dtype=torch.float32)} for point in points]


def test_each_update_becomes_the_mean_of_its_nearest():
    points = torch.randn(9, 5, generator=torch.Generator().manual_seed(3)).numpy()
    mixed, weights = tw.aggregators.NearestMixing(faulty=3).admit(trees(points), [1e9] * 9)
    assert weights == [1.0] * 9
    for i, point in enumerate(points):
        nearest = np.argsort(((points - point) ** 2).sum(1))[:6]
        np.testing.assert_allclose(mixed[i]["w"], points[nearest].mean(0), rtol=1e-5, atol=1e-6)


def test_the_mean_of_different_honest_clients_survives_far_attackers():
    """Two groups of honest clients: the geometric median alone is near one of them."""
    honest = [[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 3
    everyone = trees([*honest, [-20.0, -20.0], [-20.0, -20.0]])
    mixing = tw.aggregators.NearestMixing(faulty=2)
    mean = mixing.of(*mixing.admit(everyone, [1.0] * 10))["w"]
    np.testing.assert_allclose(mean, [5 / 8, 3 / 8], atol=1e-5)
    alone = tw.aggregators.GeometricMedian().of(everyone, [1.0] * 10)["w"]
    assert (alone - torch.tensor([5 / 8, 3 / 8])).norm() > 0.2


def test_few_responses_are_mixed_with_fewer_faulty_clients():
    codes, weights = tw.aggregators.NearestMixing(faulty=3).admit(trees([[1.0], [2.0]]), [1.0, 1.0])
    assert [code["w"].item() for code in codes] == [1.0, 2.0]
    assert weights == [1.0, 1.0]


def test_errors_are_one_line():
    with pytest.raises(ConfigError, match="or an integer number of clients, not"):
        tw.aggregators.NearestMixing(faulty=0.7)
    with pytest.raises(ConfigError, match=r"with 4 faulty clients needs 9 clients in a round .*, not 8"):
        tw.aggregators.NearestMixing(faulty=4).check(8)
