"""Products with a matrix of random signs on a CPU, sixteen rows at a time; the matrix is drawn and never stored.

The signs of sixteen rows in one column are a number below 2^16, so a column costs one look into a table in the place of
sixteen products:

    B A:     out_j = sum over stripes of T[c_j],   T[c] = sum_r +-b_r, the signs as the bits of c
    G A^T:   H[c] = sum of g_j where c_j = c,      out_r = sum_c +-H[c]

where c_j is column j of a stripe of sixteen rows. Entry (i, j) is bit i e + j of the key's stream, as everywhere.

>>> import torch
>>> from thinwire.core.rng import Key
>>> b, key = torch.randn(2, 20), Key(3)
>>> torch.allclose(expand(b, key, 20, 50, 0.5), 0.5 * b @ key.signs(20, 50), atol=1e-5)
True
>>> torch.allclose(project(torch.ones(50), key, 20, 50, 0.5), 0.5 * key.signs(20, 50).sum(1), atol=1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.core.rng import Key

ROWS = 16
PARTS = 4  # sums over stripes are made in so many parts, whatever the number of threads: the same bits everywhere
# which bits change places with those so many places above them, to transpose a square of eight by eight bits
_SWAPS = ((0x00AA00AA00AA00AA, 7), (0x0000CCCC0000CCCC, 14), (0x00000000F0F0F0F0, 28))


def expand(b: Tensor, key: Key, p: int, e: int, scale: float) -> Tensor:
    """B A, for vectors B of (..., p)."""
    vectors = _as_numpy(b, p) * np.float32(scale)

    def part(stripes: range) -> np.ndarray:
        out = np.zeros((len(vectors), e), np.float32)
        for first in stripes:
            columns = _columns(key, first, min(ROWS, p - first), e)
            for total, vector in zip(out, vectors, strict=True):
                total += np.take(_table(vector[first : first + ROWS]), columns)
        return out

    made = sum(_parts(part, p))
    return torch.from_numpy(made).view(*b.shape[:-1], e)


def project(g: Tensor, key: Key, p: int, e: int, scale: float) -> Tensor:
    """G A^T, for vectors G of (..., e)."""
    vectors = _as_numpy(g, e).astype(np.float64)  # as bincount adds

    def part(stripes: range) -> np.ndarray:
        out = []
        for first in stripes:
            rows = min(ROWS, p - first)
            columns = _columns(key, first, rows, e).astype(np.intp)
            sums = np.stack([np.bincount(columns, vector, 1 << ROWS) for vector in vectors]).reshape(-1, 256, 256)
            halves = [
                sums.sum(axis) @ _signs() for axis in (1, 2)
            ]  # a row's sign is one bit: of the low or the high byte
            out.append(np.concatenate(halves, 1)[:, :rows])
        return np.concatenate(out, 1) if out else np.zeros((len(vectors), 0))

    made = np.concatenate(list(_parts(part, p)), 1) * scale
    return torch.from_numpy(made.astype(np.float32)).view(*g.shape[:-1], p)


def _as_numpy(vectors: Tensor, size: int) -> np.ndarray:
    flat: np.ndarray = vectors.detach().reshape(-1, size).numpy()
    return flat


def _parts(part: Callable[[range], np.ndarray], p: int) -> Iterator[np.ndarray]:
    """The results of the parts in order, some made side by side."""
    stripes = range(0, p, ROWS)
    size = -(-len(stripes) // PARTS)
    shares = [stripes[at : at + size] for at in range(0, len(stripes), size)]
    workers = min(torch.get_num_threads(), len(shares))
    if workers == 1:
        yield from map(part, shares)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(part, shares)


def _columns(key: Key, first: int, rows: int, e: int) -> np.ndarray:
    """For each column the signs of up to sixteen rows as the bits of a number, 1 for plus."""
    start, end = first * e, (first + rows) * e
    words = key.words_numpy(-(-end // 32) - start // 32, start // 32).astype("<u4", copy=False)
    stream = np.concatenate((words.view(np.uint8), np.zeros(2, np.uint8)))
    width = -(-e // 8)
    squares = np.zeros((2, width, 8), np.uint8)
    for row in range(rows):
        bit = start + row * e - 32 * (start // 32)
        at, off = divmod(bit, 8)
        line = stream[at : at + width]
        if off:
            line = line >> np.uint8(off) | stream[at + 1 : at + width + 1] << np.uint8(8 - off)
        squares[row // 8, :, row % 8] = line
    out = np.empty((width * 8, 2), np.uint8)
    for half, square in enumerate(squares):
        out[:, half] = _transposed(square.reshape(-1).view("<u8")).view(np.uint8)
    columns: np.ndarray = out.view("<u2").reshape(-1)[:e]
    return columns


def _transposed(squares: np.ndarray) -> np.ndarray:
    """Squares of eight by eight bits, rows and columns exchanged (Hacker's Delight, 7-3); writes into its argument."""
    swap, low = np.empty((2, len(squares)), np.uint64)
    for moves, places in _SWAPS:
        # x ^= t ^ t << n  with  t = (x ^ x >> n) & m  exchanges the bits of m with those n places above them
        np.right_shift(squares, np.uint64(places), out=swap)
        np.bitwise_xor(swap, squares, out=swap)
        np.bitwise_and(swap, np.uint64(moves), out=swap)
        np.left_shift(swap, np.uint64(places), out=low)
        np.bitwise_xor(swap, low, out=swap)
        np.bitwise_xor(squares, swap, out=squares)
    return squares


def _table(values: np.ndarray) -> np.ndarray:
    """For every choice of signs their sum with these values; missing values count nothing."""
    low, high = (_signs() @ np.pad(half, (0, 8 - len(half))) for half in (values[:8], values[8:]))
    table: np.ndarray = np.add.outer(high, low).astype(np.float32).reshape(-1)
    return table


@lru_cache(maxsize=1)
def _signs() -> np.ndarray:
    """All choices of eight signs, one a row: bit r of the row's number, 1 for plus."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.float64) * 2 - 1
