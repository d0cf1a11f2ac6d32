"""What may leave a client: the contract of a privacy mechanism, and the one that lets everything pass.

It acts between sketch and codec, on all numbers that leave the client together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.tree import Tree


class Privacy(Protocol):
    """Bounds what one client can say, and blurs what the server releases."""

    @property
    def active(self) -> bool:
        """Whether the mechanism changes what is uploaded or released."""
        return True

    @property
    def bounds(self) -> bool:
        """Whether the influence of one client is bounded, so that uploads must hold nothing besides the update."""
        return False

    @property
    def masked(self) -> MaskedPrivacy | None:
        """The mechanism for secure aggregation, where the server sees the sum only; None if there is none."""
        return None

    def bound(self, code: Tree, key: Key) -> Tree:
        """On the client: clip, and perhaps add noise."""
        ...

    def aggregate(self, codes: Sequence[Tree], mean: Callable[[Sequence[Tree]], Tree], clients: int, key: Key) -> Tree:
        """On the server: what is made public of what the clients said.

        Args:
            codes: one tree for each client, as it was decoded; under masked sums their mean alone.
            mean: puts trees together as the method does.
            clients: how many clients there are in it.
            key: where noise comes from.
        """
        ...

    def spent(self, clients: int, population: int, rounds: int) -> tuple[float | None, str] | None:
        """The epsilon after these rounds, or None and the reason; None if the mechanism makes no such promise."""
        return None


@runtime_checkable
class MaskedPrivacy(Protocol):
    """A mechanism that also works where the server sees a sum only: clients bound and blur what they add to it."""

    def check_clients(self, clients: int) -> None:
        """Raise a ConfigError if sums of so many clients cannot be made."""
        ...

    def add_to_sum(self, x: np.ndarray, clients: int, key: Key) -> np.ndarray:
        """On the client: the whole numbers (int64) that it adds to the sum of so many clients, for its numbers x."""
        ...

    def of_sum(self, total: np.ndarray, clients: int) -> np.ndarray:
        """On the server: what is made public of that sum, as float64."""
        ...


@register("privacy", "none")
@dataclass(frozen=True)
class NoPrivacy(Privacy):
    """Send what was computed, release what was averaged."""

    @property
    def active(self) -> bool:
        """False: updates and their mean are left unchanged."""
        return False

    def bound(self, code: Tree, key: Key) -> Tree:
        """Unchanged."""
        return code

    def aggregate(self, codes: Sequence[Tree], mean: Callable[[Sequence[Tree]], Tree], clients: int, key: Key) -> Tree:
        """Their mean."""
        return mean(codes)


def spent(privacy: Privacy, clients: int, population: int, rounds: int) -> tuple[float | None, str] | None:
    """The epsilon after these rounds: see `Privacy.spent`."""
    return privacy.spent(clients, population, rounds)
