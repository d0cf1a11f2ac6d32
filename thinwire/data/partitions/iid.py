"""Partitions without label skew parameters: IID, and natural by user."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.partitions.base import Assignment, check_clients, near_equal, offsets_of
from thinwire.errors import ConfigError

DERIVED_CLIENTS = 10  # of a dataset without users, if no number is given


@register("partition", "iid", doc="Shuffle all examples and divide them into near-equal parts.")
@dataclass(frozen=True)
class IID:
    """Shuffle all examples and divide them into near-equal parts: all clients have the same class distribution.

    >>> IID().assign(np.zeros(7, int), 3, Key(0)).sizes().tolist()
    [3, 2, 2]
    """

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples; labels and users are not used."""
        check_clients(len(labels), clients)
        order = key.fold("iid").permutation(len(labels)).numpy()
        return Assignment(order, offsets_of(near_equal(len(labels), clients)))


@register(
    "partition",
    "natural",
    doc="One client per user of the dataset, those with most examples first.",
    paper="Caldas et al., LEAF: a benchmark for federated settings, 2018",
)
@dataclass(frozen=True)
class Natural:
    """One client per user of the dataset: the `clients` users with most examples, in descending order; 0 for all users.

    Nothing is random. The examples of all other users are left out.

    >>> users = np.array([5, 2, 5, 9, 2, 5])
    >>> a = Natural().assign(np.zeros(6, int), 2, Key(0), users)
    >>> a.client(0).tolist(), a.client(1).tolist()
    ([0, 2, 5], [1, 4])
    """

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Group the examples by user; of users with equally many examples, the lower index comes first."""
        if users is None:
            raise ConfigError("partition natural: this dataset has no users; write partition = 'iid' or 'dirichlet'")
        counts = np.bincount(users)
        known = int(np.count_nonzero(counts))
        clients = clients or known
        check_clients(len(labels), clients)
        if clients > known:
            raise ConfigError(f"clients={clients}: the dataset has {known} users; write clients={known} or fewer")
        chosen = np.argsort(-counts, kind="stable")[:clients]
        rank = np.full(len(counts), clients, np.int64)
        rank[chosen] = np.arange(clients)
        sizes = counts[chosen]
        order = np.argsort(rank[users], kind="stable")[: sizes.sum()]
        return Assignment(order.astype(np.int64, copy=False), offsets_of(sizes))


@register("partition", "auto", doc="As `natural` if the dataset has users, otherwise as `iid`; clients = 0 is derived.")
@dataclass(frozen=True)
class Auto:
    """As `Natural` if the dataset has users, otherwise as `IID`.

    With clients = 0 there is one client for each user; without users there are ten, or one for each example if these
    are fewer.

    >>> Auto().assign(np.zeros(6, int), 0, Key(0), np.array([5, 2, 5, 9, 2, 5])).sizes().tolist()
    [3, 2, 1]
    >>> Auto().assign(np.zeros(40, int), 0, Key(0)).sizes().tolist()
    [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    """

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples by users if there are any."""
        if users is not None:
            return Natural().assign(labels, clients, key, users)
        return IID().assign(labels, clients or min(DERIVED_CLIENTS, len(labels)), key)
