"""Rounding to a lattice of powers of two, on which sums are exact and short.

Entries of several rounds on such a lattice add up to a vector of slightly larger integers, so a client that missed ten
rounds of a basis downloads little more than one round (`LatticeSum`), and nothing is rounded a second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, FloatCodec, Peer, Raw, cut_finite
from thinwire.core.registry import rare, register_part, short_repr
from thinwire.core.text import PositiveFloat
from thinwire.core.tree import Spec, Tree
from thinwire.errors import ConfigError, WireError
from thinwire.wire import indices, integers
from thinwire.wire.bits import Bytes, prefixed, read_prefixed, read_varint, varint

_EXACT = 1 << 23  # integers up to this size, and their sums, are exact in float32
_DENSE, _SPARSE = 1, 2  # forms of a sum
_MANY = 4096  # levels of which zeros can be left out; fewer are coded near their entropy with them
_LOWEST, _HIGHEST = -126, 100  # exponents of steps: no value underflows or overflows float32


@register_part("codec", "lattice")
class Lattice(FloatCodec):
    """Round each value to a multiple of a power of two; sums of such values are exact.

        x ~ s q,          s = 2^round(log2(step * rms(x))) of each block of the tree,    q = x / s rounded to an integer
        x ~ s (q - u),    q = x / s + u rounded, with `dither`

    Args:
        step: the distance of levels as a multiple of the root mean square; 1 takes about 2 bits a value, 0.25 about 4.
        stochastic: round up or down at random, without bias; otherwise to the nearest level.
        dither: shift each level by a number u from [-1/2, 1/2) that both ends draw from the shared key: without bias
            too, with half the variance of `stochastic`. Sums of messages are on no lattice, so it is for uploads.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.linspace(-1, 1, 128)}, Peer(Key(0))
    >>> data, _ = Lattice(0.5).encode(tree, {}, peer)
    >>> len(data), Lattice(0.5).decode(data, Spec.of(tree), peer)["w"][:3].tolist()
    (58, [-1.0, -1.0, -1.0])

    The payload is one byte a block (the exponent of s), then all q, entropy-coded (`wire/integers.py`).

    Not `Quantize`, which has a fixed number of levels and scales whose multiples do not add up exactly.
    """

    step: PositiveFloat = 1.0
    stochastic: bool = False
    dither: bool = rare(False)
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.stochastic and self.dither:
            raise ConfigError("stochastic and dither are two ways to round without bias; leave one of them out")

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Exponents, then levels."""
        blocks = [_numbers(block) for block in tree.values()]
        exponents = [exponent_of(x, self.step) if not self.dither or x.any() else _LOWEST for x in blocks]
        scaled = [np.ldexp(x, -e) for x, e in zip(blocks, exponents, strict=True)]
        x = np.concatenate([np.zeros(0), *scaled])
        if self.stochastic:
            levels = np.floor(x + _uniform(peer, len(x)))
        else:
            levels = np.rint(x + (_uniform(peer, len(x)) - 0.5) if self.dither else x)
        return _pack(exponents, levels.astype(np.int64)), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The levels times their steps, without the dither."""
        return _unpack(data, spec, shift=_uniform(peer, spec.size) - np.float32(0.5) if self.dither else None)


@register_part("codec", "lattice-sum")
class LatticeSum(Codec):
    """Send values without loss, those on a lattice as small integers.

        x = s q,    s = the largest power of two of which all values of a block are multiples,    q an integer

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.tensor([0.75, -1.5, 0.0] * 50)}, Peer(Key(0))
    >>> data, _ = LatticeSum().encode(tree, {}, peer)
    >>> len(data), bool((LatticeSum().decode(data, Spec.of(tree), peer)["w"] == tree["w"]).all())
    (81, True)

    For sums of values that `Lattice` rounded, as `merge_codec`: coordinates at the end of a basis, or
    what a client missed. Of many values with zeros among them, the positions and the values of the others are sent.
    Values that are not on a lattice are sent raw.
    """

    exact = keeps_zeros = True
    encodes_sums = True  # sums of multiples of powers of two are such multiples

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """A byte for the form: 0 and raw values, 1 with exponents and levels, or 2 with the levels that are not 0."""
        raw = Raw().encode(tree, {}, peer)[0]
        short = all(block.dtype is torch.float32 for block in tree.values())  # others are sent raw
        found = [_divisor(_numbers(block)) for block in tree.values()] if short else [None]
        known = [one for one in found if one is not None]
        if len(known) == len(found):
            exponents, levels = [one[0] for one in known], [np.zeros(0, np.int64), *(one[1] for one in known)]
            packed = _shortest(exponents, np.concatenate(levels))
            if len(packed) <= len(raw):
                return packed, state
        return b"\0" + bytes(raw), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values, bit for bit."""
        if not len(data) or data[0] > _SPARSE:
            raise WireError("expected a form of 0 (raw), 1 (lattice) or 2 (lattice, without zeros)")
        rest = memoryview(data)[1:]
        if data[0] == 0:
            return Raw().decode(rest, spec, peer)
        return _unpack(rest, spec, _read_sparse if data[0] == _SPARSE else integers.decode)


