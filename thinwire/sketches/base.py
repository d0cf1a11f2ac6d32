"""Contract of a sketch, and the sketch that changes nothing.

A sketch encodes a client's update as values that can be averaged: the mean of codes is a code of the mean. The
aggregator, the server optimizer and the noise of differential privacy all work on codes. The server broadcasts the
averaged code, or, where the sketch `recovers`, an update that it recovers from the codes of all rounds so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from thinwire.core.key import Key
from thinwire.core.registry import register_part
from thinwire.core.tree import Spec, Tree, tmap


class Sketch(ABC):
    """A code of an update that can be averaged. Not a codec, which turns values into bytes."""

    is_identity = False
    """Whether the code is the update itself."""

    recovers = False
    """Whether the server broadcasts what `recover` returns instead of codes. The key is then the same in all rounds."""

    @abstractmethod
    def spec(self, coords: Spec) -> Spec:
        """Return names, shapes and types of the code for updates of these blocks."""

    @abstractmethod
    def encode(self, delta: Tree, key: Key) -> Tree:
        """Encode an update. `key` is the same for server and clients, and another one in every round (`recovers`)."""

    @abstractmethod
    def decode(self, code: Tree, coords: Spec, key: Key) -> Tree:
        """Decode an update of the blocks `coords`."""

    def recover(self, code: Tree, coords: Spec, key: Key) -> tuple[Tree, Tree]:
        """Return the update to broadcast, and which values of the code, added up over all rounds, are left.

        Only called where `recovers`. Values of the code that are not left become zero, in the momentum of the server
        optimizer, too; the others are added to the code of the next round. By default everything is recovered.
        """
        return self.decode(code, coords, key), tmap(lambda x: torch.zeros_like(x, dtype=torch.bool), code)


@register_part("sketch", "identity")
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
