"""Threshold sparsification: send the values whose magnitude reaches a threshold.

Paper: Strom, Interspeech 2015.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.codecs.positions import Segment, pack_sparse, unpack_sparse
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import as_one_block, common_type, gather, join
from thinwire.errors import ConfigError, WireError
from thinwire.wire.bits import Bytes, read_varint, varint


@register("codec", "threshold", paper="Strom, Interspeech 2015")
@dataclass(frozen=True)
class Threshold(Codec):
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
        if not 0 <= self.value < math.inf:
            raise ConfigError(f"value must be 0 or more, not {self.value}")
        refuse_stateful(self, self.inner)

    @property
    def keeps_zeros(self) -> bool:
        """Whether all values except zeros are sent, by an exact codec."""
        return self.value == 0 and self.inner.exact

    def check(self, spec: Spec) -> None:
        """Check the inner codec, which receives one block named `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}

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