def exponent_of(x: np.ndarray, step: float) -> int:
    """The exponent of the power of two nearest to `step` times the root mean square of these values; 0 without any."""
    largest = float(np.abs(x).max(initial=0.0))
    if largest == 0:
        return 0
    wanted = step * largest * math.sqrt(float(np.square(x / largest).mean()))
    least = largest / _EXACT  # levels stay exact
    return min(_HIGHEST, max(_LOWEST, round(math.log2(max(wanted, least)))))


def read_exponents(data: Bytes, spec: Spec) -> list[int]:
    """The exponents of the steps of all blocks: one signed byte each, at the beginning of a payload."""
    if len(data) < len(spec.blocks):
        raise WireError(f"expected {len(spec.blocks)} exponents, got {len(data)} bytes")
    exponents: list[int] = np.frombuffer(data[: len(spec.blocks)], np.int8).tolist()
    for exponent in exponents:
        if not _LOWEST <= exponent <= _HIGHEST:
            raise WireError(f"a step of 2^{exponent} is not possible, expected {_LOWEST} to {_HIGHEST}")
    return exponents


def _uniform(peer: Peer, count: int) -> np.ndarray:
    """Random numbers from [0, 1), the same at both ends."""
    return peer.key.fold("quantise").cpu_uniform()(count)


def _numbers(block: Tensor) -> np.ndarray:
    return block.detach().cpu().double().numpy().reshape(-1)


def _divisor(x: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The exponent of the largest power of two that divides all values, and the quotients; None where too large.

    A negative zero is no multiple: its sign would be lost.
    """
    if not np.isfinite(x).all() or np.signbit(x[x == 0]).any():
        return None
    some = x[x != 0]
    if not len(some):
        return 0, np.zeros(len(x), np.int64)
    mantissa, exponent = np.frexp(some)  # x = mantissa 2^exponent, the mantissa of a float32 has 24 bits
    whole = np.abs(mantissa * (1 << 24)).astype(np.int64)
    zeros = np.frexp((whole & -whole).astype(np.float64))[1] - 1  # trailing zeros of each
    least = int((exponent - 24 + zeros).min())
    if not _LOWEST <= least <= _HIGHEST or int(exponent.max()) - least > 24:
        return None
    return least, np.ldexp(x, -least).astype(np.int64)


def _pack(exponents: list[int], levels: np.ndarray) -> bytes:
    return np.array(exponents, np.int8).tobytes() + integers.encode(levels)


def _shortest(exponents: list[int], levels: np.ndarray) -> bytes:
    """The shorter form of a sum."""
    dense = bytes([_DENSE]) + _pack(exponents, levels)
    if len(levels) <= _MANY or 4 * np.count_nonzero(levels) > 3 * len(levels):
        return dense
    sparse = bytes([_SPARSE]) + np.array(exponents, np.int8).tobytes() + _sparse(levels)
    return min(dense, sparse, key=len)


def _sparse(levels: np.ndarray) -> bytes:
    """The number of levels that are not 0, their positions, and their values, positive ones less 1."""
    at = np.flatnonzero(levels)
    values = levels[at]
    return varint(len(at)) + prefixed(indices.encode(at, len(levels))) + integers.encode(values - (values > 0))


def _read_sparse(data: Bytes, count: int) -> np.ndarray:
    """The inverse of `_sparse`."""
    k, position = read_varint(data)
    if 4 * k > 3 * count:  # before memory is allocated: more are sent with zeros
        raise WireError(f"{k} of {count} levels announced as not 0; so many are sent with zeros")
    where, rest = read_prefixed(data, "positions", position)
    values = _bounded(integers.decode(rest, k)).astype(np.int32)
    values += values >= 0
    levels = np.zeros(count, np.int32)
    levels[indices.decode(where, count, k)] = values
    return levels


def _bounded(levels: np.ndarray) -> np.ndarray:
    """The same levels; raises WireError if one is so large that a sum of it would not be exact."""
    if len(levels) and max(int(levels.max()), -int(levels.min())) > 2 * _EXACT:
        raise WireError(f"a level is larger than {2 * _EXACT}")
    return levels


def _unpack(
    data: Bytes,
    spec: Spec,
    read: Callable[[Bytes, int], np.ndarray] = integers.decode,
    shift: np.ndarray | None = None,
) -> Tree:
    """Blocks from exponents and levels, of which `shift` is subtracted."""
    exponents = read_exponents(data, spec)
    # exact: a level has 24 bits, and no exponent leaves the range of float32
    x, start = _bounded(read(data[len(spec.blocks) :], spec.size)).astype(np.float32), 0
    if shift is not None:
        x -= shift
    for block, exponent in zip(spec, exponents, strict=True):
        piece = x[start : start + block.numel]
        np.ldexp(piece, exponent, out=piece)
        start += block.numel
    return cut_finite(x, spec)
