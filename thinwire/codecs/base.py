"""Numbers to bytes and back: the contract of a codec, and the plainest one.

Both ends know the `Spec` of what travels, so names and shapes are never sent, and a decoder knows how much memory the
result may take before it looks at a single byte.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import FlatTree, Tree, cut
from thinwire.errors import WireError
from thinwire.wire.bits import Bytes


@dataclass(frozen=True)
class Peer:
    """What both ends know of one client in one round, and a codec may use without sending it.

    What a client can afford is known, too, but no codec asks: each tier of a `Budget` has codecs of its own.

    Args:
        key: shared randomness of this client in this round.
        everyone: shared randomness of all clients in this round.
        mask: by block, which numbers this client may have changed; a block without one may have changed everywhere.
    """

    key: Key
    everyone: Key = Key(0)
    mask: Tree = field(default_factory=dict, compare=False)


class Codec(Protocol):
    """Turns a tree into bytes and bytes into a tree.

    A codec that can tell before the first message that it does not suit some blocks, because a selector matches none
    of them for example, has a method `check(spec)`, too, which raises a ConfigError: see `check_fits`. A codec whose
    bytes are plain numbers at the same places for all clients of a round has `adds = True`: such messages can be added
    up as they are.
    """

    def init(self, spec: Spec) -> Tree:
        """State that the sender keeps between messages (error feedback); often empty."""
        ...

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Bytes, or a view of them if they are there already, and the sender's next state."""
        ...

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The tree, on the CPU. Anything but bytes that `encode` can make raises WireError.

        The bytes may be a view of a message, and the tree a view of the bytes.
        """
        ...

    def size(self, spec: Spec) -> int | None:
        """How many bytes `encode` makes, if it is always the same number."""
        ...


def check_fits(codec: Codec, spec: Spec) -> None:
    """Raise a ConfigError, before anything is trained, if a codec cannot send these blocks.

    Codecs with others inside them ask those in turn.
    """
    check = getattr(codec, "check", None)
    if check is not None:
        check(spec)
    codec.init(spec)


@register("codec", "raw")
@dataclass(frozen=True)
class Raw:
    """Send every number as it is: the blocks one after another, little endian.

    >>> import torch
    >>> tree, peer = {"w": torch.tensor([1.0, -2.0])}, Peer(Key(0))
    >>> data, _ = Raw().encode(tree, {}, peer)
    >>> data.hex(), Raw().decode(data, Spec.of(tree), peer)["w"].tolist()
    ('0000803f000000c0', [1.0, -2.0])
    """

    @property
    def adds(self) -> bool:
        """Yes."""
        return True

    def init(self, spec: Spec) -> Tree:
        """No state."""
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """All blocks, joined; where they are already, as they lie."""
        if isinstance(tree, FlatTree):
            return _as_bytes(tree.vector), state
        return b"".join([_as_bytes(block) for block in tree.values()]), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """FlatTree the bytes at the sizes that the specification gives."""
        if len(data) != spec.nbytes:
            raise WireError(f"expected {spec.nbytes} bytes of raw numbers, got {len(data)}")
        there = np.frombuffer(data, np.uint8)
        # bytes that nobody may write to, or that lie at odd places, cannot be numbers of torch
        place, fixed = there.__array_interface__["data"]
        whole = torch.from_numpy(there.copy() if fixed or place % 8 else there)
        kind = spec.dtype
        if kind not in (None, torch.bool) and data and sys.byteorder == "little":  # the common case: cut once
            return cut(whole.view(kind), spec.names, spec.like)
        out: Tree = {}
        position = 0
        for block in spec:
            out[block.name] = _from_bytes(whole[position : position + block.nbytes], block)
            position += block.nbytes
        return out

    def size(self, spec: Spec) -> int:
        """The size of the numbers."""
        return spec.nbytes

    def shares(self, spec: Spec) -> dict[str, int]:
        """Where `encode` cuts: the bytes of each block. Codecs that mix blocks have no such method."""
        return {block.name: block.nbytes for block in spec}


def _as_bytes(tensor: Tensor) -> memoryview:
    raw = tensor.detach().cpu()
    if raw.dtype is torch.bfloat16:  # numpy has no such type
        raw = raw.view(torch.int16)
    array = np.ascontiguousarray(raw.numpy())
    if sys.byteorder == "big":  # pragma: no cover - the wire is little endian everywhere
        array = array.byteswap()
    return array.reshape(-1).view(np.uint8).data


def _from_bytes(raw: Tensor, block: Block) -> Tensor:
    if not len(raw):  # an empty array has no stride that torch could view as another type
        return torch.zeros(block.shape, dtype=block.dtype)
    if block.dtype is torch.bool and bool((raw > 1).any()):
        raise WireError(f"block {block.name!r} holds a byte that is neither true nor false")
    width = block.nbytes // max(1, block.numel)
    if sys.byteorder == "big":  # pragma: no cover
        raw = raw.view(-1, width).flip(1).reshape(-1)
    if raw.storage_offset() % width:  # behind a block of a shorter type
        raw = raw.clone()
    return raw.view(block.dtype).view(block.shape)
