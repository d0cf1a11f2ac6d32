"""Sparse codecs: send some of the values and, unless both sides know them, their positions.

Papers: Aji and Heafield, EMNLP 2017 (top-k); Strom, Interspeech 2015 (threshold); Konecny et al., 2016 (random-k).

    TopK, Threshold     v length of the positions, positions (`wire/indices.py`), values
    RandomK, Masked     values, by the inner codec, as one block

If the inner codec `codes_signs`, and guessed signs make the message shorter, positions begin with one byte 4 and the
signs (`wire/row_signs.py`), and the inner codec has the magnitudes:

    4, v length of the signs, signs, positions
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Peer, Raw, SelectingCodec
from thinwire.core.registry import rare, register_part
from thinwire.core.selection import Rounding, kept, largest, largest_of, random_subset
from thinwire.core.text import NonNegativeFloat, PositiveInt, Share
from thinwire.core.tree import Spec, Tree, as_one_block, gather, join, parts, split
from thinwire.errors import WireError
from thinwire.wire import indices, row_signs
from thinwire.wire.bits import Bytes, prefixed, read_prefixed, read_varint, varint

By = Literal["tree", "block", "chunk"]


@register_part("codec", "topk", paper="Aji and Heafield, EMNLP 2017")
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

    density: Share = 0.1
    by: By = "tree"
    inner: Codec = Raw()
    rounding: Rounding = "down"
    chunk: PositiveInt = rare(4096)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Positions and values."""
        spec = Spec.of(tree)
        if self.by == "tree":
            at, values = largest_of(parts(tree), kept(self.density, spec.size, self.rounding))
            return pack_sparse(at, values, spec, self.inner, peer), state
        vector, (bounds, counts) = join(tree), self._segments(spec)
        picked = [
            start + largest(vector[start:end], k) for (start, end), k in zip(pairwise(bounds), counts, strict=True)
        ]
        at = np.concatenate([np.zeros(0, np.int64), *picked])
        return pack_sparse(at, gather([vector], at), spec, self.inner, peer), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros at all others."""
        return unpack_sparse(data, spec, *self._segments(spec), self.inner, peer)

    def _segments(self, spec: Spec) -> tuple[list[int], list[int]]:
        """The bounds of the parts of the joined vector within which values are selected, and how many are of each."""
        if self.by == "chunk":
            bounds = [*range(0, spec.size, self.chunk), spec.size]
        else:
            bounds = [0, *accumulate(block.numel for block in spec)] if self.by == "block" else [0, spec.size]
        return bounds, [kept(self.density, end - start, self.rounding) for start, end in pairwise(bounds)]


@register_part("codec", "threshold", paper="Strom, Interspeech 2015")
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

    value: NonNegativeFloat = 1e-3
    inner: Codec = Raw()

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
        return unpack_sparse(data[position:], spec, [0, spec.size], [k], self.inner, peer)


class KnownPositions(SelectingCodec):
    """Send the values at positions that server and client both know; all others decode to zero."""

    @abstractmethod
    def positions(self, spec: Spec, peer: Peer) -> np.ndarray:
        """The ascending positions in the joined vector."""

    def restored(self, values: Tensor, spec: Spec) -> Tensor:
        """The values to decode to, from those that were sent."""
        return values

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The values at the positions."""
        values = gather(parts(tree), self.positions(Spec.of(tree), peer))
        return self.inner.encode({"values": values}, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros at all others."""
        at = self.positions(spec, peer)
        values = self.inner.decode(data, as_one_block(spec, len(at)), peer)["values"]
        return scatter(at, self.restored(values, spec), spec)


@register_part("codec", "randomk", paper="Konecny et al., 2016")
class RandomK(KnownPositions):
    """Send k values at random positions; server and client draw the same positions, so they are not sent.

        c x_i if i is drawn, else 0,    k = max(1, floor(density d)) without replacement,    c = 1 or d / k

        bytes = inner(values)

    Args:
        density: fraction of the values that is sent, above 0 and at most 1.
        inner: the codec of the selected values, which it receives as one block.
        unbiased: multiply decoded values by d / k, so that their expectation is x. Must be off inside `ErrorFeedback`,
            which compensates for the missing values itself.
        shared: draw the same positions for all clients of a round, so that their payloads can be summed.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = RandomK(0.5), {"w": torch.arange(1.0, 5.0)}, Peer(Key(0))
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> len(data), int((codec.decode(data, Spec.of(tree), peer)["w"] != 0).sum())
    (8, 2)

    Not `RandomMask`, which draws the coordinates that clients train.
    """

    density: Share = 0.1
    inner: Codec = Raw()
    unbiased: bool = True
    shared: bool = False

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """Whether all clients send the same positions, by a summable codec."""
        return self.shared and self.inner.summable

    def positions(self, spec: Spec, peer: Peer) -> np.ndarray:
        """The positions, drawn from the client's key or from that of all clients."""
        key = peer.everyone if self.shared else peer.key
        return random_subset(key.fold("randomk"), spec.size, kept(self.density, spec.size))

    def restored(self, values: Tensor, spec: Spec) -> Tensor:
        """The values, scaled up if `unbiased`."""
        if not self.unbiased or not len(values):
            return values
        limit = torch.finfo(values.dtype).max
        return values.double().mul_(spec.size / len(values)).clamp_(-limit, limit).to(values.dtype)

    def size(self, spec: Spec) -> int | None:
        """The size of the selected values."""
        return self.inner.size(as_one_block(spec, kept(self.density, spec.size)))


@register_part("codec", "masked")
class Masked(KnownPositions):
    """Send the values under the mask of the round; server and client both know the positions.

        x_i if i is under the mask, else 0

        bytes = inner(values under the mask)

    Args:
        inner: the codec of the values under the mask, which it receives as one block.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> peer = Peer(Key(0), mask={"w": torch.tensor([True, False, True])})
    >>> data, _ = Masked().encode({"w": torch.tensor([1.0, 0.0, 3.0])}, {}, peer)
    >>> len(data), Masked().decode(data, Spec.of({"w": torch.zeros(3)}), peer)["w"].tolist()
    (8, [1.0, 0.0, 3.0])

    Blocks without a mask, as before the first pruning, are sent whole. For use with `TopKMask`, `RandomMask` or
    `PruneMask`, which define the mask. Not masked sums, which hide the values of a client (`secure_aggregation`).
    """

    inner: Codec = Raw()

    def positions(self, spec: Spec, peer: Peer) -> np.ndarray:
        """Positions under the mask; a block without one is sent whole."""
        masks = [np.zeros(0, bool)]
        for block in spec:
            mask = peer.mask.get(block.name)
            if mask is None or mask.shape != block.shape:  # inside `RankSlice`, blocks are slices
                mask = torch.ones(block.numel, dtype=torch.bool)
            masks.append(mask.reshape(-1).numpy())
        return np.flatnonzero(np.concatenate(masks))


_SIGNED = 4  # a form of positions that `wire/indices.py` does not have
_MANY = 4096  # values, from which guessing signs may pay
_PAYS = 0.95


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
                where, data = bytes([_SIGNED]) + prefixed(signs) + where, sizes
    return prefixed(where) + data


def _signs(at: np.ndarray, values: Tensor, n: int, matrices: row_signs.Shapes) -> bytes:
    """The signs of the values at these positions."""
    sent, negative = np.zeros(n, bool), np.zeros(n, bool)
    sent[at] = True
    negative[at] = (values < 0).numpy()
    return row_signs.encode(negative, sent, matrices)


def unpack_sparse(data: Bytes, spec: Spec, bounds: list[int], counts: list[int], inner: Codec, peer: Peer) -> Tree:
    """Decode positions and values; between two bounds there must be exactly as many positions as stated."""
    where, rest = read_prefixed(data, "positions")
    k, matrices = sum(counts), _matrices(spec)
    signs, where = _split_signs(where, k, inner)
    at = indices.decode(where, spec.size, k, matrices)
    for i in np.flatnonzero(np.diff(np.searchsorted(at, bounds)) != counts):
        raise WireError(f"expected {counts[i]} positions in a block of {bounds[i + 1] - bounds[i]} values")
    mask = np.zeros(0 if signs is None and 4 * k <= spec.size else spec.size, bool)
    if len(mask):
        mask[at] = True
    if 4 * k > spec.size:  # many positions, of eight bytes each, would take twice the memory of the model
        at = mask
    negative = None if signs is None else torch.from_numpy(row_signs.decode(signs, mask, matrices)[at])
    values = inner.decode(rest, as_one_block(spec, k), peer)["values"]
    if negative is not None:
        values = torch.where(negative, 0 - values, values)  # a level of 0 is +0, as without signs
    return scatter(at, values, spec)


def _split_signs(where: memoryview, k: int, inner: Codec) -> tuple[memoryview | None, memoryview]:
    """The bytes of the signs, if there are any, and of the positions."""
    if where[:1] != bytes([_SIGNED]):
        return None, where
    if k < _MANY or not inner.codes_signs:
        raise WireError(f"signs of {k} values are never sent apart from {type(inner).__name__}")
    return read_prefixed(where, "signs", 1)


def scatter(at: np.ndarray, values: Tensor, spec: Spec) -> Tree:
    """A tree of these values at their positions in the joined vector, or under a mask, and zeros everywhere else."""
    vector, chosen = torch.zeros(spec.size, dtype=values.dtype), torch.from_numpy(at)
    if chosen.dtype is torch.bool:
        vector.masked_scatter_(chosen, values)
    else:
        vector.scatter_(0, chosen, values)  # three times as fast as vector[at] = values
    return split(vector, spec, copy=False)


def _matrices(spec: Spec) -> list[tuple[int, int]]:
    """Rows and columns of each block: the first axis, and all others together. A vector is one row."""
    rows = [block.shape[0] if len(block.shape) > 1 else 1 for block in spec]
    return [(r, block.numel // max(1, r)) for r, block in zip(rows, spec, strict=True)]
