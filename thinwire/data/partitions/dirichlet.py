"""Splits whose unevenness is one number: shares drawn from a Dirichlet distribution.

    q ~ Dir(alpha, ..., alpha):   q_i = g_i / sum g,   g_i ~ Gamma(alpha)

A small alpha gives each client a few classes, a large one gives all clients the same mixture.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.partitions.base import Assignment, by_class, check_clients, class_numbers, collect, offsets_of
from thinwire.errors import ConfigError

_TRIES = 10_000
_AT_ONCE = 1 << 15  # numbers drawn together: small splits examine many tries at a time


@register(
    "partition",
    "dirichlet",
    doc="Deal each class in random shares, redrawn until every client has `min_size` examples.",
    paper="He et al., FedML: a research library and benchmark for federated machine learning, 2020",
)
@dataclass(frozen=True)
class Dirichlet:
    """Deal each class in random shares over the clients, and start again until nobody has too little.

        q ~ Dir(alpha 1_N) for each class in turn;   q_i = 0 for a client that has n / N examples or more already

    Sizes and mixtures both differ between clients; all data is used.

    Args:
        alpha: small is uneven; 0.1, 0.5 and 1 are usual.
        min_size: fewest examples of a client. After 10,000 fruitless draws it becomes 1, with a warning.

    >>> a = Dirichlet(alpha=0.5).assign(np.arange(1000) % 10, 8, Key(0))
    >>> int(a.sizes().sum()), bool(a.sizes().min() >= 10)
    (1000, True)

    Not `dirichlet-flasc`, which draws the mixture of classes of each client, not the shares of each class.
    """

    alpha: float = 0.5
    min_size: int = 10

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)
        if self.min_size < 1:
            raise ConfigError(f"min_size={self.min_size}: a client needs an example; write min_size=1 or more")

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the examples; users do not matter."""
        check_clients(len(labels), clients, self.min_size)
        number, counts = class_numbers(labels)
        sizes = self._sizes(counts, clients, key)  # (classes, clients)
        within = np.cumsum(sizes, axis=1) - sizes
        starts = offsets_of(counts)[:-1, None] + within
        return collect(by_class(number, key.fold("inside")), starts.T, sizes.T)

    def _sizes(self, counts: np.ndarray, clients: int, key: Key) -> np.ndarray:
        """How many examples of each class each client gets: the first draw in which nobody has too few."""
        batch = max(1, _AT_ONCE // (clients * len(counts)))
        second = None  # the first draw in which at least nobody is empty
        for first in range(0, _TRIES, batch):
            tries = min(batch, _TRIES - first)
            sizes = self._draw(counts, clients, tries, key.fold("tries", first))
            least = sizes.sum(axis=1).min(axis=1)
            good = np.flatnonzero(least >= self.min_size)
            if len(good):
                return np.asarray(sizes[good[0]])
            full = np.flatnonzero(least >= 1)
            if second is None and len(full):
                second = sizes[full[0]]
        given = f"dirichlet with alpha={self.alpha} and clients={clients}"
        if second is None:
            raise ConfigError(f"{given}: {_TRIES} draws all left a client empty; write a larger alpha or fewer clients")
        warnings.warn(
            f"{given}: none of {_TRIES} draws gave every client min_size={self.min_size} examples; the smallest has "
            f"{second.sum(axis=0).min()}",
            stacklevel=3,
        )
        return np.asarray(second)

    def _draw(self, counts: np.ndarray, clients: int, tries: int, key: Key) -> np.ndarray:
        """(tries, classes, clients) sizes; a class at a time, because the cap looks at what was dealt before."""
        logs = log_gamma_draws(key, self.alpha, (tries, len(counts), clients))
        sizes = np.empty(logs.shape, np.int64)
        held = np.zeros((tries, clients), np.int64)
        for k, count in enumerate(counts.tolist()):
            share = _softmax(np.where(held < counts.sum() / clients, logs[:, k], -np.inf), axis=1)
            reach = np.cumsum(share, axis=1)
            cuts = np.floor(reach / reach[:, -1:] * count).astype(np.int64)  # ends at count, whatever was rounded
            sizes[:, k] = np.diff(cuts, axis=1, prepend=0)
            held += sizes[:, k]
        return sizes


@register(
    "partition",
    "dirichlet-flasc",
    doc="Draw each client's mixture of classes; clients that end up empty are left out.",
    paper="Kuo et al., Federated LoRA with sparse communication (FLASC), 2024, public code",
)
@dataclass(frozen=True)
class DirichletFlasc:
    """Draw each client's mixture of classes, scale the mixtures so that every class is spent, and round.

        V_i ~ Dir(alpha 1_C) for each client;   V <- V / (column sums);   client i gets round(V_ic n_c) of class c

    The examples of a class are handed out in file order, clients in order. Rounding leaves some examples with nobody,
    and some clients with nothing: these are dropped, so the assignment can have fewer clients than were asked for.

    Args:
        alpha: small is uneven; 0.1 (pictures) and 0.01 (text) are the paper's.

    >>> labels = np.arange(1000) % 10
    >>> a = DirichletFlasc(alpha=0.01).assign(labels, 200, Key(0))
    >>> len(a) < 200, bool(a.sizes().min() > 0)
    (True, True)
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def assign(self, labels: np.ndarray, clients: int, key: Key, users: np.ndarray | None = None) -> Assignment:
        """Deal the examples; users do not matter."""
        check_clients(len(labels), clients)
        number, counts = class_numbers(labels)
        logs = log_gamma_draws(key.fold("mixtures"), self.alpha, (clients, len(counts)))
        logs -= logs.max(axis=1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))  # rows are now logarithms of mixtures
        wanted = np.rint(_softmax(logs, axis=0) * counts).astype(np.int64)
        cuts = np.minimum(np.cumsum(wanted, axis=0), counts)  # rounding up can exhaust a class before the last client
        sizes = np.diff(cuts, axis=0, prepend=0)
        starts = offsets_of(counts)[:-1] + cuts - sizes
        full = sizes.any(axis=1)
        if not full.any():
            raise ConfigError(
                f"dirichlet-flasc with clients={clients}: every share of {len(labels)} examples rounds to nothing; "
                f"write fewer clients"
            )
        return collect(by_class(number, None), starts[full], sizes[full])


def log_gamma_draws(key: Key, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of Gamma(alpha) numbers (Marsaglia and Tsang, 2000), float64.

        v = (1 + x / sqrt(9 d))**3,  d = alpha - 1/3,  x normal:   d v is kept if  log u < x**2 / 2 + d - d v + d log v

    For alpha < 1, Gamma(alpha) = Gamma(alpha + 1) u**(1 / alpha); as a logarithm it cannot underflow, however small
    alpha is. The integers behind it are the same everywhere, but log, sqrt and cos may differ in the last bit between
    machines: an example at the very edge of a share may then change hands.
    """
    n = math.prod(shape)
    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    out = np.empty(n)
    todo, turn = np.arange(n), 0
    while len(todo):
        u1, u2, u3 = _uniform(key.fold("normal", turn), 3 * len(todo)).reshape(3, -1)
        x = np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * u2)
        root = np.maximum(1 + x / math.sqrt(9 * d), 1e-100)  # where it is not positive, the number is refused below
        v = root**3
        kept = (root > 1e-100) & (np.log(u3) < x * x / 2 + d - d * v + 3 * d * np.log(root))
        out[todo[kept]] = np.log(d * v[kept])
        todo, turn = todo[~kept], turn + 1
    if alpha < 1:
        out += np.log(_uniform(key.fold("power"), n)) / alpha
    return np.maximum(out, -1e300).reshape(shape)


def _uniform(key: Key, n: int) -> np.ndarray:
    """n float64 numbers inside (0, 1), of 53 random bits each."""
    words = key.words_numpy(2 * n).astype(np.uint64).reshape(n, 2)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def _softmax(logs: np.ndarray, axis: int) -> np.ndarray:
    """Shares in proportion to exp(logs)."""
    weights = np.exp(logs - logs.max(axis=axis, keepdims=True))
    return np.asarray(weights / weights.sum(axis=axis, keepdims=True))


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ConfigError(f"alpha={alpha}: a Dirichlet split needs a finite number above 0; write alpha=0.5, say")
