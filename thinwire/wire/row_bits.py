"""A bitmap of matrices as bytes, shorter where ones lie in the same rows or columns.

Large values of a trained matrix, above all of a low-rank factor, belong to few inputs or outputs. Each matrix (r, c) is
read along its shorter side, row by row if r >= c, else column by column, so that the w = min(r, c) bits of one row of
its longer side are consecutive. If 8 <= w <= 64 and the longer side is at least 8 w, the columns with the most ones
come first in each row. Matrices with a side of 1 are read as they are. All bits are packed into bytes. Bytes 0, 2, 4,
... are coded first, by regions (`regions.py`). The others are coded in eight groups, each with its own Huffman code, by
the number of ones of the byte before: if that has many, there are often many again.

      for each matrix whose columns are ordered: w integers of bitlength(w - 1) bits, packed: the columns
    v length of the even bytes
      the even bytes, by regions
    v length of the code of groups 0 to 6
      the odd bytes after a byte with 0 ones, 1 one, ..., 7 or 8 ones, each group squeezed

>>> draw = np.random.default_rng(0)
>>> bits = (draw.random((16, 4000)) < draw.random(4000) ** 3).astype(np.uint8).reshape(-1)  # more ones in some columns
>>> data = encode(bits, [(16, 4000)], np.inf)
>>> from thinwire.wire.entropy import squeeze
>>> len(data) < 0.85 * len(squeeze(np.packbits(bits).tobytes()))
True
>>> bool((decode(data, 64000, [(16, 4000)]) == bits).all())
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import bits as _bits, regions
from thinwire.wire.bits import Bytes, prefixed, read_prefixed
from thinwire.wire.entropy import entropy, expand_groups, squeeze_groups

Shapes = Sequence[tuple[int, int]]
GROUPS = 8
_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)
_GROUP = np.minimum(_ONES, GROUPS - 1)  # of the byte after each
_EVERY = 8  # rows, of which one is in the sample
_TABLES = 700  # bytes of the Huffman codes, about


class _Matrix(NamedTuple):
    """A matrix as it is read."""

    start: int  # of its bits
    rows: int
    width: int
    turned: bool  # column by column

    @property
    def end(self) -> int:
        return self.start + self.rows * self.width

    def view(self, bitmap: np.ndarray) -> np.ndarray:
        """Its bits, (rows, width)."""
        part = bitmap[self.start : self.end]
        return part.reshape(self.width, self.rows).T if self.turned else part.reshape(self.rows, self.width)

    @property
    def is_ordered(self) -> bool:
        return 8 <= self.width <= 64 and self.rows >= 8 * self.width

    @property
    def bits(self) -> int:
        return (self.width - 1).bit_length()


def encode(bitmap: np.ndarray, shapes: Shapes, limit: float) -> bytes | None:
    """Encode the bits (uint8) of matrices, or None unless that takes fewer than `limit` bytes. Inverse of `decode`."""
    if _estimate(bitmap, shapes) >= limit:
        return None
    ordered, orders = np.empty_like(bitmap), []
    for matrix in _matrices(shapes, len(bitmap)):
        rows = matrix.view(bitmap)
        if matrix.is_ordered:
            order = np.argsort(-rows.sum(0, dtype=np.int64), kind="stable")
            orders.append(_bits.pack(order, matrix.bits))
            rows = rows[:, order]
        ordered[matrix.start : matrix.end] = rows.reshape(-1)
    packed = np.packbits(ordered, bitorder="little")
    even = regions.squeeze(packed[::2], regions.classes(_ONES.take(packed[::2])))
    data = b"".join((*orders, prefixed(even), squeeze_groups(packed[1::2], _groups(packed), GROUPS)))
    return data if len(data) < limit else None


def _estimate(bitmap: np.ndarray, shapes: Shapes) -> float:
    """About the number of bytes, from a sample of the rows without the order of their columns."""
    sample = np.concatenate([matrix.view(bitmap)[::_EVERY].reshape(-1) for matrix in _matrices(shapes, len(bitmap))])
    packed = np.packbits(sample, bitorder="little")
    odd, group = packed[1::2], _groups(packed)
    found = entropy(packed[::2]) + sum(entropy(odd[group == number]) for number in range(GROUPS))
    return found * len(bitmap) / max(1, len(sample)) + _TABLES


def decode(data: Bytes, n: int, shapes: Shapes) -> np.ndarray:
    """Decode n bits of matrices from exactly these bytes, as uint8. The inverse of `encode`."""
    matrices, at, orders = _matrices(shapes, n), 0, []
    for matrix in matrices:
        if matrix.is_ordered:
            end = at + _bits.width(matrix.width, matrix.bits)
            orders.append(_bits.unpack(data[at:end], matrix.width, matrix.bits))
            at = end
    bits = _bits.unpack(_read_bytes(data[at:], _bits.width(n, 1)).tobytes(), n, 1)
    out, left = np.empty_like(bits), iter(orders)
    for matrix in matrices:
        part = bits[matrix.start : matrix.end].reshape(matrix.rows, matrix.width)
        if matrix.is_ordered:
            back = np.argsort(order := next(left))
            if not np.array_equal(order[back], np.arange(matrix.width)):
                raise WireError(f"the columns are not an order of 0 to {matrix.width - 1}")
            part = part[:, back]
        out[matrix.start : matrix.end] = (part.T if matrix.turned else part).reshape(-1)
    return out


def _read_bytes(data: Bytes, count: int) -> np.ndarray:
    """The packed bits: even bytes, then odd ones."""
    even, odd = read_prefixed(data, "even bytes")
    out = np.empty(count, np.uint8)
    out[::2] = regions.expand(even, -(-count // 2))
    out[1::2] = expand_groups(odd, _groups(out), GROUPS)
    return out


def _matrices(shapes: Shapes, n: int) -> list[_Matrix]:
    """How each matrix is read; without shapes all bits are one row."""
    out, start = [], 0
    for r, c in shapes or ((n, 1),):
        if r * c:
            out.append(_Matrix(start, max(r, c), min(r, c), 1 < r < c))
        start += r * c
    return out


def _groups(packed: np.ndarray) -> np.ndarray:
    """The group of each odd byte: the number of ones of the byte before."""
    return _GROUP.take(packed[::2][: len(packed) // 2])
