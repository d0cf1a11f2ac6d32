"""Weights that nobody trains: the rest of a model in which only some blocks learn."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree


@register("space", "frozen")
@dataclass(frozen=True)
class Frozen:
    """Train nothing and send nothing: the weights stay as everybody knows them.

        weights = base

    Only of use inside a `Route`, for the blocks that are not to be trained.

    >>> import torch
    >>> space, base = Frozen(), {"w": torch.ones(2)}
    >>> space.init(base, {}, Key(0)), space.expand(base, {}, {})["w"].tolist()
    ({}, [1.0, 1.0])

    Not `Every(private=...)`, which trains a block and keeps it at home.
    """

    @property
    def redraw_every(self) -> int:
        """Never: there is nothing to merge."""
        return 0

    def check(self, spec: Spec) -> None:
        """Every model fits."""

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Nothing is drawn."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Nothing is trained."""
        return {}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """The base itself."""
        return base
