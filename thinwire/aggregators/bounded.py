"""Upper bounds on the norm of updates and on client weights, in front of another aggregator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import Aggregator, WeightedMean, refuse_of_values
from thinwire.core.registry import register
from thinwire.core.tree import Tree, scale
from thinwire.errors import ConfigError


@register("aggregator", "bounded")
@dataclass(frozen=True)
class Bounded(Aggregator):
    """Clip the norm of each update and the weight of each client, then aggregate.

        x_i <- x_i * min(1, norm / |x_i|),     weight_i <- min(weight_i, weight)

    Args:
        norm: the largest 2-norm of an update, over all values that a client sends; 0 for no bound.
        weight: the largest client weight, a number of examples if clients are weighted by examples; 0 for no bound.
        inner: the aggregator of the clipped updates.

    >>> import torch
    >>> codes, weights = Bounded(norm=5.0, weight=100.0).admit([{"w": torch.tensor([30.0, 40.0])}], [1e9])
    >>> codes[0]["w"].tolist(), weights
    ([3.0, 4.0], [100.0])

    Not differential privacy: no noise is added. Not `CenteredClipping`, which clips distances to the middle of the
    clients.
    """

    norm: float = 0.0
    weight: float = 0.0
    inner: Aggregator = WeightedMean()

    def __post_init__(self) -> None:
        for name, value in (("norm", self.norm), ("weight", self.weight)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be 0 (no bound) or more, not {value}")
        refuse_of_values(self.inner)

    @property
    def clips(self) -> bool:
        """Whether this aggregator or the inner one clips updates."""
        return self.norm > 0 or self.inner.clips

    def check(self, clients: int) -> None:
        """Check the inner aggregator."""
        self.inner.check(clients)

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """Clip updates and weights, then apply `admit` of the inner aggregator."""
        codes = [self._clip(code) for code in codes] if self.norm else codes
        weights = [min(weight, self.weight) for weight in weights] if self.weight else weights
        return self.inner.admit(codes, weights)

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the aggregate of the inner aggregator."""
        return self.inner.of(trees, weights)

    def _clip(self, code: Tree) -> Tree:
        length = math.sqrt(sum(float(block.double().square().sum()) for block in code.values()))
        return scale(code, self.norm / length) if length > self.norm else code
