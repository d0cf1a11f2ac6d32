"""Partitions: rules that assign the examples of a dataset to clients, and the rows that are held out for testing.

A partition is a frozen dataclass with one pure method, `assign`; the same key gives the same assignment. The result, an
`Assignment`, stores all clients in two arrays: a million clients take sixteen megabytes.

    iid, natural, auto             near-equal random parts; one client per user; `natural` where there are users
    shards, class-shards, classes  each client gets a few classes: the data is cut into shards, dealt at random
    quantity                       size skew: equal class distributions, sizes drawn from a Dirichlet distribution
    feature                        feature skew: equal sizes and class distributions, other inputs of each class
    quantity, feature              size skew alone; feature skew alone: other inputs of each class
    dirichlet, dirichlet-flasc     label skew drawn from a Dirichlet distribution: a small alpha gives each client a few
                                   classes, a large one all clients the same class distribution

>>> a = Assignment(np.array([4, 0, 2, 1, 3]), np.array([0, 2, 5]))
>>> len(a), a.client(1).tolist(), a.sizes().tolist()
(2, [2, 1, 3], [2, 3])
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.core.text import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, check_settings
from thinwire.errors import ConfigError, DataError

Ranges = tuple[np.ndarray, np.ndarray]  # (clients, ranges) starts and sizes


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
            inputs: a partition with this parameter also gets a function of indices that returns their inputs, (k, ...).
        """
        ...


def check_clients(examples: int, clients: int, each: int = 1) -> None:
    """Raise ConfigError if the examples are fewer than `each` per client."""
    most = examples // each
    if not 1 <= clients <= most:
        raise ConfigError(f"clients={clients}: {examples} examples, {each} or more each, are for 1 to {most} clients")


