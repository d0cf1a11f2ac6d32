"""Stochastic rounding to two levels: one bit a value, or less where one level is rare.

Papers: Suresh et al., ICML 2017; with the levels 0 and 1 the masks of FedPM (Isik et al., ICLR 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from thinwire.codecs.base import FloatCodec, Peer
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, common_type, join
from thinwire.errors import ConfigError
from thinwire.wire import biased_bits
from thinwire.wire.bits import Bytes, read_varint, varint

CLASSES = 16  # of known values


@register_part("codec", "binary", paper="Suresh et al., ICML 2017; Isik et al., ICLR 2023")
class Binary(FloatCodec):
    """Round each value up or down to one of two levels, at random and without bias, and send the bits.

        x ~ high with probability (x - low) / (high - low), else low

    Args:
        levels: low and high, for example 0 and 1 for probabilities; values beyond them are sent as the nearer one.

    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.full((80_000,), 0.1)}, Peer(Key(0))
    >>> data, _ = Binary((0.0, 1.0)).encode(tree, {}, peer)
    >>> back = Binary((0.0, 1.0)).decode(data, Spec.of(tree), peer)["w"]
    >>> sorted(set(back.tolist())), round(float(back.mean()), 2), round(8 * len(data) / 80_000, 2)  # entropy: 0.47
    ([0.0, 1.0], 0.1, 0.47)

    Bits are coded by the share of high values (`wire/biased_bits.py`) of each group of values: n H(share) bits for n
    values, and some bytes. Groups are blocks, or, where both ends know values near the ones that are sent
    (`Peer.known`), 16 classes of those: bits that can be predicted take few bytes.

    The payload is the number of high values of each group that is not empty, and the bits of all groups.

    Not `Quantize(scheme="sign")`, which does not round at random.
    """

    unbiased = predicts = True
    levels: tuple[float, ...] = (0.0, 1.0)

    def __post_init__(self) -> None:
        given = self.levels
        if not (len(given) == 2 and all(map(math.isfinite, given)) and given[0] < given[1]):
            raise ConfigError(f"levels must be two finite values, the smaller one first, not {given}; write (0.0, 1.0)")

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Numbers of high values, bits."""
        x, (low, high), spec = join(tree).double().numpy(), self.levels, Spec.of(tree)
        up = peer.key.fold("binary").uniform(len(x)).double().numpy() * (high - low) < x - low
        groups = [up[at] for at in _groups(spec, self._classes(spec, peer))]
        counts = b"".join(varint(int(np.count_nonzero(bits))) for bits in groups)
        return counts + biased_bits.encode(groups), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The levels of the bits."""
        common_type(spec)
        position, classes, up, counts = 0, self._classes(spec, peer), np.zeros(spec.size, np.bool_), []
        for at in _groups(spec, classes):
            ones, position = read_varint(data, position)
            counts.append((len(up[at]), ones))
        groups = biased_bits.decode(memoryview(data)[position:], counts)
        for at, bits in zip(_groups(spec, classes), groups, strict=True):
            up[at] = bits
        out: Tree = {}
        masks = torch.split(torch.from_numpy(up), [block.numel for block in spec])
        for block, mask in zip(spec, masks, strict=True):
            limit = torch.finfo(block.dtype).max
            low, high = (max(-limit, min(limit, level)) for level in self.levels)
            out[block.name] = torch.full(block.shape, low, dtype=block.dtype).masked_fill_(mask.view(block.shape), high)
        return out

    def _classes(self, spec: Spec, peer: Peer) -> np.ndarray | None:
        """The class of each value, by the value that both ends know; None if they do not know all of them."""
        if not (spec.blocks and peer.known):
            return None
        low, high = self.levels
        out = []
        for block in spec:
            known = peer.known.get(block.name)
            if known is None or known.shape != block.shape:
                return None
            scaled = (known.double().numpy().reshape(-1) - low) * (CLASSES / (high - low))
            out.append(scaled.clip(0, CLASSES - 1).astype(np.uint8))
        return np.concatenate(out)


def _groups(spec: Spec, classes: np.ndarray | None) -> Iterator[slice | np.ndarray]:
    """The positions of the values of each group that is not empty; masks are made one at a time, to save memory."""
    if classes is not None:
        for one in np.unique(classes):
            yield classes == one
        return
    start = 0
    for block in spec:
        if block.numel:
            yield slice(start, start + block.numel)
        start += block.numel
