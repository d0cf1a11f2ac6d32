"""Who holds which examples: the splits of a data set among clients.

A split is a frozen dataclass with one pure method, `assign`; the same key gives the same split. Its result, an
`Assignment`, keeps all clients in two arrays, so a million clients cost sixteen megabytes. The splits themselves stand
in `splits`, `shards` and `dirichlet`; below the contract are the few array operations that they share.

>>> import numpy as np
>>> a = Assignment(np.array([4, 0, 2, 1, 3]), np.array([0, 2, 5]))
>>> len(a), a.client(1).tolist(), a.sizes().tolist()
(2, [2, 1, 3], [2, 3])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from thinwire.core.key import Key
from thinwire.errors import ConfigError


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

    def first(self, clients: int) -> Assignment:
        """Only the first of the clients."""
        offsets = self.offsets[: clients + 1]
        return Assignment(self.order[: offsets[-1]], offsets)

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


def check_clients(examples: int, clients: int, each: int = 1) -> None:
    """Refuse a number of clients that cannot be served with `each` examples or more."""
    if clients < 1:
        raise ConfigError(f"clients={clients}: a split needs at least one client; write clients=1 or more")
    if clients * each > examples:
        need = f"{each} examples each" if each > 1 else "an example each"
        most = examples // each
        raise ConfigError(
            f"clients={clients}: {examples} examples are not enough for {need}; write clients={most} or fewer"
            if most
            else f"clients={clients}: {examples} examples are not enough for {need}, with any number of clients"
        )


def class_numbers(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes that occur, numbered from 0 without gaps.

    Returns:
        (n,) the number of each example's class, and (classes,) how many examples each has.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        given = f"labels of type {labels.dtype} and shape {labels.shape}"
        raise ConfigError(f"{given}: splits by class need one class number an example; write split = iid or natural")
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # 16 bits where they suffice: numpy then sorts by radix, ten times as fast as by comparison
    return number.astype(np.uint16 if len(counts) <= 1 << 16 else np.int64), counts


def by_class(number: np.ndarray, key: Key | None) -> np.ndarray:
    """Example numbers grouped by class, inside a class in file order or, with a key, in random order."""
    if key is None:
        return np.argsort(number, kind="stable")
    shuffled = key.permutation(len(number)).numpy()
    return shuffled[np.argsort(number[shuffled], kind="stable")]


def near_equal(total: int, parts: int) -> np.ndarray:
    """Sizes of `parts` parts of `total` things that differ by one at most, the larger first (as np.array_split).

    >>> near_equal(7, 3).tolist()
    [3, 2, 2]
    """
    return np.full(parts, total // parts, np.int64) + (np.arange(parts) < total % parts)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Where each part begins when parts of these sizes lie one after another, and where the last ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))


def collect(pool: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> Assignment:
    """Give client i the stretches pool[starts[i, j] : starts[i, j] + sizes[i, j]] for every j.

    >>> a = collect(np.array([10, 11, 12, 13]), np.array([[2, 0], [1, 0]]), np.array([[2, 1], [1, 0]]))
    >>> a.client(0).tolist(), a.client(1).tolist()
    ([12, 13, 10], [11])
    """
    flat = sizes.reshape(-1)
    begins = offsets_of(flat)
    reach = np.arange(begins[-1]) + np.repeat(starts.reshape(-1) - begins[:-1], flat)
    return Assignment(pool[reach].astype(np.int64, copy=False), offsets_of(sizes.sum(axis=1)))
