"""Numbers to bytes and back: the contract of a codec, and the plainest one.

Both ends know the `Spec` of what travels, so names and shapes are never sent, and a decoder knows how much memory the
result may take before it looks at a single byte.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.rng import Key
from thinwire.core.spec import Block, Spec
from thinwire.core.tree import Tree
from thinwire.errors import WireError


@dataclass(frozen=True)
class Peer:
    """What both ends know of one client in one round, and a codec may use without sending it.

    Args:
        key: shared randomness of this client in this round.
    """

    key: Key


class Codec(Protocol):
    """Turns a tree into bytes and bytes into a tree."""

    def init(self, spec: Spec) -> Tree:
        """State that the sender keeps between messages (error feedback); often empty."""
        ...

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[bytes, Tree]:
        """Bytes, and the sender's next state."""
        ...

    def decode(self, data: bytes, spec: Spec, peer: Peer) -> Tree:
        """The tree, on the CPU. Anything but bytes that `encode` can make raises WireError."""
        ...

    def size(self, spec: Spec) -> int | None:
        """How many bytes `encode` makes, if it is always the same number."""
        ...


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

    def init(self, spec: Spec) -> Tree:
        """No state."""
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[bytes, Tree]:
        """All blocks, joined."""
        return b"".join(_to_bytes(block) for block in tree.values()), state

    def decode(self, data: bytes, spec: Spec, peer: Peer) -> Tree:
        """Cut the bytes at the sizes that the specification gives."""
        if len(data) != spec.nbytes:
            raise WireError(f"expected {spec.nbytes} bytes of raw numbers, got {len(data)}")
        out: Tree = {}
        position = 0
        for block in spec:
            out[block.name] = _from_bytes(data, position, block)
            position += block.nbytes
        return out

    def size(self, spec: Spec) -> int:
        """The size of the numbers."""
        return spec.nbytes


def _to_bytes(tensor: Tensor) -> bytes:
    raw = tensor.detach().reshape(-1).cpu().contiguous()
    if sys.byteorder == "big":  # pragma: no cover - the wire is little endian everywhere
        return raw.view(torch.uint8).view(-1, raw.element_size()).flip(1).numpy().tobytes()
    return raw.view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, position: int, block: Block) -> Tensor:
    if not block.nbytes:  # an empty array has no stride that torch could view as another type
        return torch.zeros(block.shape, dtype=block.dtype)
    raw = torch.from_numpy(np.frombuffer(data, np.uint8, block.nbytes, position).copy())
    if block.dtype is torch.bool and bool((raw > 1).any()):
        raise WireError(f"block {block.name!r} holds a byte that is neither true nor false")
    if sys.byteorder == "big":  # pragma: no cover
        raw = raw.view(-1, block.nbytes // max(1, block.numel)).flip(1).reshape(-1)
    return raw.view(block.dtype).view(block.shape)
