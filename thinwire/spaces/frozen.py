"""Weights that are not trained: the rest of a model of which only some blocks are trained."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.key import Device, Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.spaces.base import Space


@register("space", "frozen")
@dataclass(frozen=True)
class Frozen(Space):
    """Train and send nothing: the weights stay those of the base.

        weights = base

    Only useful inside a `Route`, for the blocks that are not trained.

    >>> import torch
    >>> space, base = Frozen(), {"w": torch.ones(2)}
    >>> space.init(base, {}, Key(0)), space.expand(base, {}, {})["w"].tolist()
    ({}, [1.0, 1.0])

    Not `AllBlocks(private=...)`, which trains a block without sending it.
    """

    @property
    def unaffected_by_merging(self) -> bool:
        """True: there are no coordinates."""
        return True

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Return an empty basis."""
        return {}

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return no coordinates."""
        return {}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base."""
        return base