def near_equal(totals: Any, parts: Any) -> np.ndarray:
    """Sizes when each total is divided into its number of parts, which differ by at most one, the larger first.

    >>> near_equal(7, 3).tolist(), near_equal([7, 3], [3, 2]).tolist()
    ([3, 2, 2], [3, 2, 2, 2, 1])
    """
    totals, parts = np.atleast_1d(totals).astype(np.int64), np.atleast_1d(parts)
    rank = np.arange(parts.sum()) - np.repeat(offsets_of(parts)[:-1], parts)
    return np.asarray(np.repeat(totals // parts, parts) + (rank < np.repeat(totals % parts, parts)))


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """The offsets of consecutive parts of these sizes, and the end of the last one."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))


class ClassPartition:
    """A partition by class: `deal` decides which of the examples of each class a client gets."""

    shuffled = True  # whether the examples of a class are dealt in random order, not in file order

    def __post_init__(self) -> None:
        check_settings(self)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples by class; users are not used."""
        check_clients(len(labels), clients)
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ConfigError(
                f"labels of type {labels.dtype} and shape {labels.shape}: partitions by class need one class label per "
                "example; write task.partition = 'iid' or 'natural'"
            )
        _, ids, counts = np.unique(labels, return_inverse=True, return_counts=True)
        starts, sizes = self.deal(counts, clients, key)
        order = key.fold("inside").permutation(len(ids)).numpy() if self.shuffled else np.arange(len(ids))
        pool = order[np.argsort(ids[order], kind="stable")]
        begins = offsets_of(sizes.reshape(-1))
        positions = np.arange(begins[-1]) + np.repeat(starts.reshape(-1) - begins[:-1], sizes.reshape(-1))
        return Assignment(pool[positions], offsets_of(sizes.sum(axis=1)))

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """The ranges of examples of each client, in the order of classes.

        Args:
            counts: (classes,) number of examples of each class.
            clients: number of clients.
            key: the only source of randomness.

        Returns:
            (clients, ranges) the first example and the size of each range.
        """
        raise NotImplementedError


_SCORED_ROWS = 1 << 12  # examples whose inputs are read together
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
        if not 1 <= clients <= known:
            raise ConfigError(f"clients={clients}: the dataset has {known} users; write clients={known} or fewer")
        largest = np.argsort(-counts, kind="stable")
        offsets = offsets_of(counts[largest[:clients]])
        return Assignment(np.argsort(np.argsort(largest)[users], kind="stable")[: offsets[-1]], offsets)


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


_MAX_DRAWS = 10_000
_DRAWN_VALUES = 1 << 15  # values drawn together: for small partitions many tries are drawn at once


@register(
    "partition",
    "dirichlet",
    doc="Divide each class by random proportions, redrawn until every client has `min_size` examples.",
    paper="He et al., FedML: a research library and benchmark for federated machine learning, 2020",
)
@dataclass(frozen=True)
class Dirichlet(ClassPartition):
    """Divide each class by random proportions, and redraw until every client has `min_size` examples.

        q ~ Dir(alpha 1_N) for each class in turn;   q_i = 0 for a client that has n / N examples or more already

    Both sizes and class distributions differ between clients. All data is used.

    Args:
        alpha: concentration; smaller is more skewed. Common values are 0.1, 0.5 and 1.
        min_size: minimum number of examples of a client; 10,000 failed draws are an error.

    >>> a = Dirichlet(alpha=0.5).assign(np.arange(1000) % 10, 8, Key(0))
    >>> int(a.sizes().sum()), bool(a.sizes().min() >= 10)
    (1000, True)

    Not `dirichlet-flasc`, which draws the class distribution of each client, not the proportions of each class.
    """

    alpha: PositiveFloat = 0.5
    min_size: PositiveInt = 10

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """Divide each class by random proportions."""
        check_clients(int(counts.sum()), clients, self.min_size)
        sizes = self._sizes(counts, clients, key)  # (classes, clients)
        starts = offsets_of(counts)[:-1, None] + np.cumsum(sizes, axis=1) - sizes
        return starts.T, sizes.T

    def _sizes(self, counts: np.ndarray, clients: int, key: Key) -> np.ndarray:
        """(classes, clients) numbers of examples: the first draw in which every client has `min_size` examples."""
        batch = max(1, _DRAWN_VALUES // (clients * len(counts)))
        largest = 0
        for first in range(0, _MAX_DRAWS, batch):
            sizes = self._draw(counts, clients, min(batch, _MAX_DRAWS - first), key.fold("tries", first))
            least = sizes.sum(axis=1).min(axis=1)
            good = np.flatnonzero(least >= self.min_size)
            if len(good):
                return np.asarray(sizes[good[0]])
            largest = max(largest, int(least.max()))
        hint = f"min_size={largest}" if largest else "a larger alpha or fewer clients"
        raise ConfigError(
            f"{type(self).__name__.lower()} with alpha={self.alpha} and clients={clients}: none of {_MAX_DRAWS} draws "
            f"gave every client min_size={self.min_size} examples; write {hint}"
        )

    def _draw(self, counts: np.ndarray, clients: int, tries: int, key: Key) -> np.ndarray:
        """(tries, classes, clients) sizes; one class at a time, because the cap depends on the classes before."""
        logs = log_gamma_draws(key, self.alpha, (tries, len(counts), clients))
        sizes = np.empty(logs.shape, np.int64)
        held = np.zeros((tries, clients), np.int64)
        for k, count in enumerate(counts.tolist()):
            share = _softmax(np.where(held < counts.sum() / clients, logs[:, k], -np.inf), axis=1)
            upto = np.cumsum(share, axis=1)
            cuts = np.floor(upto / upto[:, -1:] * count).astype(np.int64)  # the last is exactly count
            sizes[:, k] = np.diff(cuts, axis=1, prepend=0)
            held += sizes[:, k]
        return sizes


@register(
    "partition",
    "quantity",
    doc="Size skew alone: sizes from a Dirichlet distribution, redrawn until every client has `min_size` examples.",
    paper="Li et al., Federated learning on non-IID data silos: an experimental study, ICDE 2022",
)
@dataclass(frozen=True)
class Quantity(Dirichlet):
    """Sizes from a Dirichlet distribution, examples at random: all clients have the same class distribution.

        q ~ Dir(alpha 1_N);   client i gets q_i n examples

    Args:
        alpha: concentration; smaller is more skewed.
        min_size: as in `dirichlet`.

    >>> Quantity(alpha=0.5).assign(np.zeros(1000, int), 5, Key(0)).sizes().tolist()
    [484, 10, 159, 6, 341]
    """

    min_size: PositiveInt = 1

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples as if all had one class."""
        return super().assign(np.zeros(len(labels), int), clients, key)


@register(
    "partition",
    "feature",
    doc="Feature skew alone: equal sizes and class distributions, other inputs of each class.",
    paper="Li et al., Federated learning on non-IID data silos: an experimental study, ICDE 2022",
)
@dataclass(frozen=True)
class Feature(ClassPartition):
    """Sort each class along a random direction of the inputs; client i gets the i-th part of every class.

        score of x = <x, x_a - x_b> for two random examples a and b

    Clients differ in p(x | y) and not in p(y), as on the synthetic set of Li et al. Inputs are rounded to multiples of
    2**-10, so that scores are sums of integers: exact on every machine, in any order.

    Args:
        noise: 0 for the largest skew; otherwise the position of an example in its class, from 0 to 1, is changed by a
            random number up to this.

    >>> x, labels = np.array([[5.0], [1.0], [3.0], [9.0], [2.0], [8.0]]), np.array([0, 0, 0, 1, 1, 1])
    >>> a = Feature().assign(labels, 3, Key(1), inputs=lambda at: x[at])
    >>> [x[a.client(i), 0].tolist() for i in range(3)]
    [[1.0, 2.0], [3.0, 8.0], [5.0, 9.0]]
    """

    noise: NonNegativeFloat = 0.0

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: Any = None, inputs: Any = None) -> Assignment:
        """Assign the examples by class and inputs; by inputs alone if labels are no classes.

        Args:
            labels: as in `Partition`.
            clients: as in `Partition`.
            key: as in `Partition`.
            users: not used.
            inputs: a function of (k,) indices that returns the inputs of these examples, (k, values) float64.
        """
        check_clients(n := len(labels), clients)
        first, last = inputs(key.fold("direction").permutation(n).numpy()[[0, -1]])
        direction = np.rint(1024 * first) - np.rint(1024 * last)
        parts = np.array_split(np.arange(n), 1 + n // _SCORED_ROWS)
        scores = np.concatenate([np.rint(1024 * inputs(part)) @ direction for part in parts])
        _, ids, counts = np.unique(labels if labels.dtype.kind in "iu" else 0 * labels, False, True, True)
        by_class = np.lexsort((scores, ids))
        own = ids[by_class]
        position = (np.arange(n) - offsets_of(counts)[own] + 0.5) / counts[own]
        position += self.noise * _uniform(key.fold("noise"), n)
        return Assignment(by_class[np.argsort(position, kind="stable")], offsets_of(near_equal(n, clients)))


@register(
    "partition",
    "dirichlet-flasc",
    doc="Draw the class distribution of each client; clients without examples are left out.",
    paper="Kuo et al., Federated LoRA with sparse communication (FLASC), 2024, public code",
)
@dataclass(frozen=True)
class DirichletFlasc(ClassPartition):
    """Draw the class distribution of each client, scale so that every class is used up, and round.

        V_i ~ Dir(alpha 1_C) for each client;   V <- V / (column sums);   client i gets round(V_ic n_c) of class c

    The examples of a class are assigned in file order, clients in order. By rounding some examples have no client and
    some clients no examples. These are dropped, so the assignment can have fewer clients than requested.

    Args:
        alpha: concentration; smaller is more skewed. The paper uses 0.1 (images) and 0.01 (text).

    >>> labels = np.arange(1000) % 10
    >>> a = DirichletFlasc(alpha=0.01).assign(labels, 200, Key(0))
    >>> len(a) < 200, bool(a.sizes().min() > 0)
    (True, True)
    """

    alpha: PositiveFloat = 0.1
    shuffled = False

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """Draw the class distribution of each client."""
        logs = log_gamma_draws(key.fold("mixtures"), self.alpha, (clients, len(counts)))
        logs -= logs.max(axis=1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))  # rows are now logarithms of class distributions
        wanted = np.rint(_softmax(logs, axis=0) * counts).astype(np.int64)
        cuts = np.minimum(np.cumsum(wanted, axis=0), counts)  # rounding up can use up a class before the last client
        sizes = np.diff(cuts, axis=0, prepend=0)
        starts = offsets_of(counts)[:-1] + cuts - sizes
        full = sizes.any(axis=1)
        if not full.any():
            raise ConfigError(
                f"dirichlet-flasc with clients={clients}: every share of {counts.sum()} examples rounds to 0; "
                f"write fewer clients"
            )
        return starts[full], sizes[full]


def log_gamma_draws(key: Key, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(alpha) samples (Marsaglia and Tsang, 2000), float64.

        v = (1 + x / sqrt(9 d))**3,  d = alpha - 1/3,  x normal:   d v is kept if  log u < x**2 / 2 + d - d v + d log v

    For alpha < 1, Gamma(alpha) = Gamma(alpha + 1) u**(1 / alpha); as a logarithm it does not underflow for any
    alpha. The random bits are the same on all machines, but log, sqrt and cos may differ in the last bit: an example at
    the boundary of two clients may then go to the other one.
    """
    n = math.prod(shape)
    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    out = np.empty(n)
    todo, turn = np.arange(n), 0
    while len(todo):
        u1, u2, u3 = _uniform(key.fold("normal", turn), 3 * len(todo)).reshape(3, -1)
        x = np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2)
        root = np.maximum(1 + x / math.sqrt(9 * d), 1e-100)  # a sample that is not positive is rejected below
        v = root**3
        kept = (root > 1e-100) & (np.log(u3) < x * x / 2 + d - d * v + 3 * d * np.log(root))
        out[todo[kept]] = np.log(d * v[kept])
        todo, turn = todo[~kept], turn + 1
    if alpha < 1:
        out += np.log(_uniform(key.fold("power"), n)) / alpha
    return np.maximum(out, -1e300).reshape(shape)


def _uniform(key: Key, n: int) -> np.ndarray:
    """n float64 samples in (0, 1), of 53 random bits each."""
    words = key.words_numpy(2 * n).astype(np.uint64).reshape(n, 2)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def _softmax(logs: np.ndarray, axis: int) -> np.ndarray:
    """exp(logs), normalized to a sum of 1 along the axis."""
    weights = np.exp(logs - logs.max(axis=axis, keepdims=True))
    return np.asarray(weights / weights.sum(axis=axis, keepdims=True))


@register(
    "partition",
    "shards",
    doc="Sort by class, divide into equal blocks, deal `per_client` random blocks to each client.",
    paper="McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017",
)
@dataclass(frozen=True)
class Shards(ClassPartition):
    """Sort by class, divide into equal blocks, and deal `per_client` random blocks to each client.

    A block that spans two classes gives a client one class more than `per_client`.

    Args:
        per_client: blocks per client; there are clients * per_client of them.

    >>> labels = np.arange(12) % 3
    >>> a = Shards(per_client=1).assign(labels, 3, Key(0))
    >>> [set(labels[a.client(i)].tolist()) for i in range(3)]
    [{0}, {2}, {1}]
    """

    per_client: PositiveInt = 2
    shuffled = False

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """Deal the blocks."""
        check_clients(int(counts.sum()), clients, self.per_client)
        blocks = clients * self.per_client
        sizes = near_equal(counts.sum(), blocks)
        dealt = key.fold("shards").permutation(blocks).numpy().reshape(clients, self.per_client)
        return offsets_of(sizes)[dealt], sizes[dealt]


@register(
    "partition",
    "class-shards",
    doc="Divide each class into equally many shards, deal `per_client` random shards, at least `min_classes` classes.",
    paper="MAPA (model-agnostic projection adaptation), partition of the experiments",
)
@dataclass(frozen=True)
class ClassShards(ClassPartition):
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

    per_client: PositiveInt = 5
    shards_per_class: NonNegativeInt = 0
    min_classes: PositiveInt = 2

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """Deal the shards."""
        classes, need = len(counts), clients * self.per_client
        if self.min_classes > (most := min(classes, self.per_client)):
            raise ConfigError(f"min_classes={self.min_classes}: a client can have {most}; write {most} or fewer")
        if self.shards_per_class and self.shards_per_class * classes != need:
            raise ConfigError(
                f"shards_per_class={self.shards_per_class}: {classes} classes give {self.shards_per_class * classes} "
                f"shards, but {clients} clients take {need}; write shards_per_class=0 to derive it"
            )
        shards = np.empty(classes, np.int64)
        shards[np.argsort(-counts, kind="stable")] = near_equal(need, classes)
        deck = np.repeat(np.arange(classes), shards)
        hands = deck[key.fold("deal").permutation(need).numpy()].reshape(clients, self.per_client)
        return _ranges(hands, counts, self.min_classes)


@register(
    "partition",
    "classes",
    doc="Give every client exactly `per_client` different classes; all data is used.",
    paper="MAPO, partition of the experiments",
)
@dataclass(frozen=True)
class Classes(ClassPartition):
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

    per_client: PositiveInt = 2

    def deal(self, counts: np.ndarray, clients: int, key: Key) -> Ranges:
        """Deal the classes."""
        classes, need = len(counts), clients * self.per_client
        if self.per_client > classes:
            raise ConfigError(f"per_client={self.per_client}: the dataset has {classes} classes; write that or fewer")
        lists = -(-need // classes)
        lots = key.fold("deal").words_numpy(lists * classes).reshape(lists, classes)
        hands = np.argsort(lots, axis=1, kind="stable").reshape(-1)[:need].reshape(clients, self.per_client)
        return _ranges(hands, counts, self.per_client)  # a hand dealt from two lists can have a class twice


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
    pair = first, second = hands[i].tolist(), hands[j].tolist()
    before = sum(min(len(set(hand)), least) for hand in pair)
    for a, b in itertools.product(range(len(first)), range(len(second))):
        given, taken = first[a], second[b]
        if first.count(given) > 1 and taken != given:
            first[a], second[b] = taken, given
            if sum(min(len(set(hand)), least) for hand in pair) > before:
                hands[i], hands[j] = pair
                return True
            first[a], second[b] = given, taken
    return False


def _ranges(hands: np.ndarray, counts: np.ndarray, least: int) -> Ranges:
    """Swap until every client has `least` classes; divide each class into as many parts as it was dealt.

    Args:
        hands: (clients, per_client) the classes of each client; changed in place.
        counts: (classes,) number of examples of each class.
        least: the least number of different classes of a client.
    """
    (clients, per_client), parts = hands.shape, np.bincount(hands.reshape(-1), minlength=len(counts))
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
    swap_until(hands, least)
    slot = np.argsort(hands.reshape(-1), kind="stable")  # the slots of class 0, then those of class 1, ...
    cut = near_equal(counts, parts)
    starts, sizes = np.empty_like(cut), np.empty_like(cut)
    starts[slot], sizes[slot] = offsets_of(cut)[:-1], cut
    return starts.reshape(hands.shape), sizes.reshape(hands.shape)


def held_out_rows(rows: int, fraction: float, users: Any = None, labels: Any = None) -> np.ndarray:
    """(rows,) bool: a test set, a fraction of every client and every class, the same for all seeds of a run.

        rows in order of client, then class, then at random;  row i is a test row if floor((i + 1) f) > floor(i f)

    Every client keeps a training row.

    Args:
        rows: number of rows.
        fraction: of the rows, more than 0 and less than 1.
        users: (rows,) the client of each row, numbers or texts; or None.
        labels: (rows,) the class of each row, or None.

    >>> users = np.repeat([0, 1], 10)
    >>> np.bincount(users[held_out_rows(20, 0.2, users=users)]).tolist()
    [2, 2]
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"task.test_fraction must be between 0 and 1, not {fraction}; write 0.2, or name a test file")
    order, test = Key(0).fold("test rows").permutation(rows).numpy(), np.zeros(rows, bool)
    labels, users = ([0] * rows if column is None else column for column in (labels, users))
    groups = [
        np.unique(one if isinstance(one, np.ndarray) else np.array(one, object), return_inverse=True)[1]
        for one in (labels, users)
    ]
    order = order[np.lexsort([group[order] for group in groups])]  # by client, then class
    steps = np.floor(np.arange(rows + 1) * fraction + 1e-9)
    test[order[np.diff(steps) > 0]] = True
    # a client of which all rows are test rows gets one back
    first = np.unique(groups[1], return_index=True)[1]
    test[first[np.bincount(groups[1], weights=~test) == 0]] = False
    if not test.any() or test.all():
        raise DataError(f"{rows} rows are too few for training and testing with task.test_fraction = {fraction}")
    return test
