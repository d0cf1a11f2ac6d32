"""Products with a matrix of random signs on a CPU by lookup tables; the matrix is drawn and never stored.

The signs of sixteen rows in one column are a code of 16 bits, so that one table lookup replaces sixteen products:

    B A:     out_j = sum over stripes of T[c_j],   T[c] = sum_r +-b_r, the signs as the bits of c
    G A^T:   H[c] = sum of g_j where c_j = c,      out_r = sum_c +-H[c]

where c_j is the code of column j of a stripe of sixteen rows. Entry (i, j) is bit i e + j of the stream of the key, as
in `Key.signs`.

>>> import torch
>>> from thinwire.core.key import Key
>>> b, key = torch.randn(2, 20), Key(3)
>>> torch.allclose(expand(b, key, 20, 50, 0.5), 0.5 * b @ key.signs(20, 50), atol=1e-5)
True
>>> torch.allclose(project(torch.ones(50), key, 20, 50, 0.5), 0.5 * key.signs(20, 50).sum(1), atol=1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.parallel import each

ROWS = 16
PARTS = 4  # partial sums over stripes; a constant, so that results do not depend on the number of threads
# masks for the transposition of a 16 x 16 bit matrix: the bits of each line that stay, by block size
_STAY = {8: 0x00FF00FF00FF00FF, 4: 0x0F0F0F0F0F0F0F0F, 2: 0x3333333333333333, 1: 0x5555555555555555}


def expand(b: Tensor, key: Key, p: int, e: int, scale: float) -> Tensor:
    """B A, for vectors B of (..., p)."""
    vectors = _as_numpy(b, p) * np.float32(scale)

    def part(stripes: range) -> np.ndarray:
        out = np.zeros((len(vectors), ROWS, -(-e // 64) * 4), np.float32)
        for first in stripes:
            codes = _codes(key, first, min(ROWS, p - first), e)
            for total, vector in zip(out, vectors, strict=True):
                total += np.take(_table(vector[first : first + ROWS]), codes)
        return out

    first, *others = _parts(part, p, e)
    total = sum(others, first).transpose(0, 2, 1).reshape(len(vectors), -1)[:, :e]
    return torch.from_numpy(np.ascontiguousarray(total)).view(*b.shape[:-1], e)


def project(g: Tensor, key: Key, p: int, e: int, scale: float) -> Tensor:
    """G A^T, for vectors G of (..., e)."""
    width = -(-e // 64) * 4
    vectors = np.zeros((g.numel() // e, width * ROWS))  # float64, as np.bincount sums
    vectors[:, :e] = _as_numpy(g, e)
    vectors = vectors.reshape(-1, width, ROWS).transpose(0, 2, 1).reshape(len(vectors), -1)  # in the order of the codes

    def part(stripes: range) -> np.ndarray:
        out = []
        for first in stripes:
            rows = min(ROWS, p - first)
            codes = _codes(key, first, rows, e).astype(np.intp).reshape(-1)
            sums = np.stack([np.bincount(codes, vector, 1 << ROWS) for vector in vectors]).reshape(-1, 256, 256)
            halves = [
                sums.sum(axis) @ _signs() for axis in (1, 2)
            ]  # the sign of a row is one bit of the low or of the high byte
            out.append(np.concatenate(halves, 1)[:, :rows])
        return np.concatenate(out, 1) if out else np.zeros((len(vectors), 0))

    sums = np.concatenate(_parts(part, p, e), 1) * scale
    return torch.from_numpy(sums.astype(np.float32)).view(*g.shape[:-1], p)


def _as_numpy(vectors: Tensor, size: int) -> np.ndarray:
    return vectors.detach().reshape(-1, size).numpy()


def _parts(part: Callable[[range], np.ndarray], p: int, e: int) -> list[np.ndarray]:
    """The results of all parts in order, computed in parallel."""
    stripes = range(0, p, ROWS)
    count = -(-len(stripes) // PARTS)
    parts = [stripes[at : at + count] for at in range(0, len(stripes), count)]
    return each(part, parts, size=count * ROWS * e // 8)


def _codes(key: Key, first: int, rows: int, e: int) -> np.ndarray:
    """For each column, the signs of up to sixteen rows as the bits of a code, 1 for plus; codes beyond e are arbitrary.

    They are computed 64 columns at a time, in the order that needs no reordering: column 16 m + r is entry (r, m).
    """
    start, end, width = first * e, (first + rows) * e, -(-e // 64)
    base = start // 64
    words = key.words_numpy(-(-end // 32) - 2 * base, 2 * base)
    stream = np.zeros(len(words) // 2 + 3, "<u8")
    stream.view("<u4")[: len(words)] = words
    lines = np.zeros((ROWS, width), "<u8")
    for row in range(rows):
        at, off = divmod(start + row * e - 64 * base, 64)
        np.right_shift(stream[at : at + width], np.uint64(off), out=lines[row])
        if off:
            lines[row] |= stream[at + 1 : at + 1 + width] << np.uint64(64 - off)
    return _transposed(lines).view("<u2")


def _transposed(lines: np.ndarray) -> np.ndarray:
    """Transpose matrices of 16 x 16 bits, stored as sixteen lines, in place.

    Hacker's Delight, 7-3: swap the off-diagonal blocks, then recurse into each block, down to single bits.
    """
    half, width = ROWS // 2, lines.shape[1]
    swap = np.empty((half, width), lines.dtype)
    for places, stay in _STAY.items():
        pairs = lines.reshape(half // places, 2, places, width)
        low, high, moved = pairs[:, 0], pairs[:, 1], swap.reshape(half // places, places, width)
        np.right_shift(low, np.uint64(places), out=moved)
        np.bitwise_xor(moved, high, out=moved)
        np.bitwise_and(moved, np.uint64(stay), out=moved)
        np.bitwise_xor(high, moved, out=high)
        np.left_shift(moved, np.uint64(places), out=moved)
        np.bitwise_xor(low, moved, out=low)
    return lines


def _table(values: np.ndarray) -> np.ndarray:
    """For each code, the sum of the values with its signs; missing values are zero."""
    low, high = (_signs() @ np.pad(half, (0, 8 - len(half))) for half in (values[:8], values[8:]))
    return np.add.outer(high, low).astype(np.float32).reshape(-1)


@lru_cache(maxsize=1)
def _signs() -> np.ndarray:
    """All combinations of eight signs, one per row: bit r of the row index, 1 for plus."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.float64) * 2 - 1
