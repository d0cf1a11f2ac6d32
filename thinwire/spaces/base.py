"""Contract of a space: trainable coordinates and the function that turns them into weights.

    weights = expand(base, basis, coords)

`base` holds the weights that server and clients share, `basis` the random matrices drawn from the shared seed (never
sent, never trained), and `coords` the trainable parameters. Merging is not a method: for every space it is
`base <- expand(base, basis, coords)`, done by `advance`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from thinwire.core.key import Device, Key
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree
from thinwire.errors import IncompatibleParts


class Space(Protocol):
    """Where a client trains: coordinates, and a pure function from coordinates to weights.

    A space is a frozen dataclass that subclasses this contract and implements `basis`, `init` and `expand`. The other
    methods have a default. Fields of the dataclass need a default value too: `redraw_every: int = 1`.
    """

    redraw_every: int = 0
    """Rounds after which the coordinates are merged into the base and a new basis is drawn; 0 means never."""

    @property
    def unaffected_by_merging(self) -> bool:
        """Whether the initial coordinates after a merge are the coordinates before it, so that merging does nothing."""
        return False

    @property
    def starts_from_weights(self) -> bool:
        """Whether `from_weights` is available: only then can the space be that of a next stage."""
        return False

    @property
    def reparametrized(self) -> bool:
        """Whether clients train other values than the coordinates, such as scores instead of probabilities."""
        return False

    @property
    def reads_base(self) -> bool:
        """Whether the basis depends on the initial weights: see `basis_from`."""
        return False

    @property
    def counts_from_start(self) -> bool:
        """Whether factors are stored as changes from their initial values, so that their product is no adapter."""
        return False

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if this space cannot be used for a model with these weights."""
        return

    def note(self, spec: Spec) -> str:
        """Return a sentence on what is derived from a model with these weights, for `thinwire check`; often empty."""
        return ""

    @abstractmethod
    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Draw the random matrices from the shared seed; often empty. Not part of `expand`, which runs inside vmap."""
        ...

    def basis_from(self, base: Tree, key: Key, device: Device) -> Tree:
        """Return the basis of a model with these initial weights; by default `basis` of their shapes.

        Where `reads_base`, it must be a function of the weights that every machine computes alike.
        """
        return self.basis(Spec.of(base), key, device)

    @abstractmethod
    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial coordinates, named after their weight: `weight/part`, or `model/part` for all weights."""
        ...

    @abstractmethod
    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return all weights of the model; pure and differentiable in `coords`."""
        ...

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of the trained model, for testing and export; never called in training.

        Differs from `expand` only for a space that prunes the trained model.
        """
        return self.expand(base, basis, coords)

    def unmerged(self) -> Space:
        """Return the space to train in: one that keeps adapters apart from the weights, or this space itself.

        Where `reparametrized`, its `expand` takes the values that clients train, and may draw from torch's generator.
        """
        return self

    def to_trained(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the values that clients train for these coordinates; by default the coordinates.

        Works value by value: coordinates may have the clients of a cohort on a further first axis.
        """
        return coords

    def from_trained(self, base: Tree, basis: Tree, trained: Tree) -> Tree:
        """Return the coordinates of trained values. The inverse of `to_trained`."""
        return trained

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Return coordinates whose weights are as close as possible to the given ones.

        Raises:
            IncompatibleParts: unless `starts_from_weights`.
        """
        raise IncompatibleParts(
            f"{type(self).__name__} cannot start from given weights; take LoRA or Full as the space of the next stage"
        )
