"""Contract of an aggregator, and the weighted mean.

Only the server aggregates, so the aggregator is no part of the contract between server and clients.

Weight of a client in the aggregate: by its number of examples, or the same for all.

Weights in proportion to the norm of a client's adapters (HetLoRA).

Upper bounds on the norm of updates and on client weights, in front of another aggregator.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from thinwire.core.registry import register_part
from thinwire.core.text import NonNegativeFloat
from thinwire.core.tree import Tree, scale, weighted_mean


class Aggregator(ABC):
    """Combines the trees of the clients of a round into one.

    `admit` runs once a round, on the updates; `of` runs on the trees and weights that `admit` returned, and with the
    same weights on what else clients sent and is averaged: reports and buffers.
    """

    clips = False
    """Whether `admit` clips updates; then it must receive updates, not weights of the model."""

    is_weighted_mean = False
    """Whether this is the plain weighted mean: only that is computed under secure aggregation and privacy."""

    def check(self, clients: int) -> None:
        """Raise a ConfigError if the aggregator cannot be used with so many clients in a round."""
        return

    def admit(
        self, codes: Sequence[Tree], weights: Sequence[float], beside: Sequence[Sequence[Tree]] = ()
    ) -> tuple[list[Tree], list[float]]:
        """Return the updates and weights to use, one of each for every client; a weight of 0 excludes a client.

        Args:
            codes: the update of every client.
            weights: the weight of every client.
            beside: what else clients sent that is averaged, one tree of every client for each report and buffer.
        """
        return list(codes), list(weights)

    @abstractmethod
    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the aggregate of one tree of every client."""


class UpdateFilter(Aggregator):
    """An aggregator whose `admit` changes updates before an inner one aggregates them."""

    inner: Aggregator

    @property
    def clips(self) -> bool:  # type: ignore[override]
        """Whether the inner aggregator clips updates."""
        return self.inner.clips

    def check(self, clients: int) -> None:
        """Check the inner aggregator."""
        self.inner.check(clients)

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the aggregate of the inner aggregator."""
        return self.inner.of(trees, weights)


@register_part("aggregator", "weighted", paper="McMahan et al., AISTATS 2017")
class WeightedMean(Aggregator):
    """The weighted mean of all clients:  sum_i p_i x_i,  p_i = weight_i / sum_j weight_j.

    >>> import torch
    >>> WeightedMean().of([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [3.0, 1.0])["w"].tolist()
    [1.0]

    Not robust: one client can move the result anywhere.
    """

    is_weighted_mean = True

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the weighted mean."""
        return weighted_mean(trees, weights)


class ClientWeight(ABC):
    """Weight of a client in the weighted mean:  p_i = weight_i / sum_j weight_j."""

    sent = False
    """Whether the weight is a field of the upload (two bytes for 128 to 16,383), as only the client can compute it."""

    @abstractmethod
    def weight(self, samples: int) -> float:
        """Return the weight of a client with that many examples."""


@register_part("client_weight", "samples", paper="McMahan et al., AISTATS 2017")
class BySamples(ClientWeight):
    """Weight clients by their number of examples:  p_i = n_i / sum_j n_j.

    >>> BySamples().weight(600)
    600.0
    """

    sent = True

    def weight(self, samples: int) -> float:
        """Return the number of examples."""
        return float(samples)


@register_part("client_weight", "uniform")
class Uniform(ClientWeight):
    """Weight all clients of a round equally:  p_i = 1 / m.

    >>> Uniform().weight(600)
    1.0
    """

    def weight(self, samples: int) -> float:
        """Return 1."""
        return 1.0


@register_part("aggregator", "bounded")
class Bounded(UpdateFilter):
    """Clip the norm of each update and the weight of each client, then aggregate.

        x_i <- x_i * min(1, norm / |x_i|),     weight_i <- min(weight_i, weight)

    Args:
        norm: the largest 2-norm of an update, over all values that a client sends; 0 for no bound, or, without a
            bound of the weight, for the lower median norm of the round.
        weight: the largest client weight, a number of examples if clients are weighted by examples; 0 for no bound.
        inner: the aggregator of the clipped updates.

    >>> import torch
    >>> codes, weights = Bounded(norm=5.0, weight=100.0).admit([{"w": torch.tensor([30.0, 40.0])}], [1e9])
    >>> codes[0]["w"].tolist(), weights
    ([3.0, 4.0], [100.0])
    >>> codes, _ = Bounded().admit([{"w": torch.tensor([x])} for x in (1.0, 2.0, -30.0)], [1.0] * 3)
    >>> [code["w"].item() for code in codes]
    [1.0, 2.0, -2.0]

    Not differential privacy: no noise is added. Not `CenteredClipping`, which clips distances to the middle of the
    clients.
    """

    norm: NonNegativeFloat = 0.0
    weight: NonNegativeFloat = 0.0
    inner: Aggregator = WeightedMean()

    @property
    def clips(self) -> bool:  # type: ignore[override]
        """Whether this aggregator or the inner one clips updates."""
        return self.norm > 0 or not self.weight or self.inner.clips

    def admit(
        self, codes: Sequence[Tree], weights: Sequence[float], beside: Sequence[Sequence[Tree]] = ()
    ) -> tuple[list[Tree], list[float]]:
        """Clip updates and weights, then apply `admit` of the inner aggregator."""
        norms = [math.sqrt(sum(float(block.double().square().sum()) for block in code.values())) for code in codes]
        most = self.norm or (math.inf if self.weight else sorted(norms)[(len(norms) - 1) // 2] or math.inf)
        codes = [scale(code, most / one) if one > most else code for code, one in zip(codes, norms, strict=True)]
        weights = [min(weight, self.weight) for weight in weights] if self.weight else weights
        return self.inner.admit(codes, weights, beside)
