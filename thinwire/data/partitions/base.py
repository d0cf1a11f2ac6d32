"""The contract of a partition: a rule that assigns the examples of a dataset to clients.

A partition is a frozen dataclass with one pure method, `assign`; the same key gives the same assignment. The result, an
`Assignment`, stores all clients in two arrays: a million clients take sixteen megabytes. The partitions are in `iid`,
`shards` and `dirichlet`; below the contract are the array operations that they share.

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
    """The examples of each client: client i has the examples order[offsets[i] : offsets[i + 1]].

    Args:
        order: (n,) int64 indices of examples; those without a client are left out.
        offsets: (clients + 1,) int64, ascending from 0 to n.
    """

    order: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, i: int) -> np.ndarray:
        """The indices of the examples of client i."""
        return self.order[self.offsets[i] : self.offsets[i + 1]]

    def first(self, clients: int) -> Assignment:
        """The assignment of the first clients alone."""
        if clients > len(self):
            raise ConfigError(
                f"the first {clients} clients are wanted, but there are {len(self)}; write {len(self)} or fewer"
            )
        offsets = self.offsets[: clients + 1]
        return Assignment(self.order[: offsets[-1]], offsets)

    def sizes(self) -> np.ndarray:
        """The number of examples of each client."""
        return np.diff(self.offsets)


class Partition(Protocol):
    """A rule that assigns the examples of a dataset to clients."""

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples.

        Args:
            labels: (n,) class label of each example.
            clients: number of clients.
            key: the only source of randomness.
            users: (n,) user of each example, where the dataset has users.
        """
        ...


def check_clients(examples: int, clients: int, each: int = 1) -> None:
    """Raise ConfigError if the examples are fewer than `each` per client."""
    if clients < 1:
        raise ConfigError(f"clients={clients}: a partition needs at least one client; write clients=1 or more")
    if clients * each > examples:
        need = f"{each} examples each" if each > 1 else "an example each"
        most = examples // each
        raise ConfigError(
            f"clients={clients}: {examples} examples are not enough for {need}; write clients={most} or fewer"
            if most
            else f"clients={clients}: {examples} examples are not enough for {need}, with any number of clients"
        )


def class_ids(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes that occur, numbered from 0 without gaps.

    Returns:
        (n,) the class of each example, and (classes,) the number of examples of each class.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        given = f"labels of type {labels.dtype} and shape {labels.shape}"
        raise ConfigError(
            f"{given}: partitions by class need one class label per example; write task.partition = 'iid' or 'natural'"
        )
    _, ids, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # 16 bits where possible: numpy then uses radix sort, ten times as fast as a comparison sort
    return ids.astype(np.uint16 if len(counts) <= 1 << 16 else np.int64), counts


def by_class(ids: np.ndarray, key: Key | None) -> np.ndarray:
    """Indices of examples grouped by class, within a class in file order or, with a key, in random order."""
    if key is None:
        return np.argsort(ids, kind="stable")
    shuffled = key.permutation(len(ids)).numpy()
    return shuffled[np.argsort(ids[shuffled], kind="stable")]


def near_equal(total: int, parts: int) -> np.ndarray:
    """Sizes of `parts` parts of `total` that differ by at most one, the larger first (as np.array_split).

    >>> near_equal(7, 3).tolist()
    [3, 2, 2]
    """
    return np.full(parts, total // parts, np.int64) + (np.arange(parts) < total % parts)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """The offsets of consecutive parts of these sizes, and the end of the last one."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))


def collect(pool: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> Assignment:
    """Give client i the ranges pool[starts[i, j] : starts[i, j] + sizes[i, j]] for every j.

    >>> a = collect(np.array([10, 11, 12, 13]), np.array([[2, 0], [1, 0]]), np.array([[2, 1], [1, 0]]))
    >>> a.client(0).tolist(), a.client(1).tolist()
    ([12, 13, 10], [11])
    """
    flat = sizes.reshape(-1)
    begins = offsets_of(flat)
    positions = np.arange(begins[-1]) + np.repeat(starts.reshape(-1) - begins[:-1], flat)
    return Assignment(pool[positions].astype(np.int64, copy=False), offsets_of(sizes.sum(axis=1)))
