"""Splits that give each client a few classes only: the data is cut into shards, and shards are dealt like cards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.partitions.base import (
    Assignment,
    by_class,
    check_clients,
    class_numbers,
    collect,
    near_equal,
    offsets_of,
)
from thinwire.errors import ConfigError


@register(
    "partition",
    "shards",
    doc="Sort by class, cut into equal blocks, deal `per_client` random blocks to each client.",
    paper="McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017",
)
@dataclass(frozen=True)
class Shards:
    """Sort by class, cut into equal blocks, and deal some random blocks to each client.

    A block that lies across the border of two classes brings one class more than `per_client`; `strict` cuts inside
    each class instead, which keeps to the number at the price of blocks that are not quite equal.

    Args:
        per_client: blocks a client gets; there are clients * per_client of them.
        strict: cut inside each class, so that a client never has more than `per_client` classes.

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
        """Deal the blocks; users do not matter."""
        check_clients(len(labels), clients, self.per_client)
        number, counts = class_numbers(labels)
        blocks = clients * self.per_client
        if self.strict:
            sizes = _cut(counts, _proportional(counts, blocks))
        else:
            sizes = near_equal(len(labels), blocks)
        dealt = key.fold("shards").permutation(blocks).numpy().reshape(clients, self.per_client)
        return collect(by_class(number, None), offsets_of(sizes)[dealt], sizes[dealt])


@register(
    "partition",
    "class-shards",
    doc="Divide each class into equally many shards, deal `per_client` random shards, `min_classes` classes at least.",
    paper="MAPA (model-agnostic projection adaptation), partition of the experiments",
)
@dataclass(frozen=True)
class ClassShards:
    """Divide each class into equally many shards, deal them at random, and swap until nobody has too few classes.

    Args:
        per_client: shards a client gets.
        shards_per_class: 0 takes clients * per_client / classes, the larger classes one more where that is not whole.
        min_classes: the fewest different classes that a client may have.

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
            raise ConfigError(f"shards_per_class={self.shards_per_class}: write 0 (derived) or a whole number above it")
        if not 1 <= self.min_classes <= self.per_client:
            raise ConfigError(
                f"min_classes={self.min_classes}: {self.per_client} shards a client hold from 1 to {self.per_client} "
                f"classes; write min_classes={self.per_client} or fewer"
            )

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the shards; users do not matter."""
        check_clients(len(labels), clients)
        number, counts = class_numbers(labels)
        classes, need = len(counts), clients * self.per_client
        if self.min_classes > classes:
            raise ConfigError(f"min_classes={self.min_classes}: the data set has {classes}; write {classes} or fewer")
        if self.shards_per_class and self.shards_per_class * classes != need:
            raise ConfigError(
                f"shards_per_class={self.shards_per_class}: {classes} classes give {self.shards_per_class * classes} "
                f"shards, but {clients} clients take {need}; write shards_per_class=0 to derive it"
            )
        shards = np.empty(classes, np.int64)
        shards[np.argsort(-counts, kind="stable")] = near_equal(need, classes)
        _check_cut(counts, shards, clients, self.per_client)
        deck = np.repeat(np.arange(classes), shards)
        hands = deck[key.fold("deal").permutation(need).numpy()].reshape(clients, self.per_client)
        swap_until(hands, self.min_classes)
        return _serve(hands, number, counts, key)


