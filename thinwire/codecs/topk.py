"""Top-k sparsification: send the values of largest magnitude.

Paper: Aji and Heafield, EMNLP 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.codecs.positions import Segment, check_density, pack_sparse, unpack_sparse
from thinwire.core.registry import register, short_repr
from thinwire.core.selection import Rounding, kept, largest, largest_of
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import as_one_block, common_type, gather, join, parts
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes

By = Literal["tree", "block", "chunk"]


@register("codec", "topk", paper="Aji and Heafield, EMNLP 2017")
@dataclass(frozen=True)
class TopK(Codec):
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
    chunk: int = field(default=4096, metadata={"rare": True})
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.rounding not in get_args(Rounding):
            raise ConfigError(f"rounding must be one of {', '.join(get_args(Rounding))}, not {self.rounding!r}")
        if self.by not in get_args(By):
            raise ConfigError(f"by must be one of {', '.join(get_args(By))}, not {self.by!r}")
        if self.chunk < 1:
            raise ConfigError(f"chunk must be 1 or more values, not {self.chunk}; write for example 4096")
        refuse_stateful(self, self.inner)

    def check(self, spec: Spec) -> None:
        """Check the inner codec, which receives one block named `values`."""
        check_fits(self.inner, as_one_block(spec, spec.size))

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}

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
