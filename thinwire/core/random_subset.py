"""A random subset of positions, drawn from a key at a cost that depends on its size.

    draw       about k + k^2 / n positions, each uniform; sort them, and keep each once
    too many   d > k positions are left: leave out a random subset of d - k of them
    too few    draw an eighth more, and again

What is kept depends on how many positions are different, not on which they are, so all subsets of k are equally likely.
"""

from __future__ import annotations

import numpy as np

from thinwire.core.key import Key

FEW = 32  # fewer are drawn one after the other


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
    while True:
        drawn = np.sort(_positions(key.cpu_words(draws), n))
        again = np.flatnonzero(drawn[1:] == drawn[:-1]) + 1
        found = len(drawn) - len(again)
        if found >= k:
            break
        draws += draws // 8
    keep = np.ones(len(drawn), bool)
    keep[again] = False
    if found > k:
        out = random_subset(key.fold("subset"), found, found - k)  # counts the different positions only
        keep[out + np.searchsorted(again - np.arange(len(again)), out, side="right")] = False
    return drawn[keep].astype(np.int64)


def _one_by_one(key: Key, n: int, k: int) -> np.ndarray:
    """The first k different positions of the stream."""
    seen: dict[int, None] = {}
    draws = 2 * FEW
    while len(seen) < k:
        seen = dict.fromkeys(_positions(key.cpu_words(draws), n).tolist())
        draws *= 2
    return np.sort(np.array(list(seen)[:k], np.int64))


def _positions(words: np.ndarray, n: int) -> np.ndarray:
    """Uniform positions below n: of the product of n and a word, the upper half.

    Words whose product has a lower half below 2^32 mod n are left out, so that as many words lead to each position.
    """
    product = words.astype("<u8")
    product *= np.uint64(n)
    lower, upper = product.view("<u4").reshape(-1, 2).T
    fair = (1 << 32) % n
    return upper.astype(np.uint32) if int(lower.min(initial=fair)) >= fair else upper[lower >= np.uint32(fair)]
