"""Contract of a sketch, and the sketch that changes nothing.

A sketch encodes a client's update as values that can be averaged: the mean of codes is a code of the mean. The
aggregator, the server optimizer and the noise of differential privacy all work on codes, and the averaged code is what
the server broadcasts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree


class Sketch(Protocol):
    """A code of an update that can be averaged. Not a codec, which turns values into bytes."""

    is_identity: ClassVar[bool] = False
    """Whether the code is the update itself."""

    @abstractmethod
    def spec(self, coords: Spec) -> Spec:
        """Return names, shapes and types of the code for updates of these blocks."""
        ...

    @abstractmethod
    def encode(self, delta: Tree, key: Key) -> Tree:
        """Encode an update. `key` is the same for server and clients, and another one in every round."""
        ...

    @abstractmethod
    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Decode an update of the blocks `coords`."""
        ...


@register("sketch", "identity")
@dataclass(frozen=True)
class Identity(Sketch):
    """Average the updates themselves.

    >>> import torch
    >>> Identity().encode({"w": torch.ones(1)}, Key(0))["w"].tolist()
    [1.0]
    """

    is_identity = True

    def spec(self, coords: Spec) -> Spec:
        """Return the blocks of the update."""
        return coords

    def encode(self, delta: Tree, key: Key) -> Tree:
        """Return the update."""
        return delta

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Return the code."""
        return code
