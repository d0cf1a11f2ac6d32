"""EDEN and DRIVE: a random rotation, then the optimal scalar quantizer of a normal distribution, at any number of bits.

Papers: DRIVE (Vargaftik et al., NeurIPS 2021), EDEN (Vargaftik et al., ICML 2022).

Random rotations of vectors: random signs, then a Hadamard transform, piece by piece.

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

import math
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
import torch

from thinwire.codecs.base import FloatCodec, Peer, cut_finite
from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, join
from thinwire.errors import WireError
from thinwire.wire.bits import Bytes

MAX_BITS = 8
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 4096  # levels that are looked up at a time: a decoder needs little more memory than its result
_GRID = 1 << 20  # centroids are multiples of 1 / _GRID, so that they are the same on all platforms


@register_part("codec", "eden", paper="Vargaftik et al., ICML 2022")
class Eden(FloatCodec):
    """Rotate at random, round each value to one of 2^bits levels, and send the levels and one scale a piece.

        y = H D x,    c = the level nearest to y / |x|,    x ~ s D H c
        s = |x|^2 / <c, y>  (unbiased)   or   <c, y> / (n |c|^2)  (least error)

    Short pieces are rotated twice (`rotate`).

    The levels are those of the Lloyd-Max quantizer of N(0, 1), the distribution of rotated values.

    Args:
        bits: bits a value, above 0 and at most 8, also fractions. With 1.25 bits a quarter of the rotated values, at
            random, has two bits and the others one; with 0.1 bits a tenth has one bit and the others are not sent.
        unbiased: use the scale with which the expectation of the decoded vector is x; its error is larger than
            with the other. Must be off inside `ErrorFeedback`.

    >>> x, peer = torch.sin(torch.arange(1024.0)), Peer(Key(0))
    >>> data, _ = Eden(2).encode({"w": x}, {}, peer)
    >>> error = Eden(2).decode(data, Spec.of({"w": x}), peer)["w"] - x
    >>> len(data), round(float(error.square().sum() / x.square().sum()), 2)     # two bits a value, and a scale
    (260, 0.14)

    With one bit this is DRIVE. The payload has a constant size, without entropy coding. Server and client draw the
    rotation from the key of the client.

    Not `Quantize`, whose levels are equally spaced and whose scale is that of neighboring values.
    """

    bits: Annotated[float, f"(0, {MAX_BITS}]"] = 2.0
    unbiased: bool = True

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """For each piece its scale and its levels."""
        vector = join(tree)
        x = (vector if vector.dtype is torch.float64 else vector.float()).numpy()
        out = bytearray()
        for piece in pieces(len(x)):
            own = x[piece.start : piece.start + piece.values]
            unit = _unit(own)
            y = rotate(own if unit == 1.0 else (own / unit).astype(np.float32), peer.key, piece)
            square = float(np.square(y, dtype=np.float64).sum())
            length = math.sqrt(square / piece.length)
            factor = np.float32(1 / length if length else 1)
            sent = [(y[at], _nearest(y[at] * factor, bits), bits) for at, _, bits in self._groups(piece, peer.key)]
            chosen = [(values, codebook(bits).take(index)) for values, index, bits in sent]
            scale = self._scale(chosen, square / piece.gain, piece.gain) * unit
            out += np.float32(min(scale, _LARGEST)).tobytes()
            out += b"".join(pack_planes(index, bits) for _, index, bits in sent)
        return bytes(out), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The levels times their scale, rotated back."""
        if len(data) != self.size(spec):
            raise WireError(f"expected {self.size(spec)} bytes of {self.bits:g} bits a value, got {len(data)}")
        x, position = np.empty(spec.size, np.float32), 0
        for piece in pieces(spec.size):
            scale = np.frombuffer(data[position : position + 4], "<f4")[0]
            if not 0 <= scale < math.inf:
                raise WireError(f"a scale of {scale} is not possible, expected a finite number from 0")
            own, position = x[piece.start : piece.start + piece.values], position + 4
            c = own if piece.values == piece.length else np.empty(piece.length, np.float32)
            c.fill(0.0)
            for at, count, bits in self._groups(piece, peer.key):
                index = unpack_planes(data[position : position + _bytes(count, bits)], count, bits)
                for first in range(0, count, _CHUNK):  # `take` needs a third of the time of [...]
                    part = slice(first, first + _CHUNK)
                    c[part if isinstance(at, slice) else at[part]] = codebook(bits).take(index[part])
                position += _bytes(count, bits)
            with np.errstate(over="ignore"):  # clamped below
                np.multiply(rotate_back(c, peer.key, piece), scale, out=own)
        return cut_finite(x, spec)

    def size(self, spec: Spec) -> int:
        """Four bytes a piece, and `bits` a value."""
        return sum(4 + sum(_bytes(n, bits) for n, bits in self._counts(piece)) for piece in pieces(spec.size))

    def _scale(self, chosen: list[tuple[np.ndarray, np.ndarray]], norm: float, gain: int) -> float:
        """The factor of the levels of a piece: from its rotated values and levels, its |x|^2, and |y|^2 / |x|^2."""
        product = math.fsum(float(np.multiply(y, c, dtype=np.float64).sum()) for y, c in chosen)
        if self.unbiased:
            return norm / product if product > 0 else 0.0
        square = math.fsum(float(np.square(c, dtype=np.float64).sum()) for _, c in chosen)
        return max(0.0, product / (gain * square)) if square else 0.0

    def _counts(self, piece: Piece) -> list[tuple[int, int]]:
        """How many values of a piece are sent with how many bits."""
        low = int(self.bits)
        more = round((self.bits - low) * piece.length)
        if low == 0:
            return [(max(1, more), 1)]
        return [(n, bits) for n, bits in ((more, low + 1), (piece.length - more, low)) if n]

    def _groups(self, piece: Piece, key: Key) -> list[tuple[slice | np.ndarray, int, int]]:
        """Which rotated values of a piece, how many, have how many bits; server and client draw the same."""
        counts = self._counts(piece)
        if len(counts) == 1 and counts[0][0] == piece.length:
            return [(slice(None), *counts[0])]
        odd, first = (int(word) for word in key.fold("eden", piece.start).words_numpy(2))
        # an odd factor permutes the numbers below a power of two
        order = np.arange(piece.length, dtype=np.uint32)
        order *= np.uint32(odd | 1)  # modulo 2^32, of which the length is a divisor
        order += np.uint32(first)
        order &= np.uint32(piece.length - 1)
        ends = np.cumsum([n for n, _ in counts])
        return [(order[end - n : end], n, bits) for end, (n, bits) in zip(ends, counts, strict=True)]


