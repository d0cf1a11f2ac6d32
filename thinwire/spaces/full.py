"""The full model: every weight is trained."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.spaces.base import Space


@register("space", "full", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class Full(Space):
    """Train every weight of the model: the coordinates are the weights.

        weights = coords

    >>> import torch
    >>> space, base = Full(), {"w": torch.ones(2)}
    >>> space.expand(base, {}, space.init(base, {}, Key(0)))["w"].tolist()
    [1.0, 1.0]
    """

    @property
    def unaffected_by_merging(self) -> bool:
        """True: after a merge the base is the coordinates."""
        return True

    @property
    def starts_from_weights(self) -> bool:
        """True: any weights are coordinates."""
        return True

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the weights of the base."""
        return dict(base)

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Return the weights."""
        return dict(weights)

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the coordinates."""
        return coords
