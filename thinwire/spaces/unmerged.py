"""Adapters kept apart from the weights, for training: no client needs a full matrix for itself.

    merged:     W = W0 + B A, then x W^T          one W for each client of a cohort that trains in parallel
    unmerged:   x W0^T + (x A^T) B^T              one W0 for all clients; only A and B differ between clients

A tree of weights may hold adapters under the name of their matrix: `fc.weight/a` and `fc.weight/b`. The model applies
them in its forward pass. Only training uses such trees; merging and testing compute W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire.core.key import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.spaces.base import Space

A, B = "/a", "/b"
M, GAIN = "/m", "/g"  # of DoRA: the change of an output's length, and the factor of the output that follows
TRANSPOSED_A, TRANSPOSED_B = "/a.T", "/b.T"  # of a matrix that is stored as inputs x outputs


class HasAdapters(Space, Protocol):
    """A space that can keep adapters apart from the weights."""

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by the adapters."""
        ...


@dataclass(frozen=True)
class Unmerged(Space):
    """Train a space with its adapters apart from the weights; only `expand` differs from the inner space.

    >>> import torch
    >>> from thinwire.spaces import LoRA
    >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    >>> space = Unmerged(LoRA(rank=1))
    >>> list(space.expand(base, {}, space.init(base, {}, Key(0))))
    ['fc.weight', 'fc.bias', 'fc.weight/a', 'fc.weight/b']
    """

    inner: HasAdapters

    @property
    def redraw_every(self) -> int:  # type: ignore[override]
        """That of the inner space."""
        return self.inner.redraw_every

    def check(self, spec: Spec) -> None:
        """Check the inner space."""
        self.inner.check(spec)

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return the basis of the inner space."""
        return self.inner.basis(spec, key, device)

    def basis_from(self, base: Tree, key: Key, device: Device) -> Tree:
        """Return the basis of the inner space."""
        return self.inner.basis_from(base, key, device)

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial coordinates of the inner space."""
        return self.inner.init(base, basis, key)

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by the adapters."""
        return self.inner.expand_unmerged(base, basis, coords)

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the merged weights of the inner space."""
        return self.inner.evaluation_weights(base, basis, coords)


def unmerged(space: Space) -> Space:
    """Return `space.unmerged()`."""
    return space.unmerged()


def split(weights: Tree) -> tuple[Tree, dict[str, tuple[Tensor, Tensor, bool, Tensor | None]]]:
    """Separate weights from adapters.

    Returns:
        The weights alone, and by name of a weight its adapter: A, B, whether the matrix is stored transposed
        (inputs x outputs), and the factor of each output, or None.
    """
    adapters, taken = {}, set()
    for transposed, (a, b) in ((False, (A, B)), (True, (TRANSPOSED_A, TRANSPOSED_B))):
        for key, block in weights.items():
            if key.endswith(b) and (name := key.removesuffix(b)) in weights and name + a in weights:
                adapters[name] = (weights[name + a], block, transposed, weights.get(name + GAIN))
                taken |= {name + a, key, name + GAIN}
    if not adapters:
        return weights, adapters
    return {name: block for name, block in weights.items() if name not in taken}, adapters
