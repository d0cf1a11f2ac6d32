"""Partitions with label skew drawn from a Dirichlet distribution.

    q ~ Dir(alpha, ..., alpha):   q_i = g_i / sum g,   g_i ~ Gamma(alpha)

A small alpha gives each client a few classes; a large one gives all clients the same class distribution.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.partitions.base import Assignment, by_class, check_clients, class_ids, collect, offsets_of
from thinwire.errors import ConfigError

_TRIES = 10_000
_AT_ONCE = 1 << 15  # values drawn together: for small partitions many tries are drawn at once


@register(
    "partition",
    "dirichlet",
    doc="Divide each class by random proportions, redrawn until every client has `min_size` examples.",
    paper="He et al., FedML: a research library and benchmark for federated machine learning, 2020",
)
@dataclass(frozen=True)
class Dirichlet:
    """Divide each class by random proportions, and redraw until every client has `min_size` examples.

        q ~ Dir(alpha 1_N) for each class in turn;   q_i = 0 for a client that has n / N examples or more already

    Both sizes and class distributions differ between clients. All data is used.

    Args:
        alpha: concentration; smaller is more skewed. Common values are 0.1, 0.5 and 1.
        min_size: minimum number of examples of a client. After 10,000 failed draws it becomes 1, with a warning.

    >>> a = Dirichlet(alpha=0.5).assign(np.arange(1000) % 10, 8, Key(0))
    >>> int(a.sizes().sum()), bool(a.sizes().min() >= 10)
    (1000, True)

    Not `dirichlet-flasc`, which draws the class distribution of each client, not the proportions of each class.
    """

    alpha: float = 0.5
    min_size: int = 10

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        if self.min_size < 1:
            raise ConfigError(f"min_size={self.min_size}: a client needs an example; write min_size=1 or more")

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples; users are not used."""
        check_clients(len(labels), clients, self.min_size)
        ids, counts = class_ids(labels)
        sizes = self._sizes(counts, clients, key)  # (classes, clients)
        within = np.cumsum(sizes, axis=1) - sizes
        starts = offsets_of(counts)[:-1, None] + within
        return collect(by_class(ids, key.fold("inside")), starts.T, sizes.T)

    def _sizes(self, counts: np.ndarray, clients: int, key: Key) -> np.ndarray:
        """(classes, clients) numbers of examples: the first draw in which every client has `min_size` examples."""
        batch = max(1, _AT_ONCE // (clients * len(counts)))
        fallback = None  # the first draw in which no client is empty
        for first in range(0, _TRIES, batch):
            tries = min(batch, _TRIES - first)
            sizes = self._draw(counts, clients, tries, key.fold("tries", first))
            least = sizes.sum(axis=1).min(axis=1)
            good = np.flatnonzero(least >= self.min_size)
            if len(good):
                return np.asarray(sizes[good[0]])
            full = np.flatnonzero(least >= 1)
            if fallback is None and len(full):
                fallback = sizes[full[0]]
        given = f"dirichlet with alpha={self.alpha} and clients={clients}"
        if fallback is None:
            raise ConfigError(f"{given}: {_TRIES} draws all left a client empty; write a larger alpha or fewer clients")
        warnings.warn(
            f"{given}: none of {_TRIES} draws gave every client min_size={self.min_size} examples; the smallest has "
            f"{fallback.sum(axis=0).min()}",
            stacklevel=3,
        )
        return np.asarray(fallback)

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
    "dirichlet-flasc",
    doc="Draw the class distribution of each client; clients without examples are left out.",
    paper="Kuo et al., Federated LoRA with sparse communication (FLASC), 2024, public code",
)
@dataclass(frozen=True)
class DirichletFlasc:
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

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Assign the examples; users are not used."""
        check_clients(len(labels), clients)
        ids, counts = class_ids(labels)
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
                f"dirichlet-flasc with clients={clients}: every share of {len(labels)} examples rounds to 0; "
                f"write fewer clients"
            )
        return collect(by_class(ids, None), starts[full], sizes[full])


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


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"alpha={alpha}: it must be finite and above 0; write for example alpha=0.5")
