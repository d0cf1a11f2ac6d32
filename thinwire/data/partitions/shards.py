"""Partitions that give each client a few classes: the data is divided into shards, and shards are dealt at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.partitions.base import (
    Assignment,
    by_class,
    check_clients,
    class_ids,
    collect,
    near_equal,
    offsets_of,
)
from thinwire.errors import ConfigError


@register(
    "partition",
    "shards",
    doc="Sort by class, divide into equal blocks, deal `per_client` random blocks to each client.",
    paper="McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017",
)
@dataclass(frozen=True)
class Shards:
    """Sort by class, divide into equal blocks, and deal `per_client` random blocks to each client.

    A block that spans two classes gives a client one class more than `per_client`. `strict` divides each class by
    itself instead: never more than `per_client` classes, but blocks of slightly different sizes.

    Args:
        per_client: blocks per client; there are clients * per_client of them.
        strict: divide each class by itself, so that a client has at most `per_client` classes.

    >>> labels = np.arange(12) % 3
    >>> a = Shards(per_client=1).assign(labels, 3, Key(0))
    >>> [set(labels[a.client(i)].tolist()) for i in range(3)]
    [{0}, {2}, {1}]
    """

    per_client: int = 2
    strict: bool = False

    def __post_init__(self) -> None:
        _check_per_client(self.per_client)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the blocks; users are not used."""
        check_clients(len(labels), clients, self.per_client)
        ids, counts = class_ids(labels)
        blocks = clients * self.per_client
        if self.strict:
            sizes = _part_sizes(counts, _proportional(counts, blocks))
        else:
            sizes = near_equal(len(labels), blocks)
        dealt = key.fold("shards").permutation(blocks).numpy().reshape(clients, self.per_client)
        return collect(by_class(ids, None), offsets_of(sizes)[dealt], sizes[dealt])


