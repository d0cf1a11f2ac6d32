"""Philox4x32-10, a counter-based random number generator (Salmon et al., SC 2011), in numpy and in torch.

Integer arithmetic only, so the same key and counter give the same bits on every device and platform. See
`thinwire.core.key`, which draws from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # of 32 bits
CHUNK = 1 << 15  # counters at a time: working arrays stay in the cache, and threads seldom wait for the GIL
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and Weyl increments of the published algorithm
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = np.full((1, 1), MASK, np.uint64), np.full((1, 1), 32, np.uint64)  # arrays are faster than scalars
_MULTIPLIERS = np.array([[_M0], [_M1]], np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[_W0], [_W1]], np.uint64)  # of each round


def philox_numpy(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of each row of counters, in numpy.

    Args:
        counter: (n, 4) integers below 2**32.
        key: two integers below 2**32.

    Returns:
        (n, 4) uint32.
    """
    upper, lower = (np.ascontiguousarray(counter.T[i::2], np.uint64).copy() for i in range(2))
    _philox_in_place(upper, lower, *key)
    return interleaved(upper, lower)


def interleaved(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """(n, 4) words of each counter, from a pair of rows with its first and third and one with its other words."""
    out = np.empty((upper.shape[1], 4), np.uint32)
    out[:, 0::2], out[:, 1::2] = upper.T, lower.T
    return out


def _philox_in_place(upper: np.ndarray, lower: np.ndarray, k0: Any, k1: Any, done: int = 0) -> None:
    """Philox in place: `upper` holds the first and third words of the counters, `lower` the others.

    In place, because new arrays would take most of the time. The first `done` rounds are skipped.
    """
    products = np.empty_like(upper)
    crossed = products[::-1]  # each half continues with the product of the other
    for keys in np.array([k0, k1], np.uint64).reshape(2, -1) + _WEYL[done:] & _LOW:
        np.multiply(upper, _MULTIPLIERS, products)
        np.right_shift(crossed, _SHIFT, upper)
        np.bitwise_xor(upper, lower, upper)
        np.bitwise_xor(upper, keys, upper)
        np.bitwise_and(crossed, _LOW, lower)


def philox_counted(first: int, last: int, k0: int, k1: int) -> np.ndarray:
    """Philox4x32-10 of the counters first .. last - 1, as (n, 4) uint32."""
    high, border = first >> 32, (first >> 32) + 1 << 32
    if last > border:
        return np.concatenate((philox_counted(first, border, k0, k1), philox_counted(border, last, k0, k1)))
    low = np.arange(first & MASK, last - (high << 32), dtype=np.uint64)
    return interleaved(*philox_alike(low, high, np.uint64(k0), np.uint64(k1)))


def philox_alike(low: np.ndarray, high: int, k0: Any, k1: Any) -> tuple[np.ndarray, np.ndarray]:
    """Philox4x32-10 of counters with the same second word, and 0 in the third and fourth.

    Half of the arithmetic of the first two rounds is then the same for all counters of a key.

    Args:
        low: the first word of each counter.
        high: the second word of all.
        k0: the first word of the key, or one for each counter.
        k1: the second word of the key, or one for each counter.

    Returns:
        The first and third words as two rows, and the second and fourth words as two rows.
    """
    upper, lower = np.empty((2, len(low)), np.uint64), np.empty((2, len(low)), np.uint64)
    (c0, c2), (c1, c3) = upper, lower
    np.multiply(low, np.uint64(_M0), c3)
    np.right_shift(c3, _SHIFT[0], c2)
    np.bitwise_xor(c2, k1, c2)
    np.bitwise_and(c3, _LOW[0], c3)
    product = (k0 ^ np.uint64(high)) * np.uint64(_M0)  # the second round: c0 and c1 are the same for all counters
    np.multiply(c2, np.uint64(_M1), c1)
    np.right_shift(c1, _SHIFT[0], c0)
    np.bitwise_xor(c0, k0 + _WEYL[1, 0] & _LOW[0], c0)
    np.bitwise_and(c1, _LOW[0], c1)
    np.bitwise_xor(c3, product >> _SHIFT[0] ^ k1 + _WEYL[1, 1] & _LOW[0], c2)
    c3[:] = product & _LOW[0]
    _philox_in_place(upper, lower, k0, k1, done=2)
    return upper, lower


def philox_torch(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 of each row of counters, in torch on the device of `counter`.

    int64 products wrap modulo 2**64, so a shift and a mask give the upper half.

    Args:
        counter: (n, 4) int64 with values below 2**32.
        key: two integers below 2**32.

    Returns:
        (n, 4) int64 with values below 2**32.
    """
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = ((p1 >> 32) & MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = p1 & MASK, p0 & MASK
        k0, k1 = (k0 + _W0) & MASK, (k1 + _W1) & MASK
    return torch.stack((c0, c1, c2, c3), dim=1)
