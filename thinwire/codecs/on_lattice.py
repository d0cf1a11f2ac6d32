"""Any codec with its values rounded to multiples of a power of two, so that messages add up exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Peer, Raw, check_fits, refuse_stateful
from thinwire.codecs.lattice import exponent_of, read_exponents
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.core.vectors import common_type
from thinwire.errors import ConfigError
from thinwire.wire.bits import Bytes


@register("codec", "on-lattice")
@dataclass(frozen=True)
class OnLattice(Codec):
    """Round the values that another codec decodes to multiples of a power of two; sums of such values are exact.

        x ~ s round(C(x) / s),    s = 2^round(log2(step * rms)) of each block, rms that of the non-zero values of C(x)

        bytes = one signed byte a block (the exponent of s), C(x)

    Args:
        inner: the codec C.
        step: the distance of levels as a multiple of the root mean square.

    >>> import torch
    >>> from thinwire.codecs import Quantize
    >>> from thinwire.core.key import Key
    >>> tree, peer = {"w": torch.linspace(-1, 1, 128)}, Peer(Key(0))
    >>> data, _ = OnLattice(Quantize(4), 0.5).encode(tree, {}, peer)
    >>> OnLattice(Quantize(4), 0.5).decode(data, Spec.of(tree), peer)["w"][:40:10].tolist()
    [-1.0, -0.75, -0.75, -0.5]

    As `down` with `merge_codec = "lattice-sum"`: a client that missed rounds is sent their sum. The message itself does
    not become shorter; `Lattice`, whose messages are, is the better choice where C only rounds.
    """

    inner: Codec = Raw()
    step: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise ConfigError(f"step must be above 0, a multiple of the root mean square, not {self.step}; write 0.5")
        refuse_stateful(self, self.inner)

    @property
    def unbiased(self) -> bool:
        """As the inner codec."""
        return self.inner.unbiased

    def check(self, spec: Spec) -> None:
        """Check the inner codec."""
        check_fits(self.inner, spec)

    def init(self, spec: Spec) -> Tree:
        """No state; raises a ConfigError for blocks that are not floating point."""
        common_type(spec)
        return {}

    def encode(self, tree: Tree, state: Tree, peer: Peer) -> tuple[Bytes, Tree]:
        """The exponents of the decoded values, then the payload of the inner codec."""
        payload, _ = self.inner.encode(tree, {}, peer)
        decoded = self.inner.decode(payload, Spec.of(tree), peer)
        exponents = [exponent_of(_non_zero(block), self.step) for block in decoded.values()]
        return np.array(exponents, np.int8).tobytes() + bytes(payload), state

    def decode(self, data: Bytes, spec: Spec, peer: Peer) -> Tree:
        """The values of the inner codec, rounded."""
        exponents = read_exponents(data, spec)
        decoded = self.inner.decode(memoryview(data)[len(spec.blocks) :], spec, peer)
        steps = zip(decoded.items(), exponents, strict=True)
        return {name: _rounded(block, math.ldexp(1.0, exponent)) for (name, block), exponent in steps}

    def size(self, spec: Spec) -> int | None:
        """One byte a block more than the inner codec."""
        size = self.inner.size(spec)
        return None if size is None else size + len(spec.blocks)


def _non_zero(block: Tensor) -> np.ndarray:
    x: np.ndarray = block[block != 0].double().numpy()
    return x


def _rounded(block: Tensor, step: float) -> Tensor:
    """Multiples of a power of two, within the range of the type; no zero is negative, since sums lose its sign."""
    limit = torch.finfo(block.dtype).max
    return (torch.round(block.double() / step) * step).clamp(-limit, limit).to(block.dtype) + 0.0
