"""The whole model, trained as it is."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree


@register("space", "full", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class Full:
    """Train every weight of the model: the coordinates are the weights.

        weights = coords

    >>> import torch
    >>> space, base = Full(), {"w": torch.ones(2)}
    >>> space.expand(base, {}, space.init(base, {}, Key(0)))["w"].tolist()
    [1.0, 1.0]
    """

    @property
    def redraw_every(self) -> int:
        """Never: the coordinates live as long as the run."""
        return 0

    def check(self, spec: Spec) -> None:
        """Every model fits."""

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """The weights of the base."""
        return dict(base)

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Coordinates that make these weights."""
        return dict(weights)

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The coordinates themselves."""
        return coords