@lru_cache(MAX_BITS)
def codebook(bits: int) -> np.ndarray:
    """The 2^bits levels of the quantizer of N(0, 1) with the least mean squared error, ascending, as float32.

        level = E[z | z is nearest to it]

    Newton's method on these equations, from the levels of a fine quantizer (density proportional to phi^(1/3)).

    >>> [round(float(level), 4) for level in codebook(2)]
    [-1.5104, -0.4528, 0.4528, 1.5104]
    """
    half = 1 << (bits - 1)
    place = torch.tensor([(half + i + 0.5) / (2 * half) for i in range(half)], dtype=torch.float64)
    level = (torch.special.ndtri(place) * math.sqrt(3)).numpy()
    for _ in range(100):
        edges = np.concatenate(([0.0], (level[1:] + level[:-1]) / 2, [40.0]))
        density = np.exp(-np.square(edges) / 2) / math.sqrt(2 * math.pi)
        below = torch.special.ndtr(torch.from_numpy(edges)).numpy()
        mass = np.diff(below)
        mean = -np.diff(density) / mass
        by_low = density[:-1] * (mean - edges[:-1]) / mass  # derivatives of the mean by the edges of its interval
        by_high = density[1:] * (edges[1:] - mean) / mass
        by_low[0], by_high[-1] = 0.0, 0.0  # these edges are fixed
        slope = np.diag(1 - (by_low + by_high) / 2) - np.diag(by_low[1:] / 2, -1) - np.diag(by_high[:-1] / 2, 1)
        step = np.linalg.solve(slope, mean - level)
        level = level + step
        if np.abs(step).max() < 1e-13:
            break
    level = np.rint(level * _GRID) / _GRID
    levels: np.ndarray = np.concatenate((-level[::-1], level)).astype(np.float32)
    levels.flags.writeable = False
    return levels


def _unit(x: np.ndarray) -> float:
    """What values are divided by before they are rotated: 1, unless sums of their squares could leave float32."""
    largest = float(np.abs(x).max())
    return 1.0 if x.dtype == np.float32 and (not largest or 1e-12 < largest < 1e12) else largest or 1.0


def _nearest(z: np.ndarray, bits: int) -> np.ndarray:
    """The index of the nearest level of each value."""
    levels = codebook(bits)
    edges = (levels[1:] + levels[:-1]) / 2
    if bits > 4:
        return np.searchsorted(edges, z).astype(np.uint8)
    index, above = np.zeros(len(z), np.uint8), np.empty(len(z), bool)
    for edge in edges:  # a few comparisons take less time than a search
        index += np.greater(z, edge, out=above)
    return index


def pack_planes(index: np.ndarray, bits: int) -> bytes:
    """Numbers below 2^bits as bytes: the lowest bit of all numbers, then the next of all.

    >>> pack_planes(np.array([3, 0, 1], np.uint8), 2).hex()
    'a080'
    """
    return b"".join(np.packbits((index >> plane) & 1).tobytes() for plane in range(bits))


def unpack_planes(data: Bytes, count: int, bits: int) -> np.ndarray:
    """The inverse of `pack_planes`."""
    planes = np.frombuffer(data, np.uint8).reshape(bits, -1)
    index = np.zeros(count, np.uint8)
    for plane in range(bits):
        index |= np.unpackbits(planes[plane], count=count) << plane
    return index


def _bytes(count: int, bits: int) -> int:
    """The length of `pack_planes`."""
    return bits * ((count + 7) // 8)


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
    return key.fold("rotation").signs(piece.values, start=piece.start).numpy()


def _second_signs(y: np.ndarray, key: Key, piece: Piece) -> np.ndarray:
    """E y / n, in place: no value leaves the range of float32 in the second rotation."""
    y *= key.fold("rotation", piece.start).signs(piece.length).numpy()
    y *= y.dtype.type(1 / piece.length)
    return y
