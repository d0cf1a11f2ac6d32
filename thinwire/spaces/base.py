"""Where a client trains: the contract of a space.

A space turns a few trainable numbers, the *coordinates*, into the weights of the model:

    weights = expand(base, basis, coords)

`base` is the model that everybody knows, `basis` is everything drawn from the shared seed (never sent, never trained).
Merging is not a method: it is `base <- expand(base, basis, coords)` for every space, and `advance` does it.
"""

from __future__ import annotations

from typing import Protocol

from thinwire.core.key import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree


class Space(Protocol):
    """Trainable coordinates and the pure function that turns them into weights."""

    @property
    def redraw_every(self) -> int:
        """Rounds after which the coordinates are merged into the base and a new basis is drawn; 0 means never."""
        ...

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError when this space cannot hold a model with these weights."""
        ...

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Everything drawn from the seed; often empty. Drawn outside `expand`, which runs inside vmap."""
        ...

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """The first coordinates. Their names begin with the names of the weights that they make."""
        ...

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """All trainable weights of the model; pure and differentiable in `coords`."""
        ...


def in_use(space: Space, base: Tree, basis: Tree, coords: Tree) -> Tree:
    """The weights with which a trained model is tested and used.

    For nearly all spaces these are the weights that were trained. A space that leaves something out of them afterwards
    has a method `trim(base, basis, coords)` that gives the weights without it; training never calls it.
    """
    trim = getattr(space, "trim", None)
    weights: Tree = space.expand(base, basis, coords) if trim is None else trim(base, basis, coords)
    return weights
