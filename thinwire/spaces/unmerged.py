"""Corrections beside the weights instead of in them, for training: no client needs a corrected matrix of its own.

    expand:   W = W0 + B A, then x W^T            one W for each client that is trained at the same time
    beside:   x W0^T + (x A^T) B^T                one W0 for all of them; only A and B are each client's own

A tree of weights may hold corrections under the names of the matrices that they belong to: whoever computes with such a
tree applies them (`tasks.correct`). Only training sees such trees; merging and testing build W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.spaces.base import Space

A, B = "/a", "/b"
TURNED_A, TURNED_B = "/a.T", "/b.T"  # of a matrix that is stored as inputs x outputs


@dataclass(frozen=True)
class Unmerged:
    """A space that hands its corrections on beside the weights; in all else the space that it is made of.

    >>> import torch
    >>> from thinwire.spaces import LoRA
    >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    >>> space = Unmerged(LoRA(rank=1))
    >>> list(space.expand(base, {}, space.init(base, {}, Key(0))))
    ['fc.weight', 'fc.bias', 'fc.weight/a', 'fc.weight/b']
    """

    inner: Any

    @property
    def redraw_every(self) -> int:
        """As the inner space."""
        return int(self.inner.redraw_every)

    def check(self, spec: Spec) -> None:
        """As the inner space."""
        self.inner.check(spec)

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """As the inner space."""
        basis: Tree = self.inner.basis(spec, key, device)
        return basis

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """As the inner space."""
        coords: Tree = self.inner.init(base, basis, key)
        return coords

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The weights, and the corrections beside them."""
        weights: Tree = self.inner.patches(base, basis, coords)
        return weights


def unmerged(space: Space) -> Space:
    """The space to train in: one that keeps corrections beside the weights, where the given one can."""
    return Unmerged(space) if hasattr(space, "patches") else space


def split(weights: Tree) -> tuple[Tree, dict[str, tuple[Tensor, Tensor, bool]]]:
    """The weights alone, and by name the corrections: A, B, and whether the matrix is stored as inputs x outputs."""
    found, taken = {}, set()
    for turned, (a, b) in ((False, (A, B)), (True, (TURNED_A, TURNED_B))):
        for key, block in weights.items():
            if key.endswith(b) and (name := key.removesuffix(b)) in weights and name + a in weights:
                found[name] = (weights[name + a], block, turned)
                taken |= {name + a, key}
    return ({name: block for name, block in weights.items() if name not in taken}, found) if found else (weights, found)