@register(
    "partition",
    "class-shards",
    doc="Divide each class into equally many shards, deal `per_client` random shards, at least `min_classes` classes.",
    paper="MAPA (model-agnostic projection adaptation), partition of the experiments",
)
@dataclass(frozen=True)
class ClassShards:
    """Divide each class into equally many shards, deal them, and swap until every client has `min_classes` classes.

    Args:
        per_client: shards per client.
        shards_per_class: 0 means clients * per_client / classes; if not an integer, larger classes get one more.
        min_classes: minimum number of different classes of a client.

    >>> labels = np.arange(100) % 10
    >>> a = ClassShards(per_client=2).assign(labels, 10, Key(0))
    >>> {len(set(labels[a.client(i)].tolist())) for i in range(10)}
    {2}
    """

    per_client: int = 5
    shards_per_class: int = 0
    min_classes: int = 2

    def __post_init__(self) -> None:
        _check_per_client(self.per_client)
        if self.shards_per_class < 0:
            raise ConfigError(f"shards_per_class={self.shards_per_class}: write 0 (derived) or a positive integer")
        if not 1 <= self.min_classes <= self.per_client:
            raise ConfigError(
                f"min_classes={self.min_classes}: {self.per_client} shards per client have 1 to {self.per_client} "
                f"classes; write min_classes={self.per_client} or fewer"
            )

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the shards; users are not used."""
        check_clients(len(labels), clients)
        ids, counts = class_ids(labels)
        classes, need = len(counts), clients * self.per_client
        if self.min_classes > classes:
            raise ConfigError(f"min_classes={self.min_classes}: the dataset has {classes}; write {classes} or fewer")
        if self.shards_per_class and self.shards_per_class * classes != need:
            raise ConfigError(
                f"shards_per_class={self.shards_per_class}: {classes} classes give {self.shards_per_class * classes} "
                f"shards, but {clients} clients take {need}; write shards_per_class=0 to derive it"
            )
        shards = np.empty(classes, np.int64)
        shards[np.argsort(-counts, kind="stable")] = near_equal(need, classes)
        _check_parts(counts, shards, clients, self.per_client)
        deck = np.repeat(np.arange(classes), shards)
        hands = deck[key.fold("deal").permutation(need).numpy()].reshape(clients, self.per_client)
        swap_until(hands, self.min_classes)
        return _assign(hands, ids, counts, key)


@register(
    "partition",
    "classes",
    doc="Give every client exactly `per_client` different classes; all data is used.",
    paper="MAPO, partition of the experiments",
)
@dataclass(frozen=True)
class Classes:
    """Give every client exactly `per_client` different classes, in equal amounts, and use all data.

    The list of classes is shuffled and dealt repeatedly. Every class goes to clients * per_client / classes clients,
    rounded up or down, and each of them gets an equal share of it.

    Args:
        per_client: classes per client.

    >>> labels = np.arange(60) % 6
    >>> a = Classes(per_client=2).assign(labels, 6, Key(0))
    >>> [len(set(labels[a.client(i)].tolist())) for i in range(6)], a.sizes().tolist()
    ([2, 2, 2, 2, 2, 2], [10, 10, 10, 10, 10, 10])
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        _check_per_client(self.per_client)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the classes; users are not used."""
        check_clients(len(labels), clients)
        ids, counts = class_ids(labels)
        classes, need = len(counts), clients * self.per_client
        if self.per_client > classes:
            raise ConfigError(f"per_client={self.per_client}: the dataset has {classes} classes; write that or fewer")
        lists = -(-need // classes)
        lots = key.fold("deal").words_numpy(lists * classes).reshape(lists, classes)
        hands = np.argsort(lots, axis=1, kind="stable").reshape(-1)[:need].reshape(clients, self.per_client)
        _check_parts(counts, np.bincount(hands.reshape(-1), minlength=classes), clients, self.per_client)
        swap_until(hands, self.per_client)  # a hand dealt from two lists can have a class twice
        return _assign(hands, ids, counts, key)


def swap_until(hands: np.ndarray, least: int) -> None:
    """Swap classes between clients, in place, until every client has `least` different ones.

    For each client with too few classes, the other clients are tried in order, and the first swap that raises the
    number of different classes of the two (counted up to `least`) is made. Clients are in random order already, so the
    first is as random as any. If all classes are dealt equally often, up to one, such a swap always exists. Say client
    i has class c twice. Either some client lacks c and can give a class that i lacks, or one that it has twice itself;
    or all clients have c, and then some client has a class twice that i lacks.

    Args:
        hands: (clients, per_client) the classes of each client, with repetitions.
        least: at most per_client and at most the number of different classes.
    """
    rows = np.sort(hands, axis=1)
    distinct = 1 + np.count_nonzero(np.diff(rows, axis=1), axis=1)
    for i in np.flatnonzero(distinct < least).tolist():
        while len(set(hands[i].tolist())) < least:
            if not any(_swap(hands, i, (i + step) % len(hands), least) for step in range(1, len(hands))):
                raise ConfigError(f"{len(hands)} clients cannot have {least} classes each; write a smaller number")


def _swap(hands: np.ndarray, i: int, j: int, least: int) -> bool:
    """Make one swap between clients i and j that brings them nearer to `least` classes; False if there is none."""
    first, second = hands[i].tolist(), hands[j].tolist()
    now = _distinct(first, least) + _distinct(second, least)
    for a, given in enumerate(first):
        if first.count(given) < 2:
            continue
        for b, taken in enumerate(second):
            if taken == given:
                continue
            left, right = first[:a] + [taken] + first[a + 1 :], second[:b] + [given] + second[b + 1 :]
            if _distinct(left, least) + _distinct(right, least) > now:
                hands[i], hands[j] = left, right
                return True
    return False


def _distinct(hand: list[int], least: int) -> int:
    return min(len(set(hand)), least)


def _assign(hands: np.ndarray, ids: np.ndarray, counts: np.ndarray, key: Key) -> Assignment:
    """Divide each class, shuffled, into as many parts as it was dealt, and give each client its parts."""
    flat = hands.reshape(-1)
    slot = np.argsort(flat, kind="stable")  # the slots of class 0, then those of class 1, ...
    cut = _part_sizes(counts, np.bincount(flat, minlength=len(counts)))
    starts, sizes = np.empty_like(cut), np.empty_like(cut)
    starts[slot], sizes[slot] = offsets_of(cut)[:-1], cut
    return collect(by_class(ids, key.fold("inside")), starts.reshape(hands.shape), sizes.reshape(hands.shape))


def _part_sizes(counts: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Sizes of all parts when each class is divided near-equally into its number of parts, class after class."""
    rank = np.arange(parts.sum()) - np.repeat(offsets_of(parts)[:-1], parts)
    return np.asarray(np.repeat(counts // parts, parts) + (rank < np.repeat(counts % parts, parts)))


def _proportional(counts: np.ndarray, parts: int) -> np.ndarray:
    """The number of blocks of each class: in proportion to its size, at least one (largest remainders)."""
    if parts < len(counts):
        raise ConfigError(
            f"strict shards: {parts} blocks cannot cover {len(counts)} classes; take more clients or per_client"
        )
    spare = (counts - 1) * (parts - len(counts))  # one block each first, the rest by the examples beyond the first
    total = max(int(counts.sum()) - len(counts), 1)
    share = 1 + spare // total
    order = np.argsort(-(spare % total), kind="stable")
    share[order[: parts - int(share.sum())]] += 1
    return share


def _check_per_client(per_client: int) -> None:
    if per_client < 1:
        raise ConfigError(f"per_client={per_client}: a client gets at least one; write per_client=1 or more")


def _check_parts(counts: np.ndarray, parts: np.ndarray, clients: int, per_client: int) -> None:
    """Raise ConfigError if a class is not dealt or a part is empty."""
    if not parts.all():
        raise ConfigError(
            f"clients={clients} with per_client={per_client} take {clients * per_client} of {len(counts)} classes, so "
            f"some data would not be used; write clients={-(-len(counts) // per_client)} or more"
        )
    worst = int(np.argmax(parts - counts))
    if parts[worst] > counts[worst]:
        raise ConfigError(
            f"clients={clients} with per_client={per_client} divide a class of {counts[worst]} examples into "
            f"{parts[worst]} shards; write fewer clients or a smaller per_client"
        )
