"""Random rotations of vectors: random signs, then a Hadamard transform, piece by piece.

    y = H D x        D: random signs of the key;  H: the Hadamard matrix with entries +1 and -1, so x = D H y / n

After it, all values of a piece have about the same normal distribution, whatever x was. A vector is divided into pieces
whose lengths are powers of two, so that little is padded: 11,274 values are pieces of 8,192, 2,048, 1,024 and 16 (the
last with six zeros). Every operation is a sum or a difference of two values, in a fixed order, so that the
result has the same bits on all platforms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.core.key import Key

LONGEST = 1 << 16  # values of a piece: it fits into the cache of a processor
SHORTEST = 64  # what is left below this length is padded


class Piece(NamedTuple):
    """Consecutive values of a vector, padded with zeros to a power of two."""

    start: int
    values: int  # of the vector
    length: int  # with padding


def pieces(size: int) -> list[Piece]:
    """The pieces of a vector, longest first.

    >>> [(piece.values, piece.length) for piece in pieces(11_274)]
    [(8192, 8192), (2048, 2048), (1024, 1024), (10, 16)]
    """
    out, start = [], 0
    while (left := size - start) > 0:
        power = 1 << (left.bit_length() - 1)
        length = min(power, LONGEST)
        if left < SHORTEST:
            length = power if power == left else 2 * power
        out.append(Piece(start, min(length, left), length))
        start += out[-1].values
    return out


def hadamard(x: np.ndarray) -> np.ndarray:
    """H x of a vector whose length is a power of two; H H x = n x. x is overwritten: it takes one more vector.

    >>> hadamard(np.array([1.0, 2.0, 3.0, 4.0])).tolist()
    [10.0, -2.0, -4.0, 0.0]
    """
    low = 1 << ((len(x).bit_length() - 1) // 2)
    now, other = x, np.empty_like(x)
    for rows in (len(x) // low, low):  # each half of the bits of the index is the first axis once: long rows are fast
        now, other = _stages(now, other, rows)
        np.copyto(other.reshape(-1, rows), now.reshape(rows, -1).T)
        now, other = other, now
    return now


def _stages(now: np.ndarray, other: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The transform of a matrix along its first axis, one stage a bit of the index; the result and the other buffer."""
    half, columns = 1, len(now) // rows
    while half < rows:
        pairs, sums = now.reshape(-1, 2, half * columns), other.reshape(-1, 2, half * columns)
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        now, other, half = other, now, 2 * half
    return now, other


def signs(key: Key, piece: Piece) -> np.ndarray:
    """The random signs D of a piece of a vector, as float32."""
    drawn: np.ndarray = key.fold("rotation").signs(piece.values, start=piece.start).numpy()
    return drawn


def rotate(x: np.ndarray, d: np.ndarray, length: int) -> np.ndarray:
    """H D x of the values of one piece.

    Args:
        x: its values.
        d: their signs.
        length: its length with padding.
    """
    padded = np.zeros(length, x.dtype)
    np.multiply(x, d, out=padded[: len(x)])
    return hadamard(padded)
