"""Which numbers are averaged: the contract of a sketch, and the one that changes nothing.

A sketch encodes a client's change into numbers that may be averaged: the mean of codes is a code of the mean. The
server's mean, its optimiser and the noise of privacy all work on codes, and the averaged code itself is broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.spec import Spec
from thinwire.core.tree import Tree


class Sketch(Protocol):
    """A code of a change that may be averaged."""

    def spec(self, coords: Spec) -> Spec:
        """Names, shapes and types of the code for changes of these blocks."""
        ...

    def encode(self, delta: Tree, key: Key) -> Tree:
        """Change to code. `key` is shared by everyone and new in every round."""
        ...

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Code to change; `coords` says which blocks."""
        ...


@register("sketch", "identity")
@dataclass(frozen=True)
class Identity:
    """Average the changes themselves.

    >>> import torch
    >>> Identity().encode({"w": torch.ones(1)}, Key(0))["w"].tolist()
    [1.0]
    """

    def spec(self, coords: Spec) -> Spec:
        """As the change."""
        return coords

    def encode(self, delta: Tree, key: Key) -> Tree:
        """The change itself."""
        return delta

    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """The code itself."""
        return code
