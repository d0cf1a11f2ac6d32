"""Each update mixed with its nearest neighbors, in front of a robust aggregator: for clients with different data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import Aggregator, refuse_of_values
from thinwire.aggregators.distances import inner_products, squares_between
from thinwire.aggregators.robust import GeometricMedian, check_faulty, count_faulty
from thinwire.core.registry import register
from thinwire.core.tree import Tree, weighted_mean
from thinwire.errors import ConfigError


@register("aggregator", "nearest-mixing", paper="Allouah et al., AISTATS 2023")
@dataclass(frozen=True)
class NearestMixing(Aggregator):
    """Replace each update by the mean of the updates nearest to it, then aggregate.

        x_i <- mean of the clients - faulty updates nearest to x_i, itself included

    Honest clients with different data send different updates, and a robust rule takes some of them for faulty ones.
    After mixing they are almost equal. Weights are ignored, because clients report them.

    Args:
        faulty: number of Byzantine clients in a round; below 1, a share of the clients that responded.
        inner: the aggregator of the mixed updates.

    >>> import torch
    >>> updates = [{"w": torch.tensor([x])} for x in (-1.0, 0.0, 1.0, 100.0)]
    >>> mixed, _ = NearestMixing(faulty=1).admit(updates, [1.0] * 4)
    >>> [one["w"].item() for one in mixed]
    [0.0, 0.0, 0.0, 33.66666793823242]

    Paper: Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity (Allouah et al., AISTATS 2023).
    """

    faulty: float = 0.3
    inner: Aggregator = GeometricMedian()

    def __post_init__(self) -> None:
        check_faulty(self.faulty)
        refuse_of_values(self.inner)

    @property
    def clips(self) -> bool:
        """Whether the inner aggregator clips updates."""
        return self.inner.clips

    def check(self, clients: int) -> None:
        """Raise a ConfigError if half of the clients or more are faulty, or if the inner aggregator cannot be used."""
        faulty = count_faulty(self.faulty, clients)
        if 2 * faulty >= clients:
            raise ConfigError(
                f"nearest-mixing with {faulty} faulty clients needs more than {2 * faulty} clients in a round, not "
                f"{clients}; write a smaller method.aggregator.faulty or a larger cohort.size"
            )
        self.inner.check(clients)

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """Mix the updates, then apply `admit` of the inner aggregator, with equal weights."""
        clients = len(codes)
        near = clients - min(count_faulty(self.faulty, clients), (clients - 1) // 2)
        if near == clients or not codes[0]:
            return self.inner.admit(codes, [1.0] * clients)
        order = squares_between(inner_products(codes)).sort(dim=1, stable=True).indices[:, :near].tolist()
        mixed = [weighted_mean([codes[j] for j in sorted(nearest)], [1.0] * near) for nearest in order]
        return self.inner.admit(mixed, [1.0] * clients)

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the aggregate of the inner aggregator."""
        return self.inner.of(trees, weights)
