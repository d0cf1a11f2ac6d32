"""Random sparsification: send values at positions that server and client draw from a shared key.

Paper: Konecny et al., 2016 (random mask).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer, Raw, SelectingCodec, refuse_stateful
from thinwire.codecs.topk import scatter
from thinwire.core.registry import register
from thinwire.core.selection import kept, random_subset
from thinwire.core.spec import Spec
from thinwire.core.text import check_settings
from thinwire.core.tree import Tree, as_one_block, gather, parts
from thinwire.wire.bits import Bytes


@register("codec", "randomk", paper="Konecny et al., 2016")
@dataclass(frozen=True)
class RandomK(SelectingCodec):
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

    density: float = 0.1
    inner: Codec = Raw()
    unbiased: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        check_settings(self, density="(0, 1]")
        refuse_stateful(self, self.inner)

    @property
    def summable(self) -> bool:  # type: ignore[override]
        """Whether all clients send the same positions, by a summable codec."""
        return self.shared and self.inner.summable

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The values at the drawn positions."""
        values = gather(parts(tree), self._drawn(Spec.of(tree).size, peer))
        return self.inner.encode({"values": values}, {}, peer)[0], state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values at the drawn positions, zeros at all others."""
        at = self._drawn(spec.size, peer)
        values = self.inner.decode(data, as_one_block(spec, len(at)), peer)["values"]
        if self.unbiased and len(at):
            limit = torch.finfo(values.dtype).max
            values = values.double().mul_(spec.size / len(at)).clamp_(-limit, limit).to(values.dtype)
        return scatter(at, values, spec)

    def size(self, spec: Spec) -> int | None:
        """The size of the selected values."""
        return self.inner.size(as_one_block(spec, kept(self.density, spec.size)))

    def _drawn(self, n: int, peer: Peer) -> np.ndarray:
        """The positions, drawn from the client's key or from that of all clients."""
        key = peer.everyone if self.shared else peer.key
        return random_subset(key.fold("randomk"), n, kept(self.density, n))
