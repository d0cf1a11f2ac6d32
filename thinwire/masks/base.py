"""Contract of a mask, and the mask that trains everything.

Sparse training over any space. A mask is never sent: it is a function of the coordinates that a client downloaded, so
server and clients compute the same one, and the codec `masked` sends the values under it without their positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from thinwire.core.registry import register_part
from thinwire.core.tree import Tree


class Mask(ABC):
    """Selects the coordinates that clients train, and those that the server sets to zero.

    Masks are trees of boolean blocks; an empty tree selects everything.
    """

    active = True
    """Whether the mask may select less than everything."""

    prunes = False
    """Whether the server sets coordinates to zero."""

    fixed = False
    """Whether the mask is known before any download; then coordinates outside it are never sent."""

    @abstractmethod
    def trained(self, coords: Tree, version: int) -> Tree:
        """Return the mask of training in the round that starts from `version`.

        Args:
            coords: the coordinates that a client downloaded, on the CPU.
            version: the version that the round starts from.
        """

    def left(self, before: Tree, after: Tree, version: int) -> Tree:
        """Return the mask of coordinates that the server keeps; it sets the others to zero.

        Args:
            before: the coordinates at `version - 1`.
            after: the coordinates after the server's step.
            version: the version that the step produces.
        """
        return {}


@register_part("mask", "none")
class NoMask(Mask):
    """Train all coordinates.

    >>> NoMask().trained({}, 0), NoMask().active
    ({}, False)
    """

    active = False

    def trained(self, coords: Tree, version: int) -> Tree:
        """Return an empty tree: everything is trained."""
        return {}
