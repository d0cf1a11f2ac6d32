"""Aggregators that look at a client's whole update, by its distance to the others, and bear a share of liars.

`mean.py` has those that look at each number by itself. Where some clients send anything they like, an update that is
wrong in all its numbers lies far from the others even if each number by itself could be honest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator
from thinwire.aggregators.coordinatewise import Median
from thinwire.aggregators.distances import inner_products, squares_between, squares_from
from thinwire.core.registry import register
from thinwire.core.tree import Tree, weighted_mean
from thinwire.errors import ConfigError

_TINY = 1e-150  # a distance whose inverse is still a number
_ROUNDING = 1e-7  # distances below this share of a client's length are rounding of its inner products


@register("aggregator", "geometric-median", paper="RFA (Pillutla et al., IEEE TSP 2022)")
@dataclass(frozen=True)
class GeometricMedian(Aggregator):
    """The point whose distances to the clients' updates, weighted, add up to least: the geometric median.

        z = argmin_z sum_i p_i |z - x_i|,    by Weiszfeld's iterations:

        w_i = p_i / max(nu, |z - x_i|),    z <- sum_i w_i x_i / sum_i w_i

    The iterations start from w_i = p_i / (median distance of i to the other clients), where an update that is far from
    most of the others hardly counts, however long it is.

    Args:
        iterations: how often z is moved.
        smooth: nu, as a share of the median distance between clients, so that no client's weight is infinite.

    Bears liars as long as the weights of honest clients are more than half of the sum. As a client says its own weight,
    bound it where clients are not trusted: mean = bounded with weight = ... and inner = geometric-median.

    >>> said = [{"w": torch.tensor([x, 0.0])} for x in (0.9, 1.0, 1.1, 1e9)]
    >>> GeometricMedian().of(said, [1.0] * 4)["w"].round(decimals=1).tolist()
    [1.0, 0.0]
    """

    iterations: int = 32
    smooth: float = 1e-6

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)
        if not 0 < self.smooth < 1:
            raise ConfigError(f"smooth must be above 0 and below 1, not {self.smooth}")

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Their geometric median."""
        if len(trees) < 3 or not trees[0]:
            return weighted_mean(trees, weights)
        return weighted_mean(trees, self._shares(inner_products(trees), torch.tensor(weights, dtype=torch.float64)))

    def _shares(self, products: Tensor, weights: Tensor) -> list[float]:
        """How much each client counts in the weighted mean that the geometric median is."""
        weights = weights / weights.sum()
        apart = squares_between(products).sqrt().median(1).values
        least = max(self.smooth * float(apart.median()), _ROUNDING * float(products.diagonal().sqrt().median()), _TINY)
        shares = _shared(weights / apart.clamp(min=least))
        for _ in range(self.iterations):
            shares = _shared(weights / squares_from(products, shares).sqrt().clamp(min=least))
        return list(map(float, shares))


@register("aggregator", "centered-clipping", paper="Karimireddy et al., ICML 2021")
@dataclass(frozen=True)
class CenteredClipping(Aggregator):
    """The mean of updates whose distance to the middle is clipped.

        v <- v + mean_i (x_i - v) min(1, r / |x_i - v|),    starting from the coordinate-wise median

    Args:
        tau: r as a multiple of the median distance of the clients to v, so that it fits any model and round; or r
            itself, if relative is false.
        relative: what tau is measured in.
        iterations: how often v is moved.

    A liar moves v by r / clients at most in an iteration, however far away it is. All clients count alike: weights
    could be lies too. The paper starts from the result of the round before; here nothing is remembered between rounds.

    >>> said = [{"w": torch.tensor([x, 0.0])} for x in (0.9, 1.0, 1.0, 1.0, 1.1, 1e9)]
    >>> CenteredClipping().of(said, [1.0] * 6)["w"].round(decimals=1).tolist()
    [1.0, 0.0]
    """

    tau: float = 0.5
    relative: bool = True
    iterations: int = 10

    def __post_init__(self) -> None:
        _check_iterations(self.iterations)
        if not 0 < self.tau < math.inf:
            raise ConfigError(f"tau must be above 0, not {self.tau}")

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """The middle, moved towards all."""
        start = Median().of(trees, weights)
        if not start:
            return start
        return weighted_mean([start, *trees], self._shares(inner_products([start, *trees])))

    def _shares(self, products: Tensor) -> list[float]:
        """How much the start and each client count in what v ends as: always a weighted mean of these."""
        clients = len(products) - 1
        shares = torch.zeros(clients + 1, dtype=torch.float64)
        shares[0] = 1.0
        for _ in range(self.iterations):
            away = squares_from(products, shares)[1:].sqrt()
            radius = self.tau * (float(_middle(away)) if self.relative else 1.0)
            pull = (radius / away.clamp(min=_TINY)).clamp(max=1.0) / clients
            shares = shares * (1 - pull.sum())
            shares[1:] += pull
        return list(map(float, shares))


