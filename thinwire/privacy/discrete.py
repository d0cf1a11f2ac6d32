"""The discrete Gaussian: whole numbers whose probabilities are those of a Gaussian's density, drawn in integers only.

    P(x) = exp(-x^2 / 2V) / sum_y exp(-y^2 / 2V),     x, y whole numbers

Floating-point Gaussians lie on a grid that depends on what they are added to, so a released value can say which sum it
was added to (Mironov, CCS 2012). Whole numbers added to whole numbers cannot.

How one is drawn. Its size is split as |x| = 2^m h + l with 0 <= l < 2^m, where m is chosen such that the standard
deviation of h is between 128 and 256:

    h:  by comparing 128 random bits with a table of its distribution,  P(h) ~ exp(-(2^m h)^2 / 2V), h >= 0
    l:  m random bits
    the pair is kept with probability  exp(-l (l + 2^(m+1) h) / 2V),  by the series of von Neumann in whole numbers
    a sign is drawn; -0 is drawn again

What is kept has the distribution above: the product of the second and the last probability is exp(-|x|^2 / 2V). The
series is exact (Canonne, Kamath, Steinke, NeurIPS 2020, algorithm 1, for exponents below 1). The table is the one place
where a probability is rounded, to 2^-128, and where a tail is cut, at 13.5 standard deviations: all of it together
moves less than 2^-110 of the probability of one number. The bits are those of the key; there is no floating-point
number anywhere, so they are the same on every machine.

>>> discrete_gaussian(5, 100, Key(7)).tolist()
[10, -14, 8, 1, 5]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from decimal import ROUND_FLOOR, Context, Decimal
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from thinwire.core.key import Key

MOST_VARIANCE = 1 << 56  # so that every product below fits into 64 bits
_CHUNK = 1 << 16  # numbers at a time: working arrays stay in the cache
_TAIL = Decimal("13.5")  # standard deviations: exp(-13.5^2 / 2) < 2^-131
_EXACT = Context(prec=60, rounding=ROUND_FLOOR)


class _Table(NamedTuple):
    """The distribution of h: threshold i is the probability that h <= i, as whole numbers of 128 bits."""

    high: np.ndarray  # their upper 64 bits
    whole: list[int]


def discrete_gaussian(n: int, variance: int, key: Key) -> np.ndarray:
    """n numbers of a discrete Gaussian, as int64.

    Args:
        n: how many.
        variance: V, a whole number from 1 to 2^56. The variance of what is drawn is at most that, and from V = 1 on
            the same to six digits.
        key: where the random bits come from.
    """
    if not 1 <= variance <= MOST_VARIANCE:
        raise ValueError(f"variance must be from 1 to 2**56, not {variance}")
    out = np.empty(n, np.int64)
    for i, start in enumerate(range(0, n, _CHUNK)):
        out[start : start + _CHUNK] = _chunk(min(_CHUNK, n - start), variance, key.fold("chunk", i))
    return out


def _chunk(n: int, variance: int, key: Key) -> np.ndarray:
    """The same for as many as fit into the cache: what is not kept is drawn again."""
    out, missing, tries = np.empty(n, np.int64), np.arange(n), 0
    while len(missing):
        drawn, kept = _attempt(len(missing), variance, key.fold("try", tries))
        out[missing[kept]] = drawn[kept]
        missing, tries = missing[~kept], tries + 1
    return out


def _attempt(n: int, variance: int, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """n numbers, and which of them are kept."""
    shift = max(0, math.isqrt(variance).bit_length() - 8)
    h = _coarse(_table(variance, shift), _words64(n, key.fold("coarse")), key)
    words = key.fold("fine").words_numpy(n)
    low, negative = (words >> np.uint32(1) & np.uint32((1 << shift) - 1)).astype(np.int64), (words & 1).astype(bool)
    size = (h << shift) + low
    kept = _keeps(low * (low + (h << shift + 1)), 2 * variance, key.fold("keep")) if shift else np.ones(n, bool)
    return np.where(negative, -size, size), kept & ((size > 0) | ~negative)


def _coarse(table: _Table, high: np.ndarray, key: Key) -> np.ndarray:
    """h, from the upper 64 of 128 random bits; the lower ones are drawn where those do not decide."""
    h = np.searchsorted(table.high, high)
    for i in np.flatnonzero(table.high[np.minimum(h, len(table.high) - 1)] == high):  # once in 2^52 numbers
        low = int(_words64(1, key.fold("tie", int(i)))[0])
        h[i] = bisect_right(table.whole, int(high[i]) << 64 | low)
    return h


def _keeps(a: np.ndarray, b: int, key: Key) -> np.ndarray:
    """Which of some are kept, if each is with probability exp(-a / b), for whole numbers 0 <= a < b <= 2^57.

    Toss coins that fall with probability a / b, a / 2b, a / 3b, ... until one does not: it is the first, the third, ...
    with probability exp(-a / b).
    """
    kept, open_, k = np.zeros(len(a), bool), np.arange(len(a)), 1
    while len(open_):
        times = (1 << 64) // (k * b)
        falls = _below(len(open_), k * b * times, key.fold(k)) < a[open_].astype(np.uint64) * np.uint64(times)
        if k % 2:
            kept[open_[~falls]] = True
        open_, k = open_[falls], k + 1
    return kept


def _below(n: int, limit: int, key: Key) -> np.ndarray:
    """n random numbers below a limit of 2^63 to 2^64: others are drawn again, so that all are equally likely."""
    out, missing, tries = np.empty(n, np.uint64), np.arange(n), 0
    while len(missing):
        out[missing] = _words64(len(missing), key.fold("below", tries))
        missing, tries = missing[out[missing] > np.uint64(limit - 1)], tries + 1
    return out


def _words64(n: int, key: Key) -> np.ndarray:
    """n random numbers of 64 bits."""
    return key.words_numpy(2 * n).astype("<u4", copy=False).view("<u8").astype(np.uint64, copy=False)


@lru_cache(maxsize=16)
def _table(variance: int, shift: int) -> _Table:
    """The distribution of h, computed with 60 digits."""
    exact, step = _EXACT, 4**shift
    last = math.isqrt(math.ceil(_TAIL * _TAIL * variance / step)) + 1
    weights = [exact.exp(exact.divide(Decimal(-h * h * step), Decimal(2 * variance))) for h in range(last + 1)]
    sums = [Decimal(0)]
    for weight in weights:
        sums.append(exact.add(sums[-1], weight))
    whole = [int(exact.divide(exact.multiply(Decimal(1 << 128), part), sums[-1])) for part in sums[1:-1]]
    return _Table(np.array([threshold >> 64 for threshold in whole], np.uint64), whole)
