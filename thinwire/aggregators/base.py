"""Contract of an aggregator, and the weighted mean.

Only the server aggregates, so the aggregator is no part of the contract between server and clients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from thinwire.core.registry import register
from thinwire.core.tree import Tree, weighted_mean
from thinwire.errors import ConfigError


class Aggregator(Protocol):
    """Combines the trees of the clients of a round into one.

    `admit` runs once a round, on the updates; `of` runs on the trees and weights that `admit` returned, and with the
    same weights on other trees of the upload, such as buffers and reports.
    """

    @property
    def clips(self) -> bool:
        """Whether `admit` clips updates; then it must receive updates, not weights of the model."""
        return False

    is_weighted_mean: ClassVar[bool] = False
    """Whether this is the plain weighted mean: only that is computed under secure aggregation and privacy."""

    of_values: ClassVar[bool] = False
    """Whether `of` needs the coordinates of clients and not their changes, which are added to the public ones first."""

    def check(self, clients: int) -> None:
        """Raise a ConfigError if the aggregator cannot be used with so many clients in a round."""
        return

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """Return the updates and weights to use, one of each for every client; a weight of 0 excludes a client."""
        return list(codes), list(weights)

    @abstractmethod
    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the aggregate of one tree of every client."""
        ...


def refuse_of_values(inner: Aggregator) -> None:
    """Raise a ConfigError if the aggregator behind one that changes updates needs coordinates."""
    if inner.of_values:
        raise ConfigError(f"{inner!r} aggregates coordinates, not updates; write inner = 'weighted', or use it alone")


@register("aggregator", "weighted", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
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
