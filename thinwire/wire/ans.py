"""Entropy coding of few small integers without a table: asymmetric numeral systems with a parametric distribution.

Paper: Duda, Asymmetric numeral systems, 2013 (the variant with ranges).

    x <- (x // f_s) 2^14 + c_s + x % f_s        f_s: frequency of symbol s of 2^14,  c_s: the sum of those before it

A Huffman code as in `entropy.py` needs a table of codes, about 50 bytes, and at least one bit a symbol. Here a symbol
with probability p takes log2(1 / p) bits, and the distribution takes five bits: one of 16 discrete Gaussians, with
probabilities proportional to q^(s^2), or of 16 discrete Laplace distributions, q^|s|. Frequencies are computed with
integers, so they are the same on every machine.

>>> symbols = np.array([0, 1, 0, -1, 0, 0, 2, 0] * 32)
>>> number = best_model(symbols)
>>> data = encode(symbols, number)
>>> len(data), bool((decode(data, 256, number) == symbols).all())
(58, True)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes

LARGEST = 23  # symbols are from -23 to 23
MODELS = 32

_BITS = 14
_TOTAL = 1 << _BITS
_LOWEST = 1 << 16  # states are from here to 2^32 - 1; sixteen bits are written at a time
_UNIT = 1 << 16
# q as a multiple of 2^-16: standard deviations of 0.3 to 6, each 1.22 times the one before
_GAUSSIAN = (253, 1579, 5384, 12261, 21293, 30833, 39523, 46685, 52201, 56262, 59161, 61189, 62587, 63543, 64193, 64632)
_LAPLACE = (1311, 1966, 2949, 4260, 5898, 7864, 10486, 13763, 17695, 21627, 26214, 31457, 36045, 40632, 45220, 49807)


class Model(NamedTuple):
    """Frequencies of the symbols -23 to 23, their sums, and the symbol of each value below 2^14."""

    frequency: list[int]
    before: list[int]
    symbol: list[int]


@cache
def model(number: int) -> Model:
    """Distribution number 0 to 31.

    >>> model(0).frequency[LARGEST], sum(model(31).frequency)
    (16214, 16384)
    """
    base, power = (_GAUSSIAN[number], 2) if number < 16 else (_LAPLACE[number - 16], 1)
    highest = LARGEST**power
    weights = [base ** abs(s) ** power * _UNIT ** (highest - abs(s) ** power) for s in range(-LARGEST, LARGEST + 1)]
    total = sum(weights)
    frequency = [1 + weight * (_TOTAL - len(weights)) // total for weight in weights]
    frequency[LARGEST] += _TOTAL - sum(frequency)
    before = [sum(frequency[:s]) for s in range(len(frequency))]
    symbol = [s for s, count in enumerate(frequency) for _ in range(count)]
    return Model(frequency, before, symbol)


@cache
def _costs() -> np.ndarray:
    """Bits of each symbol in each distribution."""
    costs: np.ndarray = _BITS - np.log2(np.array([model(number).frequency for number in range(MODELS)]))
    return costs


def best_model(symbols: np.ndarray) -> int:
    """The number of the distribution with which these symbols take the fewest bits."""
    counts = np.bincount(symbols + LARGEST, minlength=2 * LARGEST + 1)
    return int((_costs() @ counts).argmin())


def encode(symbols: np.ndarray, number: int) -> bytes:
    """Encode integers from -23 to 23. The inverse of `decode`."""
    frequency, before, _ = model(number)
    state, words = _LOWEST, []
    for s in reversed((symbols + LARGEST).tolist()):
        f = frequency[s]
        if state >= f << 32 - _BITS:
            words.append(state & 0xFFFF)
            state >>= 16
        state = (state // f << _BITS) + before[s] + state % f
    return state.to_bytes(4, "little") + np.array(words[::-1], "<u2").tobytes()


def decode(data: Bytes, count: int, number: int) -> np.ndarray:
    """Decode `count` integers from exactly these bytes. The inverse of `encode`."""
    if len(data) < 4 or len(data) % 2:
        raise WireError(f"coded values take an even number of bytes, at least 4, not {len(data)}")
    frequency, before, symbol = model(number)
    state, words = int.from_bytes(data[:4], "little"), iter(np.frombuffer(data[4:], "<u2").tolist())
    out = []
    try:
        for _ in range(count):
            low = state & _TOTAL - 1
            s = symbol[low]
            out.append(s)
            state = frequency[s] * (state >> _BITS) + low - before[s]
            if state < _LOWEST:
                state = state << 16 | next(words)
    except StopIteration:
        raise WireError(f"the bytes end before the last of {count} coded values") from None
    if state != _LOWEST or next(words, None) is not None:
        raise WireError(f"the bytes do not hold exactly {count} coded values")
    return np.array(out, np.int64) - LARGEST
