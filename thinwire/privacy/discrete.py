"""The discrete Gaussian: integers with probabilities proportional to a Gaussian density, sampled exactly.

    P(x) = exp(-x^2 / 2V) / sum_y exp(-y^2 / 2V),     x, y integers

Floating-point Gaussians are rounded to a grid that depends on the value they are added to, so a released value can
reveal that value (Mironov, CCS 2012). Integer noise added to integers has no such leak.

Sampling. The magnitude is |x| = 2^m h + l with 0 <= l < 2^m, where m is chosen such that the standard deviation of h is
between 128 and 256:

    h:  by comparing 128 random bits with a table of its distribution,  P(h) ~ exp(-(2^m h)^2 / 2V), h >= 0
    l:  m random bits
    accept the pair with probability  exp(-l (l + 2^(m+1) h) / 2V),  by von Neumann's series in integer arithmetic
    a random sign; -0 is rejected

Accepted values have the distribution above: the product of P(h) and the acceptance probability is exp(-|x|^2 / 2V). The
series is exact (Canonne, Kamath, Steinke, NeurIPS 2020, algorithm 1, for exponents below 1). Only the table is
approximate: probabilities are rounded to 2^-128, and the tail is truncated at 13.5 standard deviations, which together
change the distribution of one value by less than 2^-110. All randomness is drawn from the key, and no floating point is
used, so the values are the same on all platforms.

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
_CHUNK = 1 << 16  # values at a time: working arrays stay in the cache
_TAIL = Decimal("13.5")  # standard deviations: exp(-13.5^2 / 2) < 2^-131
_EXACT = Context(prec=60, rounding=ROUND_FLOOR)


class _Table(NamedTuple):
    """The distribution of h: threshold i is the probability that h <= i, as an integer of 128 bits."""

    high: np.ndarray  # their upper 64 bits
    whole: list[int]


def discrete_gaussian(n: int, variance: int, key: Key) -> np.ndarray:
    """n samples of a discrete Gaussian, as int64.

    Args:
        n: the number of samples.
        variance: V, an integer from 1 to 2^56. The variance of the samples is at most V, and equal to six digits.
        key: the source of randomness.
    """
    if not 1 <= variance <= MOST_VARIANCE:
        raise ValueError(f"variance must be from 1 to 2**56, not {variance}")
    out = np.empty(n, np.int64)
    for i, start in enumerate(range(0, n, _CHUNK)):
        out[start : start + _CHUNK] = _chunk(min(_CHUNK, n - start), variance, key.fold("chunk", i))
    return out


def _chunk(n: int, variance: int, key: Key) -> np.ndarray:
    """n samples that fit into the cache; rejected ones are drawn again."""
    out, missing, tries = np.empty(n, np.int64), np.arange(n), 0
    while len(missing):
        drawn, accepted = _attempt(len(missing), variance, key.fold("try", tries))
        out[missing[accepted]] = drawn[accepted]
        missing, tries = missing[~accepted], tries + 1
    return out


def _attempt(n: int, variance: int, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """n candidates, and which of them are accepted."""
    shift = max(0, math.isqrt(variance).bit_length() - 8)
    h = _coarse(_table(variance, shift), _words64(n, key.fold("coarse")), key)
    words = key.fold("fine").words_numpy(n)
    low, negative = (words >> np.uint32(1) & np.uint32((1 << shift) - 1)).astype(np.int64), (words & 1).astype(bool)
    size = (h << shift) + low
    accepted = _accepts(low * (low + (h << shift + 1)), 2 * variance, key.fold("keep")) if shift else np.ones(n, bool)
    return np.where(negative, -size, size), accepted & ((size > 0) | ~negative)


def _coarse(table: _Table, high: np.ndarray, key: Key) -> np.ndarray:
    """h from the upper 64 of 128 random bits; the lower bits are drawn only for ties."""
    h = np.searchsorted(table.high, high)
    for i in np.flatnonzero(table.high[np.minimum(h, len(table.high) - 1)] == high):  # once in 2^52 samples
        low = int(_words64(1, key.fold("tie", int(i)))[0])
        h[i] = bisect_right(table.whole, int(high[i]) << 64 | low)
    return h


def _accepts(a: np.ndarray, b: int, key: Key) -> np.ndarray:
    """Bernoulli samples of probability exp(-a / b), for integers 0 <= a < b <= 2^57 (von Neumann).

    Flip coins of probability a / b, a / 2b, a / 3b, ... until the first failure: the number of flips is odd with
    probability exp(-a / b).
    """
    accepted, open_, k = np.zeros(len(a), bool), np.arange(len(a)), 1
    while len(open_):
        times = (1 << 64) // (k * b)
        heads = _below(len(open_), k * b * times, key.fold(k)) < a[open_].astype(np.uint64) * np.uint64(times)
        if k % 2:
            accepted[open_[~heads]] = True
        open_, k = open_[heads], k + 1
    return accepted


def _below(n: int, limit: int, key: Key) -> np.ndarray:
    """n uniform integers below a limit of 2^63 to 2^64, by rejection."""
    out, missing, tries = np.empty(n, np.uint64), np.arange(n), 0
    while len(missing):
        out[missing] = _words64(len(missing), key.fold("below", tries))
        missing, tries = missing[out[missing] > np.uint64(limit - 1)], tries + 1
    return out


def _words64(n: int, key: Key) -> np.ndarray:
    """n random words of 64 bits."""
    return key.words_numpy(2 * n).astype("<u4", copy=False).view("<u8").astype(np.uint64, copy=False)


@lru_cache(maxsize=16)
def _table(variance: int, shift: int) -> _Table:
    """The distribution of h, computed with 60 decimal digits."""
    exact, step = _EXACT, 4**shift
    last = math.isqrt(math.ceil(_TAIL * _TAIL * variance / step)) + 1
    weights = [exact.exp(exact.divide(Decimal(-h * h * step), Decimal(2 * variance))) for h in range(last + 1)]
    sums = [Decimal(0)]
    for weight in weights:
        sums.append(exact.add(sums[-1], weight))
    whole = [int(exact.divide(exact.multiply(Decimal(1 << 128), part), sums[-1])) for part in sums[1:-1]]
    return _Table(np.array([threshold >> 64 for threshold in whole], np.uint64), whole)
