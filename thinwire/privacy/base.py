"""What may leave a client: the contract of a privacy mechanism, and the one that lets everything pass.

It acts between sketch and codec, on all numbers that leave the client together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thinwire.core.registry import register
from thinwire.core.rng import Key
from thinwire.core.tree import Tree


class Privacy(Protocol):
    """Bounds what one client can say, and blurs what the server releases."""

    @property
    def bounds(self) -> bool:
        """Whether `accept` bounds what one client counts, so that nothing may reach the server beside it."""
        ...

    def bound(self, code: Tree, key: Key) -> Tree:
        """On the client: clip, and perhaps add noise."""
        ...

    def accept(self, code: Tree) -> Tree:
        """On the server: what counts of one client's numbers, as they were decoded."""
        ...

    def release(self, mean: Tree, clients: int, key: Key) -> Tree:
        """On the server: what is made public of the mean of that many clients."""
        ...


@register("privacy", "none")
@dataclass(frozen=True)
class NoPrivacy:
    """Send what was computed, release what was averaged."""

    @property
    def bounds(self) -> bool:
        """No."""
        return False

    def bound(self, code: Tree, key: Key) -> Tree:
        """Unchanged."""
        return code

    def accept(self, code: Tree) -> Tree:
        """Unchanged."""
        return code

    def release(self, mean: Tree, clients: int, key: Key) -> Tree:
        """Unchanged."""
        return mean
