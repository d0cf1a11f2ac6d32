"""Top-k sparsification: send the values of largest magnitude.

Paper: Aji and Heafield, EMNLP 2017.

Threshold sparsification: send the values whose magnitude reaches a threshold.

Paper: Strom, Interspeech 2015.

Sparse vectors as positions and values: the payload of `TopK` and `Threshold`, and the scatter of all sparse codecs.

    v length of the positions, positions (`wire/indices.py`), values (by the inner codec, as one block)

If the inner codec `codes_signs`, and guessed signs make the message shorter, positions begin with one byte 4 and the
signs (`wire/row_signs.py`), and the inner codec has the magnitudes:

    4, v length of the signs, signs, positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Peer, Raw, SelectingCodec, refuse_stateful
from thinwire.core.registry import rare, register, short_repr
from thinwire.core.selection import Rounding, kept, largest, largest_of
from thinwire.core.spec import Spec
from thinwire.core.text import check_settings
from thinwire.core.tree import Tree, as_one_block, gather, join, parts, split
from thinwire.errors import WireError
from thinwire.wire import indices, row_signs
from thinwire.wire.bits import Bytes, read_varint, varint

By = Literal["tree", "block", "chunk"]


@register("codec", "topk", paper="Aji and Heafield, EMNLP 2017")
@dataclass(frozen=True)
class TopK(SelectingCodec):
    """Send the k values of largest magnitude and their positions; all others decode to zero.

        x_i if |x_i| is among the k largest, else 0,    k = max(1, floor(density d))  or  ceil(density d)

        bytes = v length of the positions, positions, inner(values)

    Among equal magnitudes the first are sent.

    Args:
        density: fraction of the values that is sent, above 0 and at most 1.
        by: `tree` selects among all values together, `block` within each block, `chunk` within each `chunk` values.
        inner: the codec of the selected values, which it receives as one block.
        rounding: how k is rounded: `down` (FLASC) or `up` (the sparse baseline of the sketching papers).
        chunk: consecutive values of the joined tree among which `by = "chunk"` selects; the last chunk may be shorter.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = TopK(0.5), {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, Peer(Key(0))
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> codec.decode(data, Spec.of(tree), peer)["w"].tolist()
    [0.0, -3.0, 2.0, 0.0]

    Top-k is biased: values that are never large are never sent. `ErrorFeedback(TopK(...))` accumulates them until they
    are. Not `TopKMask`, which selects the coordinates that clients train.
    """

    density: float = 0.1
    by: By = "tree"
    inner: Codec = Raw()
    rounding: Rounding = "down"
    chunk: int = rare(4096)
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_settings(self, density="(0, 1]", chunk="[1, inf)")
        refuse_stateful(self, self.inner)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Positions and values."""
        spec = Spec.of(tree)
        if self.by == "tree":
            at, values = largest_of(parts(tree), kept(self.density, spec.size, self.rounding))
            return pack_sparse(at, values, spec, self.inner, peer), state
        vector, picked = join(tree), [np.zeros(0, np.int64)]
        for start, size, k in self._segments(spec):
            picked.append(start + largest(vector[start : start + size], k))
        at = np.concatenate(picked)
        return pack_sparse(at, gather([vector], at), spec, self.inner, peer), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros at all others."""
        return unpack_sparse(data, spec, self._segments(spec), self.inner, peer)

    def _segments(self, spec: Spec) -> list[Segment]:
        """The parts of the joined vector within which the largest values are selected."""
        sizes = [spec.size] if self.by == "tree" else [block.numel for block in spec]
        if self.by == "chunk":
            sizes = [min(self.chunk, spec.size - start) for start in range(0, spec.size, self.chunk)]
        starts = np.cumsum([0, *sizes]).tolist()
        counts = [kept(self.density, size, self.rounding) for size in sizes]
        return [Segment(*segment) for segment in zip(starts[:-1], sizes, counts, strict=True)]


@register("codec", "threshold", paper="Strom, Interspeech 2015")
@dataclass(frozen=True)
class Threshold(SelectingCodec):
    """Send the values whose magnitude reaches a threshold, and their positions; all others decode to zero.

        x_i if |x_i| >= value, else 0

        bytes = v number of values, v length of the positions, positions, inner(values)

    Args:
        value: the smallest magnitude that is sent; 0 sends all values that are not zero.
        inner: the codec of the selected values, which it receives as one block.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = Threshold(1.0), {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, Peer(Key(0))
    >>> codec.decode(codec.encode(tree, {}, peer)[0], Spec.of(tree), peer)["w"].tolist()
    [0.0, -3.0, 2.0, 0.0]

    Unlike `TopK`, the number of values, and so the size of the message, depends on their magnitudes.
    """

    value: float = 1e-3
    inner: Codec = Raw()

    def __post_init__(self) -> None:
        check_settings(self, value="[0, inf)")
        refuse_stateful(self, self.inner)

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        """Whether all values except zeros are sent, by an exact codec."""
        return self.value == 0 and self.inner.exact

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The number of values, positions and values."""
        vector = join(tree)
        at = np.flatnonzero(((vector.abs() >= self.value) & (vector != 0)).numpy())
        packed = pack_sparse(at, gather([vector], at), Spec.of(tree), self.inner, peer)
        return varint(len(at)) + packed, state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros at all others."""
        k, position = read_varint(data)
        if k > spec.size:
            raise WireError(f"{k} values announced, the blocks have {spec.size}")
        return unpack_sparse(data[position:], spec, [Segment(0, spec.size, k)], self.inner, peer)


_SIGNED = 4  # a form of positions that `wire/indices.py` does not have
_MANY = 4096  # values, from which guessing signs may pay
_PAYS = 0.95


class Segment(NamedTuple):
    """A part of the joined vector, and the number of its values that are sent."""

    start: int
    size: int
    sent: int


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
    return split(vector, spec, copy=False)


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
    return split(vector, spec, copy=False)


def _matrices(spec: Spec) -> list[tuple[int, int]]:
    """Rows and columns of each block: the first axis, and all others together. A vector is one row."""
    rows = [block.shape[0] if len(block.shape) > 1 else 1 for block in spec]
    return [(r, block.numel // max(1, r)) for r, block in zip(rows, spec, strict=True)]
