"""Robust aggregators that treat each coordinate separately: trimmed mean and median.

`robust.py` has those that compare whole updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.aggregators.base import Aggregator
from thinwire.core.registry import register
from thinwire.core.threads import each
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError

_SLICE = 1 << 15  # values of each client that are sorted together: memory grows with this, not with the model


@register("aggregator", "trimmed", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
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

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise ConfigError(f"share must be from 0 to below 0.5, not {self.share}")

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the trimmed mean of each coordinate."""
        cut = math.floor(self.share * len(trees))
        return _by_coordinate(trees, lambda ascending: ascending[cut : len(trees) - cut].mean(0))


@register("aggregator", "median", paper="Yin et al., ICML 2018")
@dataclass(frozen=True)
class Median(Aggregator):
    """Of each coordinate, the median of the clients' values (of an even number of clients, the mean of the middle two).

    Weights are ignored. With sparse uploads the median is zero wherever fewer than half of the clients send a value.

    >>> Median().of([{"w": torch.tensor([x])} for x in (1.0, 2.0, 1e9)], [1.0] * 3)["w"].tolist()
    [2.0]

    Not `GeometricMedian`, which is the median of whole updates.
    """

    def of(self, trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
        """Return the median of each coordinate."""
        low, high = (len(trees) - 1) // 2, len(trees) // 2
        return _by_coordinate(trees, lambda ascending: (ascending[low] + ascending[high]) / 2)


def _by_coordinate(trees: Sequence[Tree], of: Callable[[Tensor], Tensor]) -> Tree:
    """Apply `of` to the clients' values of each coordinate, sorted in ascending order along the first axis."""
    return {name: _block_by_coordinate([tree[name] for tree in trees], of) for name in trees[0]}


def _block_by_coordinate(blocks: Sequence[Tensor], of: Callable[[Tensor], Tensor]) -> Tensor:
    flat = [block.reshape(-1) for block in blocks]
    out = torch.empty_like(flat[0])
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype  # numpy sorts these quickly

    def aggregate(start: int) -> None:
        here = slice(start, start + _SLICE)
        values = torch.stack([vector[here] for vector in flat]).to(wide)
        out[here] = of(torch.from_numpy(np.sort(values.numpy(), axis=0)))

    each(aggregate, range(0, len(out), _SLICE), len(flat) * min(_SLICE, len(out)) * out.element_size())
    return out.view(blocks[0].shape)
