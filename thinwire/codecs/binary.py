"""Stochastic rounding to two levels: one bit a value, or less where one level is rare.

Papers: Suresh et al., ICML 2017 (levels of each vector); with the levels 0 and 1 the masks of FedPM (Isik et al., ICLR
2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from thinwire.codecs.base import FloatCodec, Peer
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, common_type
from thinwire.errors import ConfigError, WireError
from thinwire.wire import biased_bits
from thinwire.wire.bits import Bytes, read_varint, varint

CLASSES = 16  # of known values
_LARGEST = float(np.finfo(np.float32).max)


@register_part("codec", "binary", paper="Suresh et al., ICML 2017; Isik et al., ICLR 2023")
class Binary(FloatCodec):
    """Round each value up or down to one of two levels, at random and without bias, and send the bits.

        x ~ high with probability (x - low) / (high - low), else low

    Args:
        levels: low and high, for example 0 and 1 for probabilities; values beyond them are sent as the nearer one.
            Without levels, those of each block are its smallest and its largest value, which are sent.

    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.full((80_000,), 0.1)}, Peer(Key(0))
    >>> data, _ = Binary((0.0, 1.0)).encode(tree, {}, peer)
    >>> back = Binary((0.0, 1.0)).decode(data, Spec.of(tree), peer)["w"]
    >>> sorted(set(back.tolist())), round(float(back.mean()), 2), round(8 * len(data) / 80_000, 2)  # entropy: 0.47
    ([0.0, 1.0], 0.1, 0.47)

    Bits are coded by the share of high values (`wire/biased_bits.py`) of each group of values: n H(share) bits for n
    values, and some bytes. Groups are blocks, or, where both ends know values near the ones that are sent
    (`Peer.known`), 16 classes of those: bits that can be predicted take few bytes.

    The payload is the levels of each block, if they are its own, the number of high values of each group that is not
    empty, and the bits of all groups.

    Not `Quantize(scheme="sign")`, which does not round at random.
    """

    unbiased = True
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given = self.levels
        if given and not (len(given) == 2 and all(map(math.isfinite, given)) and given[0] < given[1]):
            raise ConfigError(f"levels must be two finite values, the smaller one first, not {given}; write (0.0, 1.0)")

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        """Whether the levels are known, so that classes of known values are those of probabilities."""
        return bool(self.levels)

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """Levels, numbers of high values, bits."""
        vectors = [block.detach().cpu().double().numpy().reshape(-1) for block in tree.values()]
        levels = [self.levels or _ends(x) for x in vectors]
        n = sum(map(len, vectors))
        draw, position, up = peer.key.fold("binary").uniform(n).double().numpy(), 0, np.zeros(n, np.bool_)
        for x, (low, high) in zip(vectors, levels, strict=True):
            end = position + len(x)
            up[position:end] = draw[position:end] * (high - low) < x - low
            position = end
        spec = Spec.of(tree)
        groups = [up[at] for at in _groups(spec, self._classes(spec, peer))]
        ends = b"" if self.levels else np.array(levels, "<f4").tobytes()
        counts = b"".join(varint(int(np.count_nonzero(bits))) for bits in groups)
        return ends + counts + biased_bits.encode(groups), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The levels of the bits."""
        common_type(spec)
        position = 0 if self.levels else 8 * len(spec.blocks)
        levels = [self.levels] * len(spec.blocks) if self.levels else _read_ends(data, len(spec.blocks))
        classes, up, counts = self._classes(spec, peer), np.zeros(spec.size, np.bool_), []
        for at in _groups(spec, classes):
            ones, position = read_varint(data, position)
            counts.append((len(up[at]), ones))
        groups = biased_bits.decode(memoryview(data)[position:], counts)
        for at, bits in zip(_groups(spec, classes), groups, strict=True):
            up[at] = bits
        out: Tree = {}
        masks = torch.split(torch.from_numpy(up), [block.numel for block in spec])
        for block, mask, (low, high) in zip(spec, masks, levels, strict=True):
            limit = torch.finfo(block.dtype).max
            low, high = (max(-limit, min(limit, level)) for level in (low, high))
            out[block.name] = torch.full(block.shape, low, dtype=block.dtype).masked_fill_(mask.view(block.shape), high)
        return out

    def _classes(self, spec: Spec, peer: Peer) -> np.ndarray | None:
        """The class of each value, by the value that both ends know; None if they do not know all of them."""
        if not (self.levels and spec.blocks and peer.known):
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


def _ends(x: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest value, as float32; a value that rounding leaves outside gets the nearer level."""
    if not len(x):
        return 0.0, 0.0
    low, high = np.array([x.min(), x.max()]).clip(-_LARGEST, _LARGEST).astype(np.float32).tolist()
    return low, high


def _read_ends(data: Bytes, blocks: int) -> list[tuple[float, float]]:
    if len(data) < 8 * blocks:
        raise WireError(f"expected two levels for each of {blocks} blocks, got {len(data)} bytes")
    ends = np.frombuffer(data[: 8 * blocks], "<f4").reshape(-1, 2)
    if not (np.isfinite(ends).all() and (ends[:, 0] <= ends[:, 1]).all()):
        raise WireError("the levels of a block are not finite, or not in ascending order")
    return [(low, high) for low, high in ends.tolist()]
