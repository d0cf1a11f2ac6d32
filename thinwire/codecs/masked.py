"""Send the values under the mask of the round, without their positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.codecs.positions import scatter
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import as_one_block, common_type, join
from thinwire.wire.bits import Bytes


@register("codec", "masked")
@dataclass(frozen=True)
class Masked(Codec):
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

    def __post_init__(self) -> None:
        refuse_stateful(self, self.inner)

    def check(self, spec: Spec) -> None:
        """Check the inner codec, which receives one block named `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The values under the mask."""
        values = join(tree)[torch.from_numpy(_positions(Spec.of(tree), peer))]
        return self.inner.encode({"values": values}, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values under the mask, zeros at all other positions."""
        at = _positions(spec, peer)
        return scatter(at, self.inner.decode(data, as_one_block(spec, len(at)), peer)["values"], spec)


def _positions(spec: Spec, peer: Peer) -> np.ndarray:
    """Positions under the mask in the joined vector of all blocks."""
    parts = []
    for block in spec:
        mask = peer.mask.get(block.name)
        if mask is None or mask.shape != block.shape:  # inside `RankSlice`, blocks are slices
            mask = torch.ones(block.numel, dtype=torch.bool)
        parts.append(mask.reshape(-1).numpy())
    return np.flatnonzero(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
