"""Who holds which examples: the splits of a data set among clients.

A split is a frozen dataclass with one pure method, `assign`; the same key gives the same split on every machine. Its
result, an `Assignment`, keeps all clients in two arrays, so a million clients cost sixteen megabytes.

>>> import numpy as np
>>> a = Assignment(np.array([4, 0, 2, 1, 3]), np.array([0, 2, 5]))
>>> len(a), a.client(1).tolist(), a.sizes().tolist()
(2, [2, 1, 3], [2, 3])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from thinwire.core.rng import Key


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which examples each client has: client i holds order[offsets[i] : offsets[i + 1]].

    Args:
        order: (n,) int64 example numbers; examples that nobody holds are left out.
        offsets: (clients + 1,) int64, ascending from 0 to n.
    """

    order: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, i: int) -> np.ndarray:
        """The example numbers of client i."""
        return self.order[self.offsets[i] : self.offsets[i + 1]]

    def sizes(self) -> np.ndarray:
        """How many examples each client has."""
        return np.diff(self.offsets)


class Split(Protocol):
    """A rule that deals the examples of a data set to clients."""

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the examples.

        Args:
            labels: (n,) class number of each example.
            clients: how many clients.
            key: where all randomness comes from.
            users: (n,) natural client of each example, where the data set has one.
        """
        ...
