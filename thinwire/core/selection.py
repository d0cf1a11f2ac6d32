"""Selections of n values: the k largest, or a random subset. Used by sparse codecs and masks.

A random subset is drawn from a key at a cost that depends on its size.

    draw       about k + k^2 / n positions, each uniform, and keep each once, in ascending order
    too many   d > k positions are left: leave out a random subset of d - k of them
    too few    draw an eighth more, and again

What is kept depends on how many positions are different, not on which they are, so all subsets of k are equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.tree import gather

Rounding = Literal["down", "up"]

LONG = 1 << 16  # scores; of fewer all are partitioned
SAMPLE = 1 << 13


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

    Of a long vector, only the values above a magnitude from a sample are partitioned, unless they are fewer than k.

    >>> at, values = largest_of([torch.tensor([0.5, -3.0]), torch.tensor([2.0, -2.0])], 2)
    >>> at.tolist(), values.tolist()
    ([1, 2], [-3.0, 2.0])
    """
    parts = [(part if part.dtype is torch.float64 else part.float()).numpy() for part in vector]
    size = np.abs(parts[0] if len(parts) == 1 else np.concatenate(parts))
    if (n := len(size)) >= LONG and 0 < 2 * k <= n:
        sample, share = np.sort(size[:: n // SAMPLE]), k / n
        spread = 3.5 * math.sqrt(len(sample) * share * (1 - share)) + 2
        some = np.flatnonzero(size >= sample[max(0, int(len(sample) * (1 - share) - spread))])
        if len(some) >= k:
            at = some[_top_positions(size[some], k)]
            return at, gather(vector, at)
    at = _top_positions(size, k)
    return at, gather(vector, at)


def _top_positions(score: np.ndarray, k: int) -> np.ndarray:
    """Ascending positions of the k highest scores; among equal ones, the first."""
    if k in (0, len(score)):
        return np.arange(k, dtype=np.int64)
    edge = np.partition(score, len(score) - k)[len(score) - k]
    chosen = score >= edge
    if (more := np.count_nonzero(chosen) - k) > 0:  # ties at the edge
        chosen[np.flatnonzero(score == edge)[-more:]] = False
    return np.flatnonzero(chosen)


FEW = 32  # fewer are drawn one after the other
DENSE = 64  # up to this many values for each position, they are marked instead of sorted: a byte for each value
PART = 1 << 14  # words at a time, which stay in the cache of a core


def random_subset(key: Key, n: int, k: int) -> np.ndarray:
    """Ascending positions of k of n values, all subsets of k with the same probability.

    Args:
        key: the source of randomness.
        n: number of values, below 2**32.
        k: number of positions, from 0 to n.

    >>> random_subset(Key(0), 10, 3).tolist(), len(set(random_subset(Key(0), 1000, 100).tolist()))
    ([0, 2, 6], 100)
    """
    if 2 * k > n:
        left = np.ones(n, bool)
        left[random_subset(key, n, n - k)] = False
        return np.flatnonzero(left)
    if k < FEW:
        return _one_by_one(key, n, k)
    draws = k + k * k // n + 8
    while len(drawn := _different(_positions(key.cpu_words(draws), n), n, n <= DENSE * k)) < k:
        draws += draws // 8
    if len(drawn) == k:
        return drawn
    left = np.ones(len(drawn), bool)
    left[random_subset(key.fold("subset"), len(drawn), len(drawn) - k)] = False
    return drawn[left]


def _different(positions: Iterator[np.ndarray], n: int, marked: bool) -> np.ndarray:
    """The different positions in ascending order: found in a list of all n, or sorted where that would be long."""
    if not marked:
        return np.unique(np.concatenate([some.astype(np.uint32) for some in positions])).astype(np.int64)
    marks = np.zeros(n, bool)
    for some in positions:
        marks[some] = True
    return np.flatnonzero(marks)


def _one_by_one(key: Key, n: int, k: int) -> np.ndarray:
    """The first k different positions of the stream."""
    seen: dict[int, None] = {}
    draws = 2 * FEW
    while len(seen) < k:
        seen = dict.fromkeys(at for some in _positions(key.cpu_words(draws), n) for at in some.tolist())
        draws *= 2
    return np.sort(np.array(list(seen)[:k], np.int64))


def _positions(words: np.ndarray, n: int) -> Iterator[np.ndarray]:
    """Uniform positions below n, some at a time: of the product of n and a word, the upper half.

    Words whose product has a lower half below 2^32 mod n are left out, so that as many words lead to each position.
    """
    fair = np.uint32((1 << 32) % n)
    for start in range(0, len(words), PART):
        some = words[start : start + PART]
        lower = some * np.uint32(n)  # modulo 2^32
        product = some.astype(np.uint64)
        product *= np.uint64(n)
        product >>= np.uint64(32)
        at = product.view(np.int64)  # numpy would convert other indices more slowly
        unfair = np.flatnonzero(lower < fair)
        if len(unfair) > FEW:
            yield at[lower >= fair]
        else:  # what is between them, without a copy
            yield from (at[a + 1 : b] for a, b in pairwise((-1, *unfair.tolist(), len(at))))
