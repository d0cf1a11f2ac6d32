"""Weights in proportion to the norm of a client's adapters (HetLoRA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.aggregators.base import Aggregator
from thinwire.core.registry import register
from thinwire.core.tree import Tree, weighted_mean


@register("aggregator", "by-norm", paper="HetLoRA (Cho et al., EMNLP 2024)")
@dataclass(frozen=True)
class ByNorm(Aggregator):
    """Weight clients by the norm of their adapters:  p_i ~ weight_i |B_i A_i|,  over all matrices together.

    For clients that upload weights (`upload = "weights"`): a client that trains fewer ranks has a smaller product, so
    the zeros of its missing ranks count less. Blocks that are no adapter do not enter the norm; without any adapter, or
    if all are zero, the weights stay unchanged.

    >>> import torch
    >>> low = {"w/a": torch.tensor([[3.0]]), "w/b": torch.tensor([[1.0]])}
    >>> high = {"w/a": torch.tensor([[3.0]]), "w/b": torch.tensor([[3.0]])}
    >>> ByNorm().admit([low, high], [1.0, 1.0])[1]
    [3.0, 9.0]

    Not robust: a client with large adapters gets a large weight. Not `Bounded`, which limits norms.
    """

    def admit(self, codes: Sequence[Tree], weights: Sequence[float]) -> tuple[list[Tree], list[float]]:
        """Return the trees unchanged and the weights times the norms."""
        norms = [_adapter_norm(code) for code in codes]
        if not any(norms):
            return list(codes), list(weights)
        return list(codes), [weight * norm for weight, norm in zip(weights, norms, strict=True)]

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the weighted mean."""
        return weighted_mean(trees, weights)


def _adapter_norm(code: Tree) -> float:
    """|B A| over all adapters, by |B A|^2 = tr(B^T B A A^T), without computing B A."""
    square = 0.0
    for name, b in code.items():
        if name.endswith("/b") and (a := code.get(name.removesuffix("b") + "a")) is not None:
            b, a = b.double(), a.double()
            square += float(((b.mT @ b) * (a @ a.mT)).sum())
    return math.sqrt(max(square, 0.0))
