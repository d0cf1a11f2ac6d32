"""PowerSGD: send a low-rank approximation of each matrix.

Paper: Vogels et al., NeurIPS 2019. There Q is the one of the last step, and one multiplication is enough; here a client
that trained for a whole round can afford several, so no state is kept between rounds.

Send the leading ranks of low-rank factors, for clients with little bandwidth (HetLoRA).

Paper: HetLoRA (Cho et al., EMNLP 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, FloatCodec, Peer, Raw, Wrapper
from thinwire.core.key import Key
from thinwire.core.names import matches, select
from thinwire.core.registry import register_part
from thinwire.core.text import PositiveInt
from thinwire.core.tree import Block, Spec, Tree
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes

_LEFT, _RIGHT = "/power-p", "/power-q"


@register_part("codec", "power-sgd", paper="Vogels et al., NeurIPS 2019")
class PowerSGD(Wrapper, FloatCodec):
    """Send two thin factors of each matrix, found by power iteration; all other blocks are sent whole.

        Q random,  then `iterations` times:  P = orthogonal(M Q),  Q = M^T P;      M ~ P Q^T

    A block with more than two axes is a matrix of its first axis by all others, as in a convolution. Where the factors
    are not shorter than the matrix, it is sent whole, so that a high rank is exact.

    Args:
        rank: columns of P and Q.
        iterations: power iterations; 2 come close to the best approximation.
        inner: the codec of factors and other blocks.

    >>> from thinwire.codecs.base import Peer
    >>> m, peer = torch.outer(torch.arange(8.0), torch.ones(6)), Peer(Key(0))
    >>> data, _ = PowerSGD(1).encode({"w": m}, {}, peer)
    >>> back = PowerSGD(1).decode(data, Spec.of({"w": m}), peer)["w"]
    >>> len(data), bool(torch.allclose(back, m, atol=1e-5))         # 8 + 6 values of four bytes instead of 48
    (56, True)

    Biased: use it within error feedback. The product P Q^T is summed term by term, in the order of the ranks, so that
    it has the same bits on all platforms. Not `LowRank`, which trains factors.
    """

    summable = False
    rank: PositiveInt = 2
    iterations: PositiveInt = 2
    inner: Codec = Raw()

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The factors of matrices, and all other blocks."""
        sent: Tree = {}
        for number, block in enumerate(Spec.of(tree)):
            if self._is_factored(block):
                p, q = self._factors(tree[block.name], peer.key.fold("power-sgd", number))
                sent |= {block.name + _LEFT: p.to(block.dtype), block.name + _RIGHT: q.to(block.dtype)}
            else:
                sent[block.name] = tree[block.name]
        return self.inner.encode(sent, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The products of the factors, and all other blocks."""
        got = self.inner.decode(data, self.sent(spec), peer)
        out: Tree = {}
        for block in spec:
            if self._is_factored(block):
                product = _product(got[block.name + _LEFT], got[block.name + _RIGHT])
                limit = torch.finfo(block.dtype).max
                out[block.name] = product.nan_to_num(0.0).clamp(-limit, limit).to(block.dtype).reshape(block.shape)
            else:
                out[block.name] = got[block.name]
        return out

    def _factors(self, block: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """P and Q of a matrix."""
        m = block.detach().cpu().double().reshape(block.shape[0], -1)
        q = key.normal(m.shape[1], self.rank).double()
        p = q[:0]
        for _ in range(self.iterations):
            p = torch.linalg.qr(m @ q).Q
            q = m.t() @ p
        return p, q

    def _is_factored(self, block: Block) -> bool:
        """Whether the factors of a block are shorter than itself."""
        if len(block.shape) < 2 or not block.numel:
            return False
        rows, columns = block.shape[0], block.numel // block.shape[0]
        return self.rank * (rows + columns) < rows * columns

    def sent(self, spec: Spec) -> Spec:
        """The blocks of factors, and all other blocks."""
        blocks = []
        for block in spec:
            if self._is_factored(block):
                sides = {_LEFT: block.shape[0], _RIGHT: block.numel // block.shape[0]}
                blocks += [Block(block.name + at, (side, self.rank), block.dtype) for at, side in sides.items()]
            else:
                blocks.append(block)
        return Spec(tuple(blocks))


def _product(p: Tensor, q: Tensor) -> Tensor:
    """P Q^T, summed rank by rank, in float32 or more: a matrix product would depend on the platform."""
    exact = torch.promote_types(p.dtype, torch.float32)
    left, right = p.to(exact).numpy(), q.to(exact).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.multiply.outer(left[:, 0], right[:, 0])
        for rank in range(1, left.shape[1]):
            total += np.multiply.outer(left[:, rank], right[:, rank])
    return torch.from_numpy(total)


@register_part("codec", "rank-slice", paper="Cho et al., EMNLP 2024")
class RankSlice(Wrapper):
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

    rank: PositiveInt = 4
    rows: tuple[str, ...] = ("*/a",)
    columns: tuple[str, ...] = ("*/b",)
    inner: Codec = Raw()

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if a selector matches no block, or a block that is not a matrix."""
        for what, patterns in (("rows", self.rows), ("columns", self.columns)):
            for block in spec.restrict(select(spec.names, patterns, what=what)):
                if len(block.shape) != 2:
                    raise ConfigError(
                        f"{what} selects {block.name!r} of shape {list(block.shape)}; it must be a matrix"
                    )
        super().check(spec)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The leading ranks."""
        wanted = self.sent(Spec.of(tree))
        return self.inner.encode({b.name: tree[b.name][_corner(b.shape)] for b in wanted}, state, peer)

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The leading ranks, and zeros for all others."""
        decoded = self.inner.decode(data, self.sent(spec), peer)
        out = spec.zeros()
        for name, block in decoded.items():
            out[name][_corner(block.shape)] = block
        return out

    def sent(self, spec: Spec) -> Spec:
        """The sliced blocks."""
        blocks = []
        for block in spec:
            shape = block.shape
            if len(shape) == 2 and matches(block.name, self.rows):
                shape = (min(self.rank, shape[0]), shape[1])
            elif len(shape) == 2 and matches(block.name, self.columns):
                shape = (shape[0], min(self.rank, shape[1]))
            blocks.append(Block(block.name, shape, block.dtype))
        return Spec(tuple(blocks))


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)
