"""Send the leading ranks of low-rank factors, for clients with little bandwidth (HetLoRA).

Paper: HetLoRA (Cho et al., EMNLP 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.core.registry import register
from thinwire.core.spec import Block, Spec, matches, select
from thinwire.core.tree import Tree
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes


@register("codec", "rank-slice", paper="Cho et al., EMNLP 2024")
@dataclass(frozen=True)
class RankSlice(Codec):
    """Send the leading ranks of each pair of factors, and all other blocks whole; the other ranks decode to zero.

        A[:rank], B[:, :rank]

    Args:
        rank: the number of ranks that is sent; factors of a lower rank are sent whole.
        rows: selectors of the factors A, whose rows are ranks.
        columns: selectors of the factors B, whose columns are ranks.
        inner: the codec of the sliced blocks.

    >>> import torch
    >>> from thinwire.core.key import Key
    >>> tree = {"fc/a": torch.ones(2, 3), "fc/b": torch.ones(3, 2), "bias": torch.ones(1)}
    >>> codec, peer = RankSlice(1), Peer(Key(0))
    >>> back = codec.decode(codec.encode(tree, {}, peer)[0], Spec.of(tree), peer)
    >>> back["fc/a"].sum(1).tolist(), back["fc/b"].sum(0).tolist(), back["bias"].tolist()
    ([3.0, 0.0], [3.0, 0.0], [1.0])

    Used for upload and `full` download, a client trains the ranks that it received and no others: a rank of which both
    factors are zero has no gradient. Not `TopK`, which selects single values.
    """

    rank: int = 4
    rows: tuple[str, ...] = ("*/a",)
    columns: tuple[str, ...] = ("*/b",)
    inner: Codec = Raw()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank must be 1 or more, not {self.rank}")
        refuse_stateful(self, self.inner)

    @property
    def summable(self) -> bool:
        """As the inner codec: all clients send the same ranks."""
        return self.inner.summable

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a selector matches no block, or a block that is not a matrix."""
        for what, patterns in (("rows", self.rows), ("columns", self.columns)):
            for name in select(spec.names, patterns, what=what):
                shape = next(block.shape for block in spec if block.name == name)
                if len(shape) != 2:
                    raise ConfigError(f"{what} selects {name!r} of shape {list(shape)}; it must be a matrix")
        check_fits(self.inner, self._sliced(spec))

    def init(self, spec: Spec) -> Tree:
        """No state: the inner codec has none."""
        return self.inner.init(self._sliced(spec))

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The leading ranks."""
        wanted = self._sliced(Spec.of(tree))
        return self.inner.encode({b.name: tree[b.name][_corner(b)] for b in wanted}, state, peer)

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The leading ranks, and zeros for all others."""
        decoded = self.inner.decode(data, self._sliced(spec), peer)
        out = spec.zeros()
        for name, block in decoded.items():
            out[name][tuple(slice(0, n) for n in block.shape)] = block
        return out

    def size(self, spec: Spec) -> int | None:
        """The size of the sliced blocks."""
        return self.inner.size(self._sliced(spec))

    def _sliced(self, spec: Spec) -> Spec:
        """The spec of the sliced blocks."""
        blocks = []
        for block in spec:
            shape = block.shape
            if len(shape) == 2 and matches(block.name, self.rows):
                shape = (min(self.rank, shape[0]), shape[1])
            elif len(shape) == 2 and matches(block.name, self.columns):
                shape = (shape[0], min(self.rank, shape[1]))
            blocks.append(Block(block.name, shape, block.dtype))
        return Spec(tuple(blocks))


def _corner(block: Block) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in block.shape)
