"""Contract of a space: trainable coordinates and the function that turns them into weights.

    weights = expand(base, basis, coords)

`base` holds the weights that server and clients share, `basis` the random matrices drawn from the shared seed (never
sent, never trained), and `coords` the trainable parameters. After `redraw_every` rounds `advance` merges, by default
`base <- expand(base, basis, coords)`.

The full model: every weight is trained.

Weights that are not trained: the rest of a model of which only some blocks are trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from thinwire.core.key import Device, Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree
from thinwire.errors import IncompatibleParts


class Stack(NamedTuple):
    """A change of the base as stacked factors, so that it can be sent without its full size.

    Args:
        adapters: how many adapters of each matrix are stacked.
        blocks: `x/b` and `x/a`, whose product is the change of the weight x, or `x/w`, the change itself.
    """

    adapters: int
    blocks: Tree


class Stacking(ABC):
    """What a space has whose server adds the adapters of clients to the base, besides what it averages."""

    @abstractmethod
    def averaged(self, coords: Spec) -> Spec:
        """Return the coordinates that are averaged and broadcast as usual."""

    @abstractmethod
    def count(self, clients: int) -> int:
        """Return how many adapters of each matrix are stacked after a round with that many clients."""

    @abstractmethod
    def stack(self, values: Sequence[Tree], shares: Sequence[float]) -> Stack:
        """Return what is added to the base, from the coordinates of all clients; shares sum to 1. On the server."""

    @abstractmethod
    def stack_spec(self, weights: Spec, count: int) -> Spec:
        """Return the blocks of a stack of that many adapters; never larger than the weights."""

    @abstractmethod
    def with_stack(self, base: Tree, blocks: Tree) -> Tree:
        """Return the base with a stack added: the same on the server and on every client."""


class Space(ABC):
    """Where a client trains: coordinates, and a pure function from coordinates to weights.

    A space is a frozen dataclass that subclasses this contract and implements `init` and `expand`. The other methods
    have a default. Fields of the dataclass need a default value too: `redraw_every: int = 1`.
    """

    redraw_every: int = 0
    """Rounds after which the coordinates are merged into the base and a new basis is drawn; 0 means never."""

    unaffected_by_merging = False
    """Whether the initial coordinates after a merge are the coordinates before it, so that merging does nothing."""

    starts_from_weights = False
    """Whether `from_weights` is available: only then can the space be that of a next stage."""

    reparametrized = False
    """Whether clients train other values than the coordinates, such as scores instead of probabilities."""

    stacking: Stacking | None = None
    """What the server adds to the base besides merging; None for nothing. It needs `redraw_every = 1`."""

    reads_base = False
    """Whether the basis depends on the initial weights: see `basis_from`."""

    counts_from_start = False
    """Whether factors are stored as changes from their initial values, so that their product is no adapter."""

    additive = False
    """Whether moves add up: expand(base, basis, c + h) is expand(expand(base, basis, c), basis, h)."""

    adapter_dropout = 0.0
    """The probability with which an input of an adapter is left out in training."""

    exports_adapter = False
    """Whether `exported` is available: the coordinates are low-rank adapters, which peft can load."""

    def exported(self, basis: Tree, coords: Tree) -> tuple[Any, Tree]:
        """Return the LoRA, and its coordinates, that have the same weights as these coordinates.

        Raises:
            IncompatibleParts: unless `exports_adapter`.
        """
        raise IncompatibleParts(f"{type(self).__name__} has no adapters to export; take the space 'lora'")

    def for_model(self, module: nn.Module) -> Space:
        """Return the space completed by the types of a model's layers; by default the space itself."""
        return self

    def over(self, rounds: int) -> Space:
        """Return the space of a run of that many rounds; by default the space itself."""
        return self

    def check(self, spec: Spec) -> None:
        """Raise a ConfigError if this space cannot be used for a model with these weights."""
        return

    def note(self, spec: Spec) -> str:
        """Return a sentence on what is derived from a model with these weights, for `thinwire check`; often empty."""
        return ""

    def basis(self, spec: Spec, key: Key, device: Device) -> Tree:
        """Draw the random matrices from the shared seed; by default none. Not part of `expand`: it runs inside vmap."""
        return {}

    def basis_from(self, base: Tree, key: Key, device: Device) -> Tree:
        """Return the basis of a model with these initial weights; by default `basis` of their shapes.

        Where `reads_base`, it must be a function of the weights that every machine computes alike.
        """
        return self.basis(Spec.of(base), key, device)

    @abstractmethod
    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial coordinates, named after their weight: `weight/part`, or `model/part` for all weights."""

    @abstractmethod
    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return all weights of the model; pure and differentiable in `coords`."""

    def merge(self, base: Tree, basis: Tree, coords: Tree, key: Key) -> tuple[Tree, Tree]:
        """Return base and coordinates after `redraw_every` rounds: by default merged weights and new coordinates."""
        base = self.expand(base, basis, coords)
        return base, self.init(base, basis, key)

    def evaluation_weights(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights of the trained model, for testing and export; never called in training.

        Differs from `expand` only for a space that prunes the trained model.
        """
        return self.expand(base, basis, coords)

    def unmerged(self) -> Space:
        """Return the space to train in: one that keeps adapters apart from the weights, or this space itself.

        Where `reparametrized`, its `expand` takes the values that clients train, and may draw from torch's generator.
        """
        return self if type(self).expand_unmerged is Space.expand_unmerged else Unmerged(self)

    def expand_unmerged(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights to train with: those without adapters, followed by the adapters, or sampled ones."""
        return self.expand(base, basis, coords)

    def merged(self) -> Space:
        """Return the space whose `expand` returns the weights of the model alone. The inverse of `unmerged`."""
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


@register_part("space", "full", paper="McMahan et al., AISTATS 2017")
class Full(Space):
    """Train every weight of the model: the coordinates are the weights.

        weights = coords

    >>> import torch
    >>> space, base = Full(), {"w": torch.ones(2)}
    >>> space.expand(base, {}, space.init(base, {}, Key(0)))["w"].tolist()
    [1.0, 1.0]
    """

    unaffected_by_merging = starts_from_weights = True

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the weights of the base."""
        return dict(base)

    def from_weights(self, base: Tree, weights: Tree, key: Key) -> Tree:
        """Return the weights."""
        return dict(weights)

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the coordinates."""
        return coords


@register_part("space", "frozen")
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

    unaffected_by_merging = True

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return no coordinates."""
        return {}

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the base."""
        return base


@dataclass(frozen=True)
class Unmerged(Space):
    """A space as it is trained; only `expand` differs from the inner space.

    >>> import torch
    >>> from thinwire.spaces import LoRA
    >>> base = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
    >>> space = Unmerged(LoRA(rank=1))
    >>> list(space.expand(base, {}, space.init(base, {}, Key(0))))
    ['fc.weight', 'fc.bias', 'fc.weight/a', 'fc.weight/b']
    """

    inner: Space

    def merged(self) -> Space:
        """Return the inner space; this one where clients train other values than its coordinates."""
        return self if self.inner.reparametrized else self.inner

    def init(self, base: Tree, basis: Tree, key: Key) -> Tree:
        """Return the initial coordinates of the inner space."""
        return self.inner.init(base, basis, key)

    def expand(self, base: Tree, basis: Tree, coords: Tree) -> Tree:
        """Return the weights without adapters, followed by the adapters."""
        return self.inner.expand_unmerged(base, basis, coords)
