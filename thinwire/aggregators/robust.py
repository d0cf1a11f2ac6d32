"""Robust aggregators that compare whole updates by their distances: geometric median, centered clipping, multi-Krum.

A Byzantine update that differs in every coordinate is far from the others, even if each of its values alone is
plausible.

Robust aggregators that treat each coordinate separately: trimmed mean and median.

Distances between client updates, from the inner products of all pairs.

    |x_i - x_j|^2 = <x_i, x_i> + <x_j, x_j> - 2 <x_i, x_j>

The distance to a convex combination z = sum_j p_j x_j follows from the same products, so an iterative method reads the
updates only once. For 100 clients of 10 million values that is 10^11 multiplications.

Sums are in float64, over slices of the values, in the order of the blocks. A squared distance is exact to about 1e-15
of |x_i|^2 + |x_j|^2; its last bits depend on the order of summation in the BLAS library, so two clients whose distances
differ by less may be ordered differently on another machine. Only the server computes distances.

Each update mixed with its nearest neighbors, in front of a robust aggregator: for clients with different data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator, UpdateFilter, WeightedMean
from thinwire.core.parallel import each
from thinwire.core.registry import register_part
from thinwire.core.text import NonNegativeInt, PositiveFloat, PositiveInt, ProperShare
from thinwire.core.tree import Tree, Vector, weighted_mean
from thinwire.errors import ConfigError

_TINY = 1e-150  # a distance whose inverse is still finite
_ROUNDING = 1e-7  # distances below this share of the norm of an update are rounding of inner products


@register_part("aggregator", "geometric-median", paper="RFA (Pillutla et al., IEEE TSP 2022)")
class GeometricMedian(Aggregator):
    """The geometric median: the point with the least weighted sum of distances to the updates.

        z = argmin_z sum_i p_i |z - x_i|,    by Weiszfeld's iterations:

        w_i = p_i / max(nu, |z - x_i|),    z <- sum_i w_i x_i / sum_i w_i

    The iterations start from w_i = p_i / (median distance of i to the other clients), so that an update far from most
    others has a small weight from the beginning.

    Robust as long as honest clients have more than half of the total weight. Clients report their own weight, so bound
    it: aggregator = bounded with weight = ... and inner = geometric-median.

    Args:
        iterations: number of iterations.
        smooth: nu, as a share of the median distance between clients; it keeps weights finite.

    >>> updates = [{"w": torch.tensor([x, 0.0])} for x in (0.9, 1.0, 1.1, 1e9)]
    >>> GeometricMedian().of(updates, [1.0] * 4)["w"].round(decimals=1).tolist()
    [1.0, 0.0]

    Not `Median`, which is the median of each coordinate.
    """

    iterations: PositiveInt = 32
    smooth: ProperShare = 1e-6

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the geometric median; of fewer than three clients, the weighted mean."""
        if len(trees) < 3 or not trees[0]:
            return weighted_mean(trees, weights)
        products = inner_products(trees)
        given = torch.tensor(weights, dtype=torch.float64)
        given = given / given.sum()
        distance = squares_between(products).sqrt().median(1).values
        least = max(
            self.smooth * float(distance.median()), _ROUNDING * float(products.diagonal().sqrt().median()), _TINY
        )
        shares = _normalized(given / distance.clamp(min=least))
        for _ in range(self.iterations):
            shares = _normalized(given / squares_from(products, shares).sqrt().clamp(min=least))
        return weighted_mean(trees, shares.tolist())


