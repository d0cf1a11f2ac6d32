"""The contract of a codec, and the simplest one: `Raw`.

Sender and receiver know the `Spec` of the tree, so names and shapes are never sent, and a decoder knows the size of the
result before it reads the first byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Block, Spec, Tree, Vector, as_one_block, common_type
from thinwire.errors import ConfigError, WireError
from thinwire.wire.bits import Bytes


@dataclass(frozen=True)
class Peer:
    """What server and client both know of one client in one round; a codec may use it without sending it.

    The bandwidth of a client is not part of it: each tier of a `Budget` has its own codecs.

    Args:
        key: shared randomness of this client in this round.
        everyone: shared randomness of all clients in this round.
        mask: by block, which values this client may have changed; a block without a mask may have changed anywhere.
        known: by block, values near those that are sent, for a codec that `predicts`: where clients upload coordinates,
            those that they received; often empty.
    """

    key: Key
    everyone: Key = Key(0)
    mask: Tree = field(default_factory=dict, compare=False)
    known: Tree = field(default_factory=dict, compare=False)


class Codec(ABC):
    """Encodes a tree of tensors as bytes and decodes it again.

    A codec subclasses this contract and implements `encode` and `decode`. Everything else has a default, which declares
    a codec without state, without a fixed size and without special properties. `thinwire.testing.check_codec` checks
    the laws below.

    >>> from thinwire.core.key import Key
    >>> class Negated(Codec):
    ...     def encode(self, tree, state, peer):
    ...         return Raw().encode({name: -block for name, block in tree.items()}, {}, peer)[0], state
    ...     def decode(self, data, spec, peer):
    ...         return {name: -block for name, block in Raw().decode(data, spec, peer).items()}
    >>> tree, peer = {"w": torch.tensor([1.0, 2.0])}, Peer(Key(0))
    >>> Negated().decode(Negated().encode(tree, {}, peer)[0], Spec.of(tree), peer)["w"].tolist()
    [1.0, 2.0]
    """

    exact = False
    """Whether `decode(encode(x))` is x, bit for bit."""

    summable = False
    """Whether payloads can be summed element by element, as secure aggregation does.

    The payload must be float32 values, at the same positions for all clients of a round.
    """

    keeps_zeros = False
    """Whether zeros decode to zeros and all other values are decoded exactly, so that pruned weights stay zero."""

    encodes_sums = False
    """Whether sums of many messages are short in this codec: as `merge_codec`, it encodes what a client missed.

    Such a codec is exact.
    """

    predicts = False
    """Whether values are coded given `peer.known`, where it is not empty."""

    codes_signs = False
    """Whether a sign takes about a bit: magnitudes alone are so much shorter, and decode to the same magnitudes.

    `TopK` then sends signs apart, where they can be guessed.
    """

    unbiased = False
    """Whether decoded values are scaled up so that their expectation is x.

    The error of such a codec can be larger than x, so `ErrorFeedback` refuses it.
    """

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError, before training starts, if these blocks cannot be sent.

        For example because a selector matches none of them. Called through `check_fits`.
        """
        return

    def init(self, spec: Spec) -> Tree:
        """The initial state of the sender, kept between its messages (error feedback); empty by default."""
        return {}

    @abstractmethod
    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Encode a tree.

        Args:
            tree: the blocks to send; they may be fewer than those that `init` was given.
            state: the state of the sender.
            peer: shared randomness and mask of the client.

        Returns:
            The payload, which may be a view of the tree, and the next state of the sender.
        """

    @abstractmethod
    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """Decode a tree to the CPU. Bytes that `encode` cannot return raise a WireError.

        The payload may be a view of a message, and the tree a view of the payload.
        """

    def size(self, spec: Spec) -> int | None:
        """The number of bytes that `encode` returns, or None if it depends on the values."""
        return None


class FloatCodec(Codec):
    """A codec of floating-point blocks, without state."""

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}


class Wrapper(Codec):
    """A codec that passes blocks on to an inner one without state: its payload and size are those of the inner codec.

    `sent` says which blocks the inner codec gets, where they are not the given ones.
    """

    inner: Codec

    def __post_init__(self) -> None:
        if self.inner.init(Spec((Block("values", (1,)),))):
            name, within = type(self).__name__, type(self.inner).__name__
            raise ConfigError(
                f"{within} inside {name} would keep state for values whose positions change; "
                f"write it the other way round: {within}({name}(...))"
            )

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """As the inner codec."""
        return self.inner.summable

    def sent(self, spec: Spec) -> Spec:
        """The blocks that the inner codec gets."""
        return spec

    def check(self, spec: Spec) -> None:
        """Check the inner codec."""
        check_fits(self.inner, self.sent(spec))

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """As the inner codec."""
        return self.inner.decode(data, spec, peer)

    def size(self, spec: Spec) -> int | None:
        """As the inner codec."""
        return self.inner.size(self.sent(spec))


class SelectingCodec(Wrapper, FloatCodec):
    """A codec that selects some of the values and encodes these with an inner codec, as one block named `values`."""

    summable = False

    def sent(self, spec: Spec) -> Spec:
        """One block of as many values at most."""
        return as_one_block(spec, spec.size)

    def size(self, spec: Spec) -> int | None:
        """Not known: it depends on the values, or on the mask."""
        return None


def check_fits(codec: Codec, spec: Spec) -> None:
    """Raise a ConfigError, before training starts, if a codec cannot send these blocks.

    Codecs that contain others check those in turn.
    """
    codec.check(spec)
    codec.init(spec)


def cut_finite(x: np.ndarray, spec: Spec) -> Tree:
    """Split a vector, which is overwritten, into blocks; values are clamped to the range of the type of their block."""
    out: Tree = {}
    vector = torch.from_numpy(x)
    for block, piece in zip(spec, torch.split(vector, [block.numel for block in spec]), strict=True):
        limit = min(torch.finfo(block.dtype).max, torch.finfo(vector.dtype).max)
        out[block.name] = piece.clamp_(-limit, limit).to(block.dtype, copy=True).reshape(block.shape)
    return out


@register_part("codec", "raw")
class Raw(Codec):
    """Send all values unchanged: the blocks in order, little endian.

    >>> import torch
    >>> tree, peer = {"w": torch.tensor([1.0, -2.0])}, Peer(Key(0))
    >>> data, _ = Raw().encode(tree, {}, peer)
    >>> data.hex(), Raw().decode(data, Spec.of(tree), peer)["w"].tolist()
    ('0000803f000000c0', [1.0, -2.0])
    """

    exact = summable = keeps_zeros = True

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Join all blocks; a `Vector` is one vector already and is not copied."""
        if isinstance(tree, Vector):
            return _as_bytes(tree.data), state
        return b"".join([_as_bytes(block) for block in tree.values()]), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """Split the payload into blocks; the result is a view of it where alignment allows."""
        if len(data) != spec.nbytes:
            raise WireError(f"expected {spec.nbytes} bytes of raw values, got {len(data)}")
        array, dtype = np.frombuffer(data, np.uint8), spec.dtype
        whole = torch.from_numpy(array if array.flags.writeable else array.copy())  # as torch needs it, and
        if whole.data_ptr() % 8:  # aligned
            whole = whole.clone()
        if dtype not in (None, torch.bool) and data:  # the common case: one split
            return Vector(whole.view(dtype), spec)
        out: Tree = {}
        position = 0
        for block in spec.blocks:
            out[block.name] = _from_bytes(whole[position : position + block.nbytes], block)
            position += block.nbytes
        return out

    def size(self, spec: Spec) -> int:
        """The size of all values."""
        return spec.nbytes


def _as_bytes(tensor: Tensor) -> memoryview:
    raw = tensor.detach().cpu()
    if raw.dtype is torch.bfloat16:  # numpy has no such type
        raw = raw.view(torch.int16)
    array = raw.contiguous().numpy()
    return array.data.cast("B") if array.size else memoryview(b"")


def _from_bytes(raw: Tensor, block: Block) -> Tensor:
    if not len(raw):  # an empty array has no stride that torch could view as another type
        return torch.zeros(block.shape, dtype=block.dtype)
    if block.dtype is torch.bool and bool((raw > 1).any()):
        raise WireError(f"block {block.name!r} holds a byte that is neither true nor false")
    width = block.nbytes // block.numel
    if raw.storage_offset() % width:  # misaligned, after a block of a shorter type
        raw = raw.clone()
    return raw.view(block.dtype).view(block.shape)
