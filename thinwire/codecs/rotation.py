"""Random rotations of vectors: random signs, then a Hadamard transform, piece by piece.

    y = H D x             so x = D H y / n        D, E: random signs of the key;  H: the Hadamard matrix of +1 and -1
    y = H E H D x / n     so x = D H E H y / n    for short pieces

After it, all values of a piece have about the same normal distribution, whatever x was. For a short piece one rotation
is not enough: the last values of a model are often those of its output layer, of which few have most of the length,
and sums of few values with random signs are not normal yet. A vector is divided into pieces whose lengths are powers of
two, so that little is padded: 11,274 values are pieces of 8,192, 2,048, 1,024 and 16 (the last with six zeros). Every
operation is a sum or a difference of two values, in a fixed order, or a product with a power of two, so that the result
has the same bits on all platforms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from thinwire.core.key import Key

LONGEST = 1 << 16  # values of a piece: it fits into the cache of a processor
SHORTEST = 64  # what is left below this length is padded
TWICE = 1 << 13  # pieces up to this length are rotated twice; a vector has at most twice as many values in them


class Piece(NamedTuple):
    """Consecutive values of a vector, padded with zeros to a power of two."""

    start: int
    values: int  # of the vector
    length: int  # with padding

    @property
    def gain(self) -> int:
        """|y|^2 / |x|^2 of a rotated piece y."""
        return 1 if self.length <= TWICE else self.length


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


def rotate(x: np.ndarray, key: Key, piece: Piece) -> np.ndarray:
    """The values of one piece, rotated by a key; as long as the piece with its padding.

    >>> [piece], key, x = pieces(40), Key(1), np.ones(40, np.float32)
    >>> float(np.square(rotate(x, key, piece)).sum())
    40.0
    """
    padded = np.zeros(piece.length, x.dtype)
    np.multiply(x, _signs(key, piece), out=padded[: len(x)])
    y = hadamard(padded)
    return y if piece.length > TWICE else hadamard(_second_signs(y, key, piece))


def rotate_back(y: np.ndarray, key: Key, piece: Piece) -> np.ndarray:
    """`gain` times the values of a piece whose rotation is y, which is overwritten."""
    if piece.length <= TWICE:
        y = _second_signs(hadamard(y), key, piece)
    x = hadamard(y)[: piece.values]
    x *= _signs(key, piece)
    return x


def _signs(key: Key, piece: Piece) -> np.ndarray:
    """The random signs D of a piece of a vector, as float32."""
    drawn: np.ndarray = key.fold("rotation").signs(piece.values, start=piece.start).numpy()
    return drawn


def _second_signs(y: np.ndarray, key: Key, piece: Piece) -> np.ndarray:
    """E y / n, in place: no value leaves the range of float32 in the second rotation."""
    y *= key.fold("rotation", piece.start).signs(piece.length).numpy()
    y *= y.dtype.type(1 / piece.length)
    return y
