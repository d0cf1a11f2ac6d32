"""Stochastic rounding to two levels: one bit a value, or less where one level is rare.

Papers: Suresh et al., ICML 2017 (levels of each vector); with the levels 0 and 1 the masks of FedPM (Isik et al., ICLR
2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from thinwire.codecs.base import Codec, Peer
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import common_type
from thinwire.errors import ConfigError, WireError
from thinwire.wire import biased_bits
from thinwire.wire.bits import Bytes, read_varint, varint

_LARGEST = float(np.finfo(np.float32).max)


@register("codec", "binary", paper="Suresh et al., ICML 2017; Isik et al., ICLR 2023")
@dataclass(frozen=True)
class Binary(Codec):
    """Round each value up or down to one of two levels, at random and without bias, and send the bits.

        x ~ high with probability (x - low) / (high - low), else low

    Args:
        levels: low and high, for example 0 and 1 for probabilities; values beyond them are sent as the nearer one.
            Without levels, those of each block are its smallest and its largest value, which are sent.

    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.full((8000,), 0.1)}, Peer(Key(0))
    >>> data, _ = Binary((0.0, 1.0)).encode(tree, {}, peer)
    >>> back = Binary((0.0, 1.0)).decode(data, Spec.of(tree), peer)["w"]
    >>> sorted(set(back.tolist())), round(float(back.mean()), 2), round(8 * len(data) / 8000, 2)  # entropy: 0.47 bits
    ([0.0, 1.0], 0.1, 0.48)

    The payload is, for each block, its levels (if they are its own), the number of its high values and the bits, coded
    by that number (`wire/biased_bits.py`): n H(share of high values) bits for n values, and some bytes.

    Not `Quantize(scheme="sign")`, which does not round at random.
    """

    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        given = self.levels
        if given and not (len(given) == 2 and all(map(math.isfinite, given)) and given[0] < given[1]):
            raise ConfigError(f"levels must be two finite values, the smaller one first, not {given}; write (0.0, 1.0)")

    @property
    def unbiased(self) -> bool:
        """True: a value is rounded up with the probability that makes its expectation the value."""
        return True

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The blocks, one after another."""
        out, position = [], 0
        for block in tree.values():
            x = block.detach().cpu().double().numpy().reshape(-1)
            ends = np.array(self.levels) if self.levels else _ends(x)
            draw = peer.key.fold("binary").uniform(len(x), start=position).double().numpy()
            up = draw * (ends[1] - ends[0]) < x - ends[0]
            position += len(x)
            out += [b"" if self.levels else ends.astype("<f4").tobytes(), _pack(up)]
        return b"".join(out), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The levels of the bits."""
        common_type(spec)
        out, position = dict[str, torch.Tensor](), 0
        for block in spec:
            low, high = self.levels or _read_ends(data, position)
            up, position = _unpack(data, position if self.levels else position + 8, block.numel)
            limit = torch.finfo(block.dtype).max
            low, high = (max(-limit, min(limit, level)) for level in (low, high))
            values = torch.full((block.numel,), low, dtype=block.dtype).masked_fill_(torch.from_numpy(up), high)
            out[block.name] = values.reshape(block.shape)
        if position != len(data):
            raise WireError(f"{len(data) - position} bytes follow the last block")
        return out


def _ends(x: np.ndarray) -> np.ndarray:
    """The smallest and the largest value, as float32; a value that rounding leaves outside gets the nearer level."""
    ends: np.ndarray = np.array([x.min(), x.max()]) if len(x) else np.zeros(2)
    return ends.clip(-_LARGEST, _LARGEST).astype(np.float32).astype(np.float64)


def _read_ends(data: Bytes, position: int) -> tuple[float, float]:
    if len(data) < position + 8:
        raise WireError("the bytes end inside the levels of a block")
    low, high = np.frombuffer(data[position : position + 8], "<f4").tolist()
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise WireError(f"levels of {low} and {high} are not possible")
    return low, high


def _pack(up: np.ndarray) -> bytes:
    """The number of ones, the length of their code, and the code."""
    code = biased_bits.encode(up)
    return varint(int(np.count_nonzero(up))) + varint(len(code)) + code


def _unpack(data: Bytes, position: int, n: int) -> tuple[np.ndarray, int]:
    """The bits of a block of n values, and the position after them."""
    ones, position = read_varint(data, position)
    length, position = read_varint(data, position)
    if ones > n:
        raise WireError(f"{ones} high values announced, the block has {n} values")
    if length > len(data) - position:
        raise WireError(f"bits of {length} bytes announced, {len(data) - position} are left")
    return biased_bits.decode(memoryview(data)[position : position + length], n, ones), position + length
