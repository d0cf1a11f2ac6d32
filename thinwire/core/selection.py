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
SAMPLE = 1 << 13
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

    Of a long vector, a sample gives two magnitudes around the k-th largest. One pass finds all values that reach the
    lower one, and of those only the ones below the higher one are partitioned. The sample decides on the time that this
    takes, not on the result.

    >>> at, values = largest_of([torch.tensor([0.5, -3.0]), torch.tensor([2.0, -2.0])], 2)
    >>> at.tolist(), values.tolist()
    ([1, 2], [-3.0, 2.0])
    """
    parts = [(part if part.dtype is torch.float64 else part.float()).numpy() for part in vector]
    n = sum(len(part) for part in parts)
    if n >= LONG and 0 < 2 * k <= n:
        low, high = _around_edge(parts, n, k)
        some, values = _at_least(parts, low, min(n, k + k // 2 + PIECE))
        if len(some) >= k:
            chosen = _top_positions(np.abs(values), k, high)
            found = values.take(chosen, mode="clip")  # faster than the check of each position
            return some.take(chosen, mode="clip"), torch.from_numpy(found).to(vector[0].dtype)
    at = _top_positions(np.abs(parts[0] if len(parts) == 1 else np.concatenate(parts)), k)
    return at, gather(vector, at)


def _top_positions(score: np.ndarray, k: int, high: float = math.inf) -> np.ndarray:
    """Ascending positions of the k highest scores; among equal ones, the first. `high` is as for `_edge`."""
    if k in (0, len(score)):
        return np.arange(k, dtype=np.int64)
    edge = _edge(score, k, high)
    chosen = score >= edge
    if (more := np.count_nonzero(chosen) - k) > 0:  # ties at the edge
        chosen[np.flatnonzero(score == edge)[-more:]] = False
    return np.flatnonzero(chosen)


def _edge(score: np.ndarray, k: int, high: float) -> np.floating:
    """The k-th highest score. If fewer than k of them reach `high`, only those below it are partitioned."""
    if high < math.inf:
        below = np.flatnonzero(score < high)
        if (above := len(score) - len(below)) < k:
            score, k = score[below], k - above
    edge: np.floating = np.partition(score, len(score) - k)[len(score) - k]
    return edge


def _at_least(parts: list[np.ndarray], edge: float, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions of all magnitudes of at least `edge`, and the values there; nothing if there is no room."""
    size, mask = np.empty(PIECE, parts[0].dtype), np.empty(PIECE, bool)
    found, values, first, end = np.empty(room, np.int64), np.empty(room, parts[0].dtype), 0, 0
    for part in parts:
        for start in range(0, len(part), PIECE):
            piece = part[start : start + PIECE]
            here = np.abs(piece, out=size[: len(piece)])
            at = np.flatnonzero(np.greater_equal(here, edge, out=mask[: len(piece)]))
            if end + len(at) > room:
                return found[:0], values[:0]
            new = slice(end, end + len(at))
            piece.take(at, out=values[new], mode="clip")
            np.add(at, first + start, out=found[new])
            end = new.stop
        first += len(part)
    return found[:end], values[:end]


def _around_edge(parts: list[np.ndarray], n: int, k: int) -> tuple[float, float]:
    """Two magnitudes between which the k-th largest most likely is, from a sample at equal distances."""
    step, first, some = n // SAMPLE, 0, []
    for part in parts:
        some.append(part[-first % step :: step])
        first += len(part)
    sample = np.abs(np.concatenate(some))
    rank = k * len(sample) / n
    error = 3.5 * math.sqrt(rank * (1 - k / n)) + 2
    low, high = max(0, len(sample) - int(rank + error)), len(sample) - int(rank - error)
    sample = np.partition(sample, (low, min(high, len(sample) - 1)))
    return float(sample[low]), float(sample[high]) if high < len(sample) else math.inf
