"""Some of the numbers only: the largest, those above a threshold, or some at random. The others arrive as zero.

Largest: Aji and Heafield, EMNLP 2017. Threshold: Strom, Interspeech 2015. Random: Konecny et al., 2016 (random mask).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Peer, Raw, check_fits
from thinwire.core.registry import register
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import as_one_block, common_type, cut, join
from thinwire.errors import ConfigError, WireError
from thinwire.wire import indices as _indices
from thinwire.wire.bits import Bytes, read_varint, varint

By = Literal["tree", "block"]
Rounding = Literal["down", "up"]


@register("codec", "topk", paper="Aji and Heafield, EMNLP 2017")
@dataclass(frozen=True)
class TopK(Codec):
    """Send the largest numbers only, and where they are; all others arrive as zero.

        x_i if |x_i| is among the k largest, else 0,    k = max(1, floor(density d))  or  ceil(density d)

    Args:
        density: share of the numbers that is sent, above 0 and at most 1.
        by: `tree` takes the largest of all numbers together, `block` the largest of each block.
        inner: the codec of the values that are sent, as one block.
        rounding: which whole number k is: `down` (FLASC) or `up` (the sparse baseline of the sketching papers).

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = TopK(0.5), {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, Peer(Key(0))
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> codec.decode(data, Spec.of(tree), peer)["w"].tolist()
    [0.0, -3.0, 2.0, 0.0]

    Of equal sizes the first are taken. Not unbiased: what is never large is never sent; `ErrorFeedback` around it
    remembers that.
    """

    density: float = 0.1
    by: By = "tree"
    inner: Codec = Raw()
    rounding: Rounding = "down"

    def __post_init__(self) -> None:
        _check_density(self.density)
        if self.rounding not in get_args(Rounding):
            raise ConfigError(f"rounding must be one of {', '.join(get_args(Rounding))}, not {self.rounding!r}")
        if self.by not in get_args(By):
            raise ConfigError(f"by must be one of {', '.join(get_args(By))}, not {self.by!r}")
        refuse_memory(self, self.inner)

    def check(self, spec: Spec) -> None:
        """Ask the inner codec, which sees one block called `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; refuses blocks that are not of real numbers."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Length of the positions, positions, values."""
        vector, spec = join(tree), Spec.of(tree)
        picked = []
        for start, size, k in self._shares(spec):
            picked.append(start + largest(vector[start : start + size], k))
        at = np.concatenate(picked) if picked else np.zeros(0, np.int64)
        return _pack(vector, at, self.inner, peer), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros elsewhere."""
        return _unpack(data, spec, self._shares(spec), self.inner, peer)

    def _shares(self, spec: Spec) -> list[tuple[int, int, int]]:
        """Start, size and number of values of each stretch in which the largest are looked for."""
        sizes = [spec.size] if self.by == "tree" else [block.numel for block in spec]
        starts = np.cumsum([0, *sizes]).tolist()
        counts = [kept(self.density, size, self.rounding) for size in sizes]
        return list(zip(starts[:-1], sizes, counts, strict=True))


@register("codec", "threshold", paper="Strom, Interspeech 2015")
@dataclass(frozen=True)
class Threshold(Codec):
    """Send the numbers that are large enough, and where they are; all others arrive as zero.

        x_i if |x_i| >= value, else 0

    Args:
        value: the smallest size that is sent; 0 sends every number that is not zero.
        inner: the codec of the values that are sent, as one block.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = Threshold(1.0), {"w": torch.tensor([0.1, -3.0, 2.0, 0.2])}, Peer(Key(0))
    >>> codec.decode(codec.encode(tree, {}, peer)[0], Spec.of(tree), peer)["w"].tolist()
    [0.0, -3.0, 2.0, 0.0]
    """

    value: float = 1e-3
    inner: Codec = Raw()

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"value must be 0 or more, not {self.value}")
        refuse_memory(self, self.inner)

    @property
    def keeps_zeros(self) -> bool:
        """Whether all values except zeros are sent, by an exact codec."""
        return self.value == 0 and self.inner.exact

    def check(self, spec: Spec) -> None:
        """Ask the inner codec, which sees one block called `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; refuses blocks that are not of real numbers."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """How many, length of the positions, positions, values."""
        vector = join(tree)
        at = np.flatnonzero(((vector.abs() >= self.value) & (vector != 0)).numpy())
        return varint(len(at)) + _pack(vector, at, self.inner, peer), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at their positions, zeros elsewhere."""
        k, position = read_varint(data)
        if k > spec.size:
            raise WireError(f"{k} values of {spec.size} numbers cannot be")
        return _unpack(data[position:], spec, [(0, spec.size, k)], self.inner, peer)


@register("codec", "masked")
@dataclass(frozen=True)
class Masked(Codec):
    """Send the numbers that the mask of the round lets clients train; both ends know where they are.

        x_i if i is under the mask, else 0

    Args:
        inner: the codec of the values that are sent, as one block.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> peer = Peer(Key(0), mask={"w": torch.tensor([True, False, True])})
    >>> data, _ = Masked().encode({"w": torch.tensor([1.0, 0.0, 3.0])}, {}, peer)
    >>> len(data), Masked().decode(data, Spec.of({"w": torch.zeros(3)}), peer)["w"].tolist()
    (8, [1.0, 0.0, 3.0])

    Without a mask, as before the first pruning, all numbers are sent. See `Select` and `Prune`.
    """

    inner: Codec = Raw()

    def __post_init__(self) -> None:
        refuse_memory(self, self.inner)

    def check(self, spec: Spec) -> None:
        """Ask the inner codec, which sees one block called `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; refuses blocks that are not of real numbers."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The values."""
        values = join(tree)[torch.from_numpy(_under(Spec.of(tree), peer))]
        return self.inner.encode({"values": values}, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values under the mask, zeros elsewhere."""
        at = _under(spec, peer)
        return _spread(at, self.inner.decode(data, as_one_block(spec, len(at)), peer)["values"], spec)


@register("codec", "randomk", paper="Konecny et al., 2016")
@dataclass(frozen=True)
class RandomK(Codec):
    """Send some numbers picked at random; both ends draw the same positions, so none are sent.

        c x_i if i is drawn, else 0,    k = max(1, floor(density d)) drawn without repetition,    c = 1 or d / k

    Args:
        density: share of the numbers that is sent, above 0 and at most 1.
        inner: the codec of the values that are sent, as one block.
        unbiased: multiply what arrives by d / k, so that it is right on average. Off under `ErrorFeedback`, which makes
            up for what is missing by itself.
        shared: draw the same positions for all clients of a round, so that their messages can be added up as they are.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> codec, tree, peer = RandomK(0.5), {"w": torch.arange(1.0, 5.0)}, Peer(Key(0))
    >>> data, _ = codec.encode(tree, {}, peer)
    >>> len(data), int((codec.decode(data, Spec.of(tree), peer)["w"] != 0).sum())
    (8, 2)
    """

    density: float = 0.1
    inner: Codec = Raw()
    unbiased: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        _check_density(self.density)
        refuse_memory(self, self.inner)

    @property
    def summable(self) -> bool:
        """If all clients send the numbers at the same places."""
        return self.shared and self.inner.summable

    def check(self, spec: Spec) -> None:
        """Ask the inner codec, which sees one block called `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; refuses blocks that are not of real numbers."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The values."""
        vector = join(tree)
        values = vector[torch.from_numpy(self._drawn(len(vector), peer))]
        return self.inner.encode({"values": values}, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at the positions drawn, zeros elsewhere."""
        at = self._drawn(spec.size, peer)
        values = self.inner.decode(data, as_one_block(spec, len(at)), peer)["values"]
        if self.unbiased and len(at):
            limit = torch.finfo(values.dtype).max
            values = (values.double() * (spec.size / len(at))).clamp(-limit, limit).to(values.dtype)
        return _spread(at, values, spec)

    def size(self, spec: Spec) -> int | None:
        """The size of the values."""
        return self.inner.size(as_one_block(spec, kept(self.density, spec.size)))

    def _drawn(self, n: int, peer: Peer) -> np.ndarray:
        """The positions of the largest of n random words: no sorting of all."""
        words = (peer.everyone if self.shared else peer.key).fold("randomk").words_numpy(n)
        return _top(words, kept(self.density, n))


def kept(density: float, n: int, rounding: Rounding = "down") -> int:
    """How many of n numbers are sent: max(1, floor(density n)) or ceil(density n), and none of none.

    >>> kept(0.29, 100), kept(0.07, 100, "up"), kept(0.1, 11), kept(0.1, 11, "up")
    (29, 7, 1, 2)
    """
    exact = round(density * n, 6)  # 0.29 * 100 is 28.999999999999996, 0.07 * 100 is 7.000000000000001
    return min(n, max(1, math.floor(exact) if rounding == "down" else math.ceil(exact)))


def refuse_memory(outer: object, inner: Codec) -> None:
    """An inner codec that remembers would remember values whose positions change with every message."""
    if inner.init(Spec((Block("values", (1,)),))):
        name, within = type(outer).__name__, type(inner).__name__
        raise ConfigError(
            f"{within} inside {name} would remember values whose places change; "
            f"write it the other way round: {within}({name}(...))"
        )


def _check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ConfigError(f"density must be above 0 and at most 1, not {density}; write for example density = 0.1")


def largest(x: Tensor, k: int) -> np.ndarray:
    """Positions of the k largest sizes in ascending order; of equal ones the first."""
    return _top((x if x.dtype is torch.float64 else x.float()).abs().numpy(), k)


def _top(size: np.ndarray, k: int) -> np.ndarray:
    if k == len(size):
        return np.arange(k, dtype=np.int64)
    edge = np.partition(size, len(size) - k)[len(size) - k]
    at = np.flatnonzero(size >= edge)
    if len(at) == k:  # nearly always: no equal sizes at the edge, so nothing to choose or to sort
        return at
    above = np.flatnonzero(size > edge)
    return np.sort(np.concatenate((above, np.flatnonzero(size == edge)[: k - len(above)])))


def _under(spec: Spec, peer: Peer) -> np.ndarray:
    """Positions under the mask, of all blocks one after another."""
    parts = []
    for block in spec:
        mask = peer.mask.get(block.name)
        if mask is None or mask.shape != block.shape:  # as under `RankSlice`, which hands on parts of blocks
            mask = torch.ones(block.numel, dtype=torch.bool)
        parts.append(mask.reshape(-1).numpy())
    return np.flatnonzero(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def _pack(vector: Tensor, at: np.ndarray, inner: Codec, peer: Peer) -> bytes:
    where = _indices.encode(at, len(vector))
    values, _ = inner.encode({"values": vector.index_select(0, torch.from_numpy(at))}, {}, peer)
    return varint(len(where)) + where + values


def _unpack(data: Bytes, spec: Spec, shares: list[tuple[int, int, int]], inner: Codec, peer: Peer) -> Tree:
    """Length of the positions, positions, values; so many in each of these stretches (start, size, number)."""
    length, start = read_varint(data)
    if length > len(data) - start:
        raise WireError(f"positions of {length} bytes announced, {len(data) - start} are left")
    k = sum(share[2] for share in shares)
    at = _indices.decode(memoryview(data)[start : start + length], spec.size, k)
    for first, size, wanted in shares:
        if np.searchsorted(at, first + size) - np.searchsorted(at, first) != wanted:
            raise WireError(f"expected {wanted} positions in a block of {size} numbers")
    if 4 * k <= spec.size:
        return _spread(at, inner.decode(data[start + length :], as_one_block(spec, k), peer)["values"], spec)
    # eight bytes a position would be twice the model: one byte for each number instead, before the values are made
    mask = torch.zeros(spec.size, dtype=torch.bool)
    mask.numpy()[at] = True
    del at
    values = inner.decode(data[start + length :], as_one_block(spec, k), peer)["values"]
    vector = torch.zeros(spec.size, dtype=values.dtype).masked_scatter_(mask, values)
    del values, mask
    return cut(vector, spec)


def _spread(at: np.ndarray, values: Tensor, spec: Spec) -> Tree:
    vector = torch.zeros(spec.size, dtype=values.dtype)
    vector[torch.from_numpy(at)] = values
    return cut(vector, spec)
