"""Selection of the largest of n values: how many, and at which positions. Used by sparse codecs and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.core.vectors import gather

Rounding = Literal["down", "up"]

LONG = 1 << 16  # scores; of fewer all are partitioned
SAMPLE = 1 << 12
PIECE = 1 << 16  # values at a time, which stay in the cache of a core


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
    return largest_of([x], k)[0]


def largest_of(vector: Sequence[Tensor], k: int) -> tuple[np.ndarray, Tensor]:
    """As `largest`, of a vector that is given in parts of one type; and the values at these positions.

    Of a long vector, a sample gives a magnitude a little below the k-th largest. One pass finds all values that reach
    it, and only those are partitioned. The sample decides on the time that this takes, not on the result.

    >>> at, values = largest_of([torch.tensor([0.5, -3.0]), torch.tensor([2.0, -2.0])], 2)
    >>> at.tolist(), values.tolist()
    ([1, 2], [-3.0, 2.0])
    """
    parts = [(part if part.dtype is torch.float64 else part.float()).numpy() for part in vector]
    n = sum(len(part) for part in parts)
    if n >= LONG and 0 < 4 * k <= n:
        some, values = _at_least(parts, _below_edge(parts, n, k))
        if k <= len(some) < n:
            chosen = _top_positions(np.abs(values), k)
            return some[chosen], torch.from_numpy(values[chosen]).to(vector[0].dtype)
    at = _top_positions(np.abs(parts[0] if len(parts) == 1 else np.concatenate(parts)), k)
    return at, gather(vector, at)


def _top_positions(score: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k highest scores; among equal ones, the first."""
    if k in (0, len(score)):
        return np.arange(k, dtype=np.int64)
    edge = np.partition(score, len(score) - k)[len(score) - k]
    at = np.flatnonzero(score >= edge)
    if len(at) == k:  # the common case: no ties at the edge, so no sort
        return at
    above = np.flatnonzero(score > edge)
    return np.sort(np.concatenate((above, np.flatnonzero(score == edge)[: k - len(above)])))


def _at_least(parts: list[np.ndarray], edge: np.floating) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions of all magnitudes of at least `edge`, and the values there."""
    size, mask = np.empty(PIECE, parts[0].dtype), np.empty(PIECE, bool)
    found, values, first = [], [], 0
    for part in parts:
        for start in range(0, len(part), PIECE):
            piece = part[start : start + PIECE]
            here = np.abs(piece, out=size[: len(piece)])
            at = np.flatnonzero(np.greater_equal(here, edge, out=mask[: len(piece)]))
            values.append(piece[at])
            at += first + start
            found.append(at)
        first += len(part)
    return np.concatenate(found), np.concatenate(values)


def _below_edge(parts: list[np.ndarray], n: int, k: int) -> np.floating:
    """A magnitude that most likely is a little below the k-th largest, from a sample at equal distances."""
    step, first, some = n // SAMPLE, 0, []
    for part in parts:
        some.append(part[-first % step :: step])
        first += len(part)
    sample = np.sort(np.abs(np.concatenate(some)))
    rank = k * len(sample) / n
    return sample[-min(len(sample), int(rank + 4 * math.sqrt(rank) + 2))]  # type: ignore[no-any-return]