@register("aggregator", "multi-krum", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True)
class MultiKrum(Aggregator):
    """The mean of the clients that are closest to their neighbors; all others are left out.

        score_i = sum of |x_i - x_j|^2 over the clients - faulty - 2 closest j;    the mean of the lowest scores

    Args:
        faulty: how many clients of a round may lie; below 1, as a share of those that answered.
        keep: how many are averaged; 0 for all but the faulty ones. 1 is Krum.

    A round must have 2 faulty + 3 clients or more. Where so few answer that this does not hold, it goes by the most
    faulty clients with which it does: none of 4 or fewer, so that these are all averaged.

    Who is left out is decided by the updates, and holds for all else that clients sent, such as buffers and what a
    correction reports. Weights are ignored: they could be lies too.

    >>> said = [{"w": torch.tensor([x])} for x in (0.9, 1.0, 1.1, 1.2, 1e9)]
    >>> MultiKrum(faulty=1).admit(said, [1.0] * 5)[1]
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """

    faulty: float = 0.3
    keep: int = 0

    def __post_init__(self) -> None:
        share = 0 <= self.faulty < 0.5
        if not share and not (self.faulty >= 1 and self.faulty == int(self.faulty)):
            raise ConfigError(f"faulty must be a share below 0.5, or a whole number of clients, not {self.faulty}")
        if self.keep < 0:
            raise ConfigError(f"keep must be 0 (all but the faulty clients) or more, not {self.keep}")

    def check(self, clients: int) -> None:
        """There must be enough clients in a round."""
        faulty = self._wanted(clients)
        if faulty and clients < 2 * faulty + 3:
            raise ConfigError(
                f"multi-krum with {faulty} faulty clients needs {2 * faulty + 3} clients in a round (2 faulty + 3), "
                f"not {clients}; write a smaller method.aggregator.faulty or a larger cohort.size"
            )

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """Weight 1 for those that are averaged, 0 for the others."""
        clients = len(codes)
        faulty = min(self._wanted(clients), max(0, clients - 3) // 2)
        keep = min(self.keep or clients, clients - faulty)
        if keep == clients or not codes[0]:
            return list(codes), [1.0] * clients
        near = squares_between(inner_products(codes)).sort(1).values[:, 1 : max(2, clients - faulty - 1)]
        kept = set(near.sum(1).sort(stable=True).indices[:keep].tolist())
        return list(codes), [float(i in kept) for i in range(clients)]

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """The mean of those that are kept."""
        return weighted_mean(trees, weights)

    def _wanted(self, clients: int) -> int:
        """How many may lie, of so many."""
        return int(self.faulty) if self.faulty >= 1 else math.floor(round(self.faulty * clients, 6))


def _check_iterations(iterations: int) -> None:
    if iterations < 1:
        raise ConfigError(f"iterations must be 1 or more, not {iterations}")


def _shared(weights: Tensor) -> Tensor:
    """Weights that add up to 1; divided by the largest first, whose inverse may be tiny."""
    weights = weights / weights.max()
    return weights / weights.sum()


def _middle(values: Tensor) -> Tensor:
    """The median: of an even number, the mean of the middle two."""
    ascending = values.sort().values
    return (ascending[(len(values) - 1) // 2] + ascending[len(values) // 2]) / 2
