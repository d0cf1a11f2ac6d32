"""Selection of the largest of n values: how many, and at which positions. Used by sparse codecs and masks."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Rounding = Literal["down", "up"]

LONG = 1 << 16  # scores; of fewer all are partitioned
SAMPLE = 1 << 12


def kept(density: float, n: int, rounding: Rounding = "down") -> int:
    """The number of values that a density keeps of n: max(1, floor(density n)) or ceil(density n), and 0 of 0.

    >>> kept(0.29, 100), kept(0.07, 100, "up"), kept(0.1, 11), kept(0.1, 11, "up")
    (29, 7, 1, 2)
    """
    exact = round(density * n, 6)  # 0.29 * 100 is 28.999999999999996, 0.07 * 100 is 7.000000000000001
    return min(n, max(1, math.floor(exact) if rounding == "down" else math.ceil(exact)))


def largest(x: Tensor, k: int) -> np.ndarray:
    """Ascending positions of the k values of largest magnitude; among equal ones, the first.

    >>> largest(torch.tensor([0.5, -3.0, 2.0, -2.0]), 2).tolist()
    [1, 2]
    """
    return top_positions((x if x.dtype is torch.float64 else x.float()).abs().numpy(), k)


def top_positions(score: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k highest scores; among equal ones, the first."""
    if k == len(score):
        return np.arange(k, dtype=np.int64)
    if len(score) >= LONG and 4 * k <= len(score):  # of a long vector, partition only what may be among the highest
        some = np.flatnonzero(score >= _below_edge(score, k))
        if k <= len(some) < len(score):
            chosen: np.ndarray = some[top_positions(score[some], k)]
            return chosen
    edge = np.partition(score, len(score) - k)[len(score) - k]
    at = np.flatnonzero(score >= edge)
    if len(at) == k:  # the common case: no ties at the edge, so no sort
        return at
    above = np.flatnonzero(score > edge)
    return np.sort(np.concatenate((above, np.flatnonzero(score == edge)[: k - len(above)])))


def _below_edge(score: np.ndarray, k: int) -> np.floating:
    """A score that most likely is a little below the k-th highest, from a sample."""
    sample = score[:: len(score) // SAMPLE]
    rank = k * len(sample) / len(score)
    return np.sort(sample)[-min(len(sample), int(rank + 4 * math.sqrt(rank) + 2))]  # type: ignore[no-any-return]