@register_part("aggregator", "centered-clipping", paper="Karimireddy et al., ICML 2021")
class CenteredClipping(Aggregator):
    """The mean of updates whose distance to a center is clipped.

        v <- v + mean_i (x_i - v) min(1, r / |x_i - v|),    starting from the coordinate-wise median

    A Byzantine client moves v by at most r / clients in an iteration. Weights are ignored, because clients report them.
    The paper starts from the result of the previous round; this aggregator has no state.

    Args:
        tau: r as a multiple of the median distance of the clients to v, which suits any model and round; or r itself,
            if relative is false.
        relative: whether tau is a multiple.
        iterations: number of iterations.

    >>> updates = [{"w": torch.tensor([x, 0.0])} for x in (0.9, 1.0, 1.0, 1.0, 1.1, 1e9)]
    >>> CenteredClipping().of(updates, [1.0] * 6)["w"].round(decimals=1).tolist()
    [1.0, 0.0]

    Not `Bounded`, which clips the norm of updates.
    """

    tau: PositiveFloat = 0.5
    relative: bool = True
    iterations: PositiveInt = 10

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the center after all iterations."""
        start = Median().of(trees, weights)
        if not start:
            return start
        points = [start, *trees]
        products, clients = inner_products(points), len(trees)
        shares = torch.zeros(clients + 1, dtype=torch.float64)  # of the median and of the clients in v
        shares[0] = 1.0
        for _ in range(self.iterations):
            distance = squares_from(products, shares)[1:].sqrt()
            radius = self.tau * (float(np.median(distance)) if self.relative else 1.0)
            step = (radius / distance.clamp(min=_TINY)).clamp(max=1.0) / clients
            shares = shares * (1 - step.sum())
            shares[1:] += step
        return weighted_mean(points, shares.tolist())


@register_part("aggregator", "multi-krum", paper="Blanchard et al., NeurIPS 2017")
class MultiKrum(WeightedMean):
    """The mean of the updates that are closest to their neighbors.

        score_i = sum of |x_i - x_j|^2 over the clients - faulty - 2 closest j;    the mean of the lowest scores

    Reports of a correction and buffers, where clients send them, have scores of their own. All are divided by their
    medians, and the mean of these is added to the score of the update: so a client is excluded for its buffers, too.

    A round needs at least 2 faulty + 3 clients. If fewer respond, the number of faulty clients is reduced until this
    holds; with 4 or fewer clients it is 0, and all are averaged.

    The selection applies to everything that clients sent. Weights are ignored, because clients report them.

    Args:
        faulty: number of Byzantine clients in a round; below 1, a share of the clients that responded.
        keep: number of clients that are averaged; 0 for all except the faulty ones. 1 is Krum.

    >>> updates = [{"w": torch.tensor([x])} for x in (0.9, 1.0, 1.1, 1.2, 1e9)]
    >>> MultiKrum(faulty=1).admit(updates, [1.0] * 5)[1]
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """

    is_weighted_mean = False
    faulty: float = 0.3
    keep: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_faulty(self.faulty)

    def check(self, clients: int) -> None:
        """Raise a ConfigError for fewer than 2 faulty + 3 clients."""
        check_enough("multi-krum", self.faulty, clients, more=3)

    def admit(
        self, codes: Sequence[Tree], weights: Sequence[float], beside: Sequence[Sequence[Tree]] = ()
    ) -> tuple[list[Tree], list[float]]:
        """Return weight 1 for clients that are averaged, 0 for the others."""
        clients = len(codes)
        faulty = min(count_faulty(self.faulty, clients), max(0, clients - 3) // 2)
        keep = min(self.keep or clients, clients - faulty)
        if keep == clients or not codes[0]:
            return list(codes), [1.0] * clients

        def scores(trees: Sequence[Tree]) -> Tensor:
            near = squares_between(inner_products(trees)).sort(1).values[:, 1 : max(2, clients - faulty - 1)].sum(1)
            return near / middle if (middle := near.median()) > 0 else torch.zeros_like(near)

        total = sum(map(scores, beside), scores(codes) * max(1, len(beside)))
        kept = set(total.sort(stable=True).indices[:keep].tolist())
        return list(codes), [float(i in kept) for i in range(clients)]


def check_faulty(faulty: float) -> None:
    """Raise a ConfigError unless this is a share below 0.5 or a number of clients."""
    if not 0 <= faulty < 0.5 and not (faulty >= 1 and faulty == int(faulty)):
        raise ConfigError(f"faulty must be a share below 0.5, or an integer number of clients, not {faulty}")


def count_faulty(faulty: float, clients: int) -> int:
    """Return the number of faulty clients of a round with so many clients.

    >>> count_faulty(3, 20), count_faulty(0.2, 20)
    (3, 4)
    """
    return int(faulty) if faulty >= 1 else math.floor(round(faulty * clients, 6))


def check_enough(rule: str, faulty: float, clients: int, more: int) -> None:
    """Raise a ConfigError unless a round has so many clients more than two for each faulty one."""
    count = count_faulty(faulty, clients)
    if count and clients < 2 * count + more:
        raise ConfigError(
            f"{rule} with {count} faulty clients needs {2 * count + more} clients in a round (2 faulty + {more}), not "
            f"{clients}; write a smaller method.aggregator.faulty or a larger cohort.size"
        )


def _normalized(weights: Tensor) -> Tensor:
    """Return weights that sum to 1; divided by the largest first, so that the sum does not overflow."""
    weights = weights / weights.max()
    return weights / weights.sum()


SLICE = 1 << 15  # values of each client that are sorted together: memory grows with this, not with the model


@register_part("aggregator", "trimmed", paper="Yin et al., ICML 2018")
class TrimmedMean(Aggregator):
    """Of each coordinate, drop the largest and the smallest values of the clients and average the others.

        k = floor(share * clients);   mean of x_(k+1) ... x_(clients-k),   unweighted

    Up to k Byzantine clients cannot move the result outside the range of the honest values. Weights are ignored,
    because clients report them.

    Args:
        share: share of the clients that is dropped at either end, from 0 to below 0.5.

    >>> updates = [{"w": torch.tensor([x])} for x in (1.0, 2.0, 3.0, 1e9)]
    >>> TrimmedMean(0.25).of(updates, [1.0] * 4)["w"].tolist()
    [2.5]
    """

    share: Annotated[float, "[0, 0.5)"] = 0.1

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the trimmed mean of each coordinate."""
        return _middle_means(trees, math.floor(self.share * len(trees)))


