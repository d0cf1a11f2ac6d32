"""What discrete Gaussian noise promises: the epsilon of many rounds, by Rényi divergences of whole orders.

A mechanism is *c-concentrated* if one client moves the distribution of what is released by no more than

    D_a(P | Q) <= a c^2 / 2     for all orders a > 1

A vector of whole numbers that one client moves by the length s, with a discrete Gaussian of parameter V added to each
number, is so with c = s / sqrt(V), as with a continuous one (Canonne, Kamath, Steinke, NeurIPS 2020, theorem 14). A sum
of n of them is nearly one: `gap` says by how much c grows.

If each client takes part in a round with probability q by itself, then for whole orders a

    exp((a - 1) D_a) <= sum_k binom(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) c^2 / 2)      a = 2, 3, ...
    exp((a - 1) D_a) <= 1 - q + q exp(a (a - 1) c^2 / 2)                                  1 < a < 2

The first is the bound of Mironov, Talwar and Zhang (2019), whose proof is for continuous noise. For whole orders it
needs no more than the bound above on D_k, k <= a (expand the power of 1 - q + q P/Q), and that the noise is symmetric,
so that a reflection exchanges P and Q and the other direction is no worse (their theorem 5): both hold for the discrete
Gaussian, and for sums of them. Orders between need more, so they go by the second, which is the convexity of x^a.
Rounds add up, and of all orders the best counts:

    epsilon = min_a  rounds D_a + log(1 - 1/a) - log(delta a) / (a - 1)

(Canonne et al., proposition 12). It is an upper bound: where epsilon is about 1 to 10, some 15 per cent above what
privacy loss distributions give for continuous noise.

>>> round(epsilon(1 / 1.1, 0.01, 1000, 1e-5), 3)
1.725
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_WHOLE = (*range(2, 65), *range(72, 129, 8), *range(160, 513, 32), 1024)
_BETWEEN = tuple(1 + i / 20 for i in range(1, 20))


def epsilon(c: float, share: float, rounds: int, delta: float) -> float:
    """The epsilon of many rounds of a c-concentrated mechanism.

    Args:
        c: how much one client moves what is released, in standard deviations of the noise.
        share: the probability with which a client takes part in a round.
        rounds: how many.
        delta: the probability with which epsilon may fail.
    """
    losses = zip((*_BETWEEN, *_WHOLE), _losses(c, share), strict=True)
    best: float = min(rounds * loss + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, loss in losses)
    return max(0.0, best)


@lru_cache(maxsize=16)
def _losses(c: float, share: float) -> tuple[float, ...]:
    """D_a of one round for each order."""
    return (*(renyi_between(a, c, share) for a in _BETWEEN), *(renyi(a, c, share) for a in _WHOLE))


def renyi_between(order: float, c: float, share: float) -> float:
    """The bound on the Rényi divergence of one round, of any order above 1."""
    loss = order * (order - 1) * c * c / 2
    return float(np.logaddexp(math.log(share) + loss + math.log(-math.expm1(-loss)), 0.0)) / (order - 1)


def renyi(order: int, c: float, share: float) -> float:
    """The bound on the Rényi divergence of one round, of a whole order from 2 on.

    As the probabilities of all k add up to 1, and k = 0 and k = 1 bring no loss, the sum is 1 and what the others bring
    on top: little numbers stay exact.
    """
    if share >= 1:
        return order * c * c / 2
    k = np.arange(2, order + 1, dtype=np.float64)
    steps = np.log((order - np.arange(order)) / np.arange(1, order + 1))
    chosen = np.cumsum(steps)[1:] + k * math.log(share) + (order - k) * math.log1p(-share)
    loss = k * (k - 1) * (c * c / 2)
    terms = chosen + loss + np.log(-np.expm1(-loss))
    return float(np.logaddexp(0.0, np.logaddexp.reduce(terms))) / (order - 1)


def gap(clients: int, variance: int, size: int) -> float:
    """How much larger c is if the noise is a sum of discrete Gaussians, one of each client, and not one of them.

        10 sum_(k < clients) exp(-2 pi^2 V k / (k + 1)) sqrt(size)

    Args:
        clients: how many add noise.
        variance: V of each client's; 1 or more.
        size: how many numbers are released.

    Kairouz, Liu, Steinke, ICML 2021, proposition 14; every term is bounded by the first.

    >>> gap(100, 64, 10**9) < 1e-200
    True
    """
    return 10 * (clients - 1) * math.exp(-(math.pi**2) * variance) * math.sqrt(size)
