"""How what the clients said becomes one: their mean, or something that a few liars cannot move far.

The server alone does this, so it is no part of what both ends agree on: clients need not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.threads import each
from thinwire.core.tree import Tree, scale, weighted_mean
from thinwire.errors import ConfigError

_SLICE = 1 << 15  # numbers of each client that are looked at together: memory grows with these, not with the model


class Aggregator(Protocol):
    """Puts trees of clients together.

    A mean that needs a number of clients in a round has a method `check(clients)`, too, which raises a ConfigError: see
    `check_cohort`.
    """

    @property
    def clips(self) -> bool:
        """Whether `admit` shortens changes, so that it must be shown changes and not values."""
        ...

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """What counts of the clients' changes and weights."""
        ...

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """One tree out of one for each client."""
        ...


def check_cohort(mean: Aggregator, clients: int) -> None:
    """Raise a ConfigError, before anything is trained, if a mean cannot do its work with so many clients in a round."""
    check = getattr(mean, "check", None)
    if check is not None:
        check(clients)


@dataclass(frozen=True)
class Plain:
    """A mean to which all counts as it came."""

    @property
    def clips(self) -> bool:
        """No."""
        return False

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """All as it came."""
        return list(codes), list(weights)


@register("aggregator", "weighted", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class WeightedMean(Plain):
    """Clients count as much as their weights say:  sum_i p_i x_i.

    >>> WeightedMean().of([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [3.0, 1.0])["w"].tolist()
    [1.0]
    """

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Their weighted mean."""
        return weighted_mean(trees, weights)


@register("aggregator", "trimmed", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
class TrimmedMean(Plain):
    """Of each number, the largest and the smallest share of the clients' values are left out; the rest is averaged.

        k = floor(share * clients);   mean of x_(k+1) ... x_(clients-k),   all clients counting alike

    Args:
        share: left out at either end, from 0 to below 0.5.

    Up to k liars cannot push the result beyond what honest clients said. Weights are ignored: they could be lies too.

    >>> said = [{"w": torch.tensor([x])} for x in (1.0, 2.0, 3.0, 1e9)]
    >>> TrimmedMean(0.25).of(said, [1.0] * 4)["w"].tolist()
    [2.5]
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ConfigError(f"share must be from 0 to below 0.5, not {self.share}")

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """What is left, averaged."""
        cut = math.floor(self.share * len(trees))
        return _number_by_number(trees, lambda ascending: ascending[cut : len(trees) - cut].mean(0))


@register("aggregator", "median", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
class Median(Plain):
    """Of each number, the middle one of the clients' values (of an even number, the mean of the middle two).

    Weights are ignored. With sparse messages the middle is zero wherever fewer than half of the clients speak.

    >>> Median().of([{"w": torch.tensor([x])} for x in (1.0, 2.0, 1e9)], [1.0] * 3)["w"].tolist()
    [2.0]
    """

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """The middle."""
        low, high = (len(trees) - 1) // 2, len(trees) // 2
        return _number_by_number(trees, lambda ascending: (ascending[low] + ascending[high]) / 2)


def _number_by_number(trees: Sequence[Tree], of: Callable[[Tensor], Tensor]) -> Tree:
    """A tree of what `of` makes of the clients' values of each number, in ascending order on the first axis."""
    return {name: _block_by_number([tree[name] for tree in trees], of) for name in trees[0]}


def _block_by_number(blocks: Sequence[Tensor], of: Callable[[Tensor], Tensor]) -> Tensor:
    flat = [block.reshape(-1) for block in blocks]
    out = torch.empty_like(flat[0])
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype  # numpy sorts these quickly

    def look(start: int) -> None:
        here = slice(start, start + _SLICE)
        values = torch.stack([vector[here] for vector in flat]).to(wide)
        out[here] = of(torch.from_numpy(np.sort(values.numpy(), axis=0)))

    each(look, range(0, len(out), _SLICE), len(flat) * min(_SLICE, len(out)) * out.element_size())
    return out.view(blocks[0].shape)


@register("aggregator", "by-norm", paper="HetLoRA (Cho et al., EMNLP 2024)")
@dataclass(frozen=True)
class ByNorm(Plain):
    """Clients count as much as their adapters are large:  p_i = |B_i A_i| / sum_j |B_j A_j|,  of all matrices together.

    For clients that say their values (`upload = "weights"`): of those that train fewer ranks the product is smaller, and the
    zeros that stand for the ranks that they have not pull less. Blocks that are no adapter do not count in the norm;
    where there is none, or all are zero, the weights stay what they were.

    >>> low = {"w/a": torch.tensor([[3.0]]), "w/b": torch.tensor([[1.0]])}
    >>> high = {"w/a": torch.tensor([[3.0]]), "w/b": torch.tensor([[3.0]])}
    >>> ByNorm().admit([low, high], [1.0, 1.0])[1]
    [3.0, 9.0]
    """

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """All as it came, with weights in proportion to the norms."""
        norms = [_adapter_norm(code) for code in codes]
        if not any(norms):
            return list(codes), list(weights)
        return list(codes), [weight * norm for weight, norm in zip(weights, norms, strict=True)]

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Their weighted mean."""
        return weighted_mean(trees, weights)


def _adapter_norm(code: Tree) -> float:
    """|B A| over all pairs, by |B A|^2 = tr(B^T B A A^T): no product of the size of the matrix is made."""
    square = 0.0
    for name, b in code.items():
        if name.endswith("/b") and (a := code.get(name.removesuffix("b") + "a")) is not None:
            b, a = b.double(), a.double()
            square += float(((b.mT @ b) * (a @ a.mT)).sum())
    return math.sqrt(max(square, 0.0))


@register("aggregator", "bounded")
@dataclass(frozen=True)
class Bounded:
    """No client counts more, or changes more, than is allowed; what is left is put together by another mean.

        x_i <- x_i * min(1, norm / |x_i|),     weight_i <- min(weight_i, weight)

    Args:
        norm: the longest change, as the 2-norm over all numbers that a client sends; 0 for no bound.
        weight: the largest weight, in examples where clients count by examples; 0 for no bound.
        inner: what puts the rest together.

    >>> codes, weights = Bounded(norm=5.0, weight=100.0).admit([{"w": torch.tensor([30.0, 40.0])}], [1e9])
    >>> codes[0]["w"].tolist(), weights
    ([3.0, 4.0], [100.0])
    """

    norm: float = 0.0
    weight: float = 0.0
    inner: Aggregator = WeightedMean()

    def __post_init__(self) -> None:
        for name in ("norm", "weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 (no bound) or more, not {getattr(self, name)}")

    @property
    def clips(self) -> bool:
        """Whether there is a bound on changes."""
        return self.norm > 0 or self.inner.clips

    def check(self, clients: int) -> None:
        """As `inner` does it."""
        check_cohort(self.inner, clients)

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """All within bounds."""
        codes = [self._shortened(code) for code in codes] if self.norm else codes
        weights = [min(weight, self.weight) for weight in weights] if self.weight else weights
        return self.inner.admit(codes, weights)

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """As `inner` does it."""
        return self.inner.of(trees, weights)

    def _shortened(self, code: Tree) -> Tree:
        length = math.sqrt(sum(float(block.double().square().sum()) for block in code.values()))
        return scale(code, self.norm / length) if length > self.norm else code
