"""Values as signs, and as signs with one bit of magnitude. Zeros are sent by their positions.

Zeros stay zeros: any other value would move, every round, a weight that no client trained.

>>> x = np.array([3.0, -1.0, 0.0, 1.1, -2.9])
>>> decode_magnitudes(memoryview(encode_magnitudes(x, 5)), 5, 5, np.float32).tolist()
[2.953125, -1.046875, 0.0, 1.046875, -2.953125]
"""

from __future__ import annotations

import numpy as np

from thinwire.codecs.scales import as_rows, bfloat16_nearest, read_scales, widen
from thinwire.errors import WireError
from thinwire.wire import indices, symbols
from thinwire.wire.bits import read_varint, varint

LLOYD = 4  # steps of Lloyd's algorithm for the two magnitudes of a row


def encode_signs(x: np.ndarray) -> bytes:
    """The number of zeros, their positions, and the signs of all other values."""
    return _encode_zeros(x) + symbols.encode((x[x != 0] > 0).astype(np.uint8), 1)


def decode_signs(data: memoryview, n: int, real: type[np.floating]) -> np.ndarray:
    """Values of -1, 0 and 1. The inverse of `encode_signs`."""
    some, rest = _decode_zeros(data, n)
    x = np.zeros(n, real)
    x[some] = 2 * symbols.decode(rest, int(some.sum()), 1).astype(np.int8) - 1
    return x


def encode_magnitudes(x: np.ndarray, length: int) -> bytes:
    """Zeros as in `encode_signs`; then of all other values two magnitudes for each `length`, and two bits each.

    |x| ~ l if |x| < (l + h) / 2 else h,    l and h the means of these two parts, by Lloyd's algorithm
    """
    values = x[x != 0]
    if not len(values):
        return _encode_zeros(x)
    size = as_rows(np.abs(values).astype(np.float64), length)
    inside = as_rows(np.ones(len(values), np.bool_), length)
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are sent as some finite ones
        limit = size.sum(1, keepdims=True) / inside.sum(1, keepdims=True)
        for _ in range(LLOYD):
            large = (size >= limit) & inside
            low, high = _means(size, inside & ~large), _means(size, large)
            low = np.minimum(np.where(np.isnan(low), high, low), high)  # no value is below the limit: all are equal
            limit = (low + high) / 2
        levels = (values > 0) * np.uint8(2) + (size >= limit).reshape(-1)[: len(values)].astype(np.uint8)
    scales = bfloat16_nearest(np.concatenate((low[:, 0], high[:, 0])))
    return _encode_zeros(x) + scales.tobytes() + symbols.encode(levels, 2)


def decode_magnitudes(data: memoryview, n: int, length: int, real: type[np.floating]) -> np.ndarray:
    """The values. The inverse of `encode_magnitudes`."""
    some, rest = _decode_zeros(data, n)
    x, count = np.zeros(n, real), int(some.sum())
    if not count:
        if len(rest):
            raise WireError(f"{len(rest)} bytes follow the positions of {n} zeros")
        return x
    groups = -(-count // length)
    scales, rest = read_scales(rest, 2 * groups)
    if (scales[:groups] > scales[groups:]).any():
        raise WireError("a smaller magnitude is above the larger one")
    levels, row = symbols.decode(rest, count, 2), np.arange(count) // length
    sizes = widen(scales)[row + np.where(levels & 1, groups, 0)]  # levels are bytes: a product might not fit
    x[some] = np.where(levels >= 2, sizes, -sizes)
    return x


def _means(size: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean of the chosen values of each row; NaN where there are none."""
    count = chosen.sum(1, keepdims=True)
    total = np.where(chosen, size, 0.0).sum(1, keepdims=True)
    mean: np.ndarray = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _encode_zeros(x: np.ndarray) -> bytes:
    """The number of zeros and their positions."""
    zero = np.flatnonzero(x == 0)
    where = indices.encode(zero, len(x)) if len(zero) else b""
    return varint(len(zero)) + (varint(len(where)) + where if len(zero) else b"")


def _decode_zeros(data: memoryview, n: int) -> tuple[np.ndarray, memoryview]:
    """Which values are not zero, and the bytes after the positions of zeros."""
    count, position = read_varint(data)
    if count > n:
        raise WireError(f"{count} zeros announced, there are {n} values")
    some = np.ones(n, np.bool_)
    if count:
        length, position = read_varint(data, position)
        if length > len(data) - position:
            raise WireError(f"positions of {length} bytes announced, {len(data) - position} are left")
        some[indices.decode(data[position : position + length], n, count)] = False
        position += length
    return some, data[position:]
