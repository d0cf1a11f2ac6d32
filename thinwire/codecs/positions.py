"""Sparse vectors as positions and values: the payload of `TopK` and `Threshold`, and the scatter of all sparse codecs.

    v length of the positions, positions (`wire/indices.py`), values (by the inner codec, as one block)

If the inner codec `codes_signs`, and guessed signs make the message shorter, positions begin with one byte 4 and the
signs (`wire/row_signs.py`), and the inner codec has the magnitudes:

    4, v length of the signs, signs, positions
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Peer
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import as_one_block, cut
from thinwire.errors import ConfigError, WireError
from thinwire.wire import indices, row_signs
from thinwire.wire.bits import Bytes, read_varint, varint

_SIGNED = 4  # a form of positions that `wire/indices.py` does not have
_MANY = 4096  # values, from which guessing signs may pay
_PAYS = 0.95


class Segment(NamedTuple):
    """A part of the joined vector, and the number of its values that are sent."""

    start: int
    size: int
    sent: int


def check_density(density: float) -> None:
    """Raise a ConfigError unless a density is above 0 and at most 1."""
    if not 0 < density <= 1:
        raise ConfigError(f"density must be above 0 and at most 1, not {density}; write for example density = 0.1")


def pack_sparse(at: np.ndarray, values: Tensor, spec: Spec, inner: Codec, peer: Peer) -> bytes:
    """Encode values and their ascending positions in the joined blocks. The inverse of `unpack_sparse`."""
    matrices = _matrices(spec)
    where = indices.encode(at, spec.size, matrices)
    data, _ = inner.encode({"values": values}, {}, peer)
    if where and inner.codes_signs and len(at) >= _MANY and row_signs.pays(matrices):
        signs = _signs(at, values, spec.size, matrices)
        if len(signs) < _PAYS * len(at) / 8:
            sizes, _ = inner.encode({"values": values.abs()}, {}, peer)
            if len(signs) + len(sizes) < len(data):  # levels of 0 have no sign that could be left out
                where, data = bytes([_SIGNED]) + varint(len(signs)) + signs + where, sizes
    return varint(len(where)) + where + data


def _signs(at: np.ndarray, values: Tensor, n: int, matrices: row_signs.Shapes) -> bytes:
    """The signs of the values at these positions."""
    sent, negative = np.zeros(n, bool), np.zeros(n, bool)
    sent[at] = True
    negative[at] = (values < 0).numpy()
    return row_signs.encode(negative, sent, matrices)


def unpack_sparse(data: Bytes, spec: Spec, segments: list[Segment], inner: Codec, peer: Peer) -> Tree:
    """Decode positions and values; each segment must hold exactly `sent` positions."""
    length, start = read_varint(data)
    if length > len(data) - start:
        raise WireError(f"positions of {length} bytes announced, {len(data) - start} are left")
    k, matrices = sum(segment.sent for segment in segments), _matrices(spec)
    signs, where = _split_signs(memoryview(data)[start : start + length], k, inner)
    at = indices.decode(where, spec.size, k, matrices)
    for first, size, wanted in segments:
        if np.searchsorted(at, first + size) - np.searchsorted(at, first) != wanted:
            raise WireError(f"expected {wanted} positions in a block of {size} values")
    # many positions, of eight bytes each, would take twice the memory of the model: use a boolean mask instead, and
    # free the positions before the values are decoded
    many, mask = 4 * k > spec.size, np.zeros(0, bool)
    if many or signs is not None:
        mask = np.zeros(spec.size, bool)
        mask[at] = True
    chosen = mask if many else at
    del at
    negative = None if signs is None else torch.from_numpy(row_signs.decode(signs, mask, matrices)[chosen])
    values = inner.decode(data[start + length :], as_one_block(spec, k), peer)["values"]
    if negative is not None:
        values = torch.where(negative, 0 - values, values)  # a level of 0 is +0, as without signs
    if not many:
        return scatter(chosen, values, spec)
    vector = torch.zeros(spec.size, dtype=values.dtype).masked_scatter_(torch.from_numpy(mask), values)
    del values, mask, chosen
    return cut(vector, spec, copy=False)


def _split_signs(where: memoryview, k: int, inner: Codec) -> tuple[memoryview | None, memoryview]:
    """The bytes of the signs, if there are any, and of the positions."""
    if where[:1] != bytes([_SIGNED]):
        return None, where
    length, start = read_varint(where, 1)
    if k < _MANY or length > len(where) - start:
        raise WireError(f"signs of {length} bytes announced for {k} values, {len(where) - start} are left")
    if not inner.codes_signs:
        raise WireError(f"signs of values are never sent apart from {type(inner).__name__}")
    return where[start : start + length], where[start + length :]


def scatter(at: np.ndarray, values: Tensor, spec: Spec) -> Tree:
    """A tree of these values at their positions in the joined vector, and zeros at all others."""
    vector = torch.zeros(spec.size, dtype=values.dtype)
    vector.scatter_(0, torch.from_numpy(at), values)  # three times as fast as vector[at] = values
    return cut(vector, spec, copy=False)


def _matrices(spec: Spec) -> list[tuple[int, int]]:
    """Rows and columns of each block: the first axis, and all others together. A vector is one row."""
    rows = [block.shape[0] if len(block.shape) > 1 else 1 for block in spec]
    return [(r, block.numel // max(1, r)) for r, block in zip(rows, spec, strict=True)]
