"""Privacy accounting for discrete Gaussian noise: the epsilon of many rounds, by Rényi divergences.

A mechanism is *c-concentrated* if one client changes the distribution of the released value by no more than

    D_a(P | Q) <= a c^2 / 2     for all orders a > 1

A vector of integers of sensitivity s (one client changes it by a 2-norm of at most s), plus a discrete Gaussian of
parameter V on each entry, is c-concentrated with c = s / sqrt(V), as with continuous noise (Canonne, Kamath, Steinke,
NeurIPS 2020, theorem 14). A sum of n discrete Gaussians is almost a discrete Gaussian: `gap` bounds the growth of c.

If each client participates in a round independently with probability q (Poisson sampling), then for integer orders a

    exp((a - 1) D_a) <= sum_k binom(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) c^2 / 2)      a = 2, 3, ...
    exp((a - 1) D_a) <= 1 - q + q exp(a (a - 1) c^2 / 2)                                  1 < a < 2

The first is the bound of Mironov, Talwar and Zhang (2019), whose proof is for continuous noise. For integer orders it
only needs the bound above on D_k, k <= a (expand the power of 1 - q + q P/Q), and symmetric noise, so that a reflection
exchanges P and Q and the reverse divergence is no larger (their theorem 5). Both hold for discrete Gaussians and for
sums of them. Non-integer orders use the second, which follows from the convexity of x^a. The divergences of the rounds
add up, and the best order gives epsilon:

    epsilon = min_a  rounds D_a + log(1 - 1/a) - log(delta a) / (a - 1)

(Canonne et al., proposition 12). It is an upper bound: for epsilon from 1 to 10, about 15 % above the value that
privacy loss distributions give for continuous noise.

>>> round(epsilon(1 / 1.1, 0.01, 1000, 1e-5), 3)
1.725
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_INTEGER = (*range(2, 65), *range(72, 129, 8), *range(160, 513, 32), 1024)
_BELOW_TWO = tuple(1 + i / 20 for i in range(1, 20))


def epsilon(c: float, rate: float, rounds: int, delta: float) -> float:
    """The epsilon of many rounds of a c-concentrated mechanism.

    Args:
        c: the influence of one client on the released value, in standard deviations of the noise.
        rate: the probability that a client participates in a round.
        rounds: the number of rounds.
        delta: the delta of (epsilon, delta)-differential privacy.
    """
    losses = zip((*_BELOW_TWO, *_INTEGER), _losses(c, rate), strict=True)
    best: float = min(rounds * loss + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, loss in losses)
    return max(0.0, best)


@lru_cache(maxsize=16)
def _losses(c: float, rate: float) -> tuple[float, ...]:
    """D_a of one round for all orders."""
    return (*(renyi_fractional(a, c, rate) for a in _BELOW_TWO), *(renyi(a, c, rate) for a in _INTEGER))


def renyi_fractional(order: float, c: float, rate: float) -> float:
    """Upper bound on the Rényi divergence of one round, for any order above 1."""
    loss = order * (order - 1) * c * c / 2
    return float(np.logaddexp(math.log(rate) + loss + math.log(-math.expm1(-loss)), 0.0)) / (order - 1)


def renyi(order: int, c: float, rate: float) -> float:
    """Upper bound on the Rényi divergence of one round, for an integer order of at least 2.

    The terms k = 0 and k = 1 have no loss, so the sum is 1 plus the excess of all other terms, which keeps small values
    accurate.
    """
    if rate >= 1:
        return order * c * c / 2
    k = np.arange(2, order + 1, dtype=np.float64)
    steps = np.log((order - np.arange(order)) / np.arange(1, order + 1))
    chosen = np.cumsum(steps)[1:] + k * math.log(rate) + (order - k) * math.log1p(-rate)
    loss = k * (k - 1) * (c * c / 2)
    terms = chosen + loss + np.log(-np.expm1(-loss))
    return float(np.logaddexp(0.0, np.logaddexp.reduce(terms))) / (order - 1)


def gap(clients: int, variance: int, size: int) -> float:
    """The growth of c if the noise is a sum of discrete Gaussians, one per client, instead of a single one.

        10 sum_(k < clients) exp(-2 pi^2 V k / (k + 1)) sqrt(size)

    Args:
        clients: the number of clients that add noise.
        variance: V of the noise of one client; 1 or more.
        size: the number of values that are released.

    Kairouz, Liu, Steinke, ICML 2021, proposition 14; each term is bounded by the first.

    >>> gap(100, 64, 10**9) < 1e-200
    True
    """
    return 10 * (clients - 1) * math.exp(-(math.pi**2) * variance) * math.sqrt(size)