@register_part("aggregator", "median", paper="Yin et al., ICML 2018")
class Median(Aggregator):
    """Of each coordinate, the median of the clients' values (of an even number of clients, the mean of the middle two).

    Weights are ignored. With sparse uploads the median is zero wherever fewer than half of the clients send a value.

    >>> Median().of([{"w": torch.tensor([x])} for x in (1.0, 2.0, 1e9)], [1.0] * 3)["w"].tolist()
    [2.0]

    Not `GeometricMedian`, which is the median of whole updates.
    """

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the median of each coordinate."""
        return _middle_means(trees, (len(trees) - 1) // 2)


def _middle_means(trees: Sequence[Tree], cut: int) -> Tree:
    """Return the mean of the clients' values of each coordinate without the `cut` largest and smallest."""
    return {name: _middle_mean([tree[name] for tree in trees], cut) for name in trees[0]}


def _middle_mean(blocks: Sequence[Tensor], cut: int) -> Tensor:
    flat = [block.reshape(-1) for block in blocks]
    out = torch.empty_like(flat[0])
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype  # numpy sorts these quickly

    def aggregate(start: int) -> None:
        here = slice(start, start + SLICE)
        values = torch.stack([vector[here] for vector in flat]).to(wide)
        out[here] = torch.from_numpy(np.sort(values.numpy(), axis=0)[cut : len(flat) - cut]).mean(0)

    each(aggregate, range(0, len(out), SLICE), len(flat) * min(SLICE, len(out)) * out.element_size())
    return out.view(blocks[0].shape)


def inner_products(trees: Sequence[Tree]) -> Tensor:
    """Return <x_i, x_j> for all pairs of trees, as a matrix of float64.

    >>> inner_products([{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])}]).tolist()
    [[25.0, 3.0], [3.0, 1.0]]
    """
    out = torch.zeros(len(trees), len(trees), dtype=torch.float64)
    for vectors in _blocks(trees):
        for start in range(0, len(vectors[0]), SLICE):
            rows = torch.stack([vector[start : start + SLICE] for vector in vectors]).double()
            out += rows @ rows.T
    return out


def _blocks(trees: Sequence[Tree]) -> list[list[Tensor]]:
    """Return for each block the vectors of all clients; a single block if every tree is one vector."""
    if all(isinstance(tree, Vector) and tree.spec.names == trees[0].spec.names for tree in trees):  # type: ignore[attr-defined]
        return [[tree.data for tree in trees]]  # type: ignore[attr-defined]
    return [[tree[name].reshape(-1) for tree in trees] for name in trees[0]]


def squares_between(products: Tensor) -> Tensor:
    """Return |x_i - x_j|^2 for all pairs, from their inner products.

    >>> squares_between(torch.tensor([[25.0, 3.0], [3.0, 1.0]])).tolist()
    [[0.0, 20.0], [20.0, 0.0]]
    """
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2 * products).clamp(min=0).fill_diagonal_(0)


def squares_from(products: Tensor, shares: Tensor) -> Tensor:
    """Return |x_i - z|^2 for all i, where z = sum_j shares_j x_j, from the inner products of the x.

    >>> squares_from(torch.tensor([[25.0, 3.0], [3.0, 1.0]]), torch.tensor([0.5, 0.5])).tolist()
    [5.0, 5.0]
    """
    along = products @ shares
    return (products.diagonal() - 2 * along + shares @ along).clamp(min=0)


@register_part("aggregator", "nearest-mixing", paper="Allouah et al., AISTATS 2023")
class NearestMixing(UpdateFilter):
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

    def check(self, clients: int) -> None:
        """Raise a ConfigError if half of the clients or more are faulty, or if the inner aggregator cannot be used."""
        check_enough("nearest-mixing", self.faulty, clients, more=1)
        super().check(clients)

    def admit(
        self, codes: Sequence[Tree], weights: Sequence[float], beside: Sequence[Sequence[Tree]] = ()
    ) -> tuple[list[Tree], list[float]]:
        """Mix the updates, then apply `admit` of the inner aggregator, with equal weights."""
        clients = len(codes)
        near = clients - min(count_faulty(self.faulty, clients), (clients - 1) // 2)
        if near == clients or not codes[0]:
            return self.inner.admit(codes, [1.0] * clients, beside)
        order = squares_between(inner_products(codes)).sort(dim=1, stable=True).indices[:, :near].tolist()
        mixed = [weighted_mean([codes[j] for j in sorted(nearest)], [1.0] * near) for nearest in order]
        return self.inner.admit(mixed, [1.0] * clients, beside)