@register(
    "partition",
    "classes",
    doc="Give every client exactly `per_client` different classes; all data is used.",
    paper="MAPO, partition of the experiments",
)
@dataclass(frozen=True)
class Classes:
    """Give every client exactly so many different classes, in equal amounts, and use all data.

    The list of classes is shuffled again and again and dealt on: every class goes to clients * per_client / classes
    clients, give or take one, each of whom gets an equal share of it.

    Args:
        per_client: classes a client has.

    >>> labels = np.arange(60) % 6
    >>> a = Classes(per_client=2).assign(labels, 6, Key(0))
    >>> [len(set(labels[a.client(i)].tolist())) for i in range(6)], a.sizes().tolist()
    ([2, 2, 2, 2, 2, 2], [10, 10, 10, 10, 10, 10])
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        _check_per_client(self.per_client)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the classes; users do not matter."""
        check_clients(len(labels), clients)
        number, counts = class_numbers(labels)
        classes, need = len(counts), clients * self.per_client
        if self.per_client > classes:
            raise ConfigError(f"per_client={self.per_client}: the data set has {classes} classes; write that or fewer")
        lists = -(-need // classes)
        lots = key.fold("deal").words_numpy(lists * classes).reshape(lists, classes)
        hands = np.argsort(lots, axis=1, kind="stable").reshape(-1)[:need].reshape(clients, self.per_client)
        _check_cut(counts, np.bincount(hands.reshape(-1), minlength=classes), clients, self.per_client)
        swap_until(hands, self.per_client)  # a hand that lies across two lists can hold a class twice
        return _serve(hands, number, counts, key)


def swap_until(hands: np.ndarray, least: int) -> None:
    """Exchange cards between hands, in place, until every hand holds `least` different ones.

    Each hand that holds too few walks along the other hands and makes the first exchange that brings the two together
    nearer to `least`. The hands come from a shuffled deck, so the nearest are as random as any. Where all cards are
    in the deck equally often, give or take one, such an exchange always exists: either some hand lacks the card that
    hand i has twice and can give one that i lacks, or one that it has twice itself; or all hands have the former, and
    then some hand has twice what i lacks.

    Args:
        hands: (clients, per_client) card numbers.
        least: at most per_client and at most the number of different cards.
    """
    rows = np.sort(hands, axis=1)
    distinct = 1 + np.count_nonzero(np.diff(rows, axis=1), axis=1)
    for i in np.flatnonzero(distinct < least).tolist():
        while len(set(hands[i].tolist())) < least:
            if not any(_exchange(hands, i, (i + step) % len(hands), least) for step in range(1, len(hands))):
                raise ConfigError(f"{len(hands)} clients cannot have {least} classes each; write a smaller number")


def _exchange(hands: np.ndarray, i: int, j: int, least: int) -> bool:
    """Make one exchange between hands i and j that brings them nearer to `least` different cards, if there is one."""
    mine, theirs = hands[i].tolist(), hands[j].tolist()
    now = _worth(mine, least) + _worth(theirs, least)
    for a, card in enumerate(mine):
        if mine.count(card) < 2:
            continue
        for b, other in enumerate(theirs):
            if other == card:
                continue
            left, right = mine[:a] + [other] + mine[a + 1 :], theirs[:b] + [card] + theirs[b + 1 :]
            if _worth(left, least) + _worth(right, least) > now:
                hands[i], hands[j] = left, right
                return True
    return False


def _worth(hand: list[int], least: int) -> int:
    return min(len(set(hand)), least)


def _serve(hands: np.ndarray, number: np.ndarray, counts: np.ndarray, key: Key) -> Assignment:
    """Divide each class, shuffled, into as many parts as hands hold it, and give each hand its parts."""
    flat = hands.reshape(-1)
    slot = np.argsort(flat, kind="stable")  # the slots of class 0, then those of class 1, ...
    cut = _cut(counts, np.bincount(flat, minlength=len(counts)))
    starts, sizes = np.empty_like(cut), np.empty_like(cut)
    starts[slot], sizes[slot] = offsets_of(cut)[:-1], cut
    return collect(by_class(number, key.fold("inside")), starts.reshape(hands.shape), sizes.reshape(hands.shape))


def _cut(counts: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Sizes of all parts when each class is cut near-equally into its number of parts, class after class."""
    rank = np.arange(parts.sum()) - np.repeat(offsets_of(parts)[:-1], parts)
    return np.asarray(np.repeat(counts // parts, parts) + (rank < np.repeat(counts % parts, parts)))


def _proportional(counts: np.ndarray, parts: int) -> np.ndarray:
    """How many of `parts` blocks each class gets: in proportion to its size, one at least (largest remainders)."""
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


def _check_cut(counts: np.ndarray, parts: np.ndarray, clients: int, per_client: int) -> None:
    """Every class must be dealt, and no part may be empty."""
    if not parts.all():
        raise ConfigError(
            f"clients={clients} with per_client={per_client} take {clients * per_client} of {len(counts)} classes, so "
            f"some data would lie idle; write clients={-(-len(counts) // per_client)} or more"
        )
    worst = int(np.argmax(parts - counts))
    if parts[worst] > counts[worst]:
        raise ConfigError(
            f"clients={clients} with per_client={per_client} cut a class of {counts[worst]} examples into "
            f"{parts[worst]} shards; write fewer clients or a smaller per_client"
        )
