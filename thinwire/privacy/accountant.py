"""Privacy accounting for discrete Gaussian noise: the epsilon of many rounds, by Rényi divergences.

A mechanism is *c-concentrated* if one client changes the distribution of the released value by no more than

    D_a(P | Q) <= a c^2 / 2     for all orders a > 1

A vector of integers of sensitivity s (one client changes it by a 2-norm of at most s), plus a discrete Gaussian of
parameter V on each entry, is c-concentrated with c = s / sqrt(V), as with continuous noise (Canonne, Kamath, Steinke,
NeurIPS 2020, theorem 14). A sum of n discrete Gaussians is almost a discrete Gaussian: `gap` bounds the growth of c.

*Neighbors* are two runs in which one client has other data: everything that it sends is replaced (replace-one). The
number of clients is public. A clipped update is replaced by another one, so that s is twice the clipping norm.

Cohorts have a fixed size and are drawn without replacement: m of n clients in each round, q = m / n. For a = 2, 3, ...

    exp((a - 1) D_a) <= 1 + binom(a, 2) q^2 min(4 (exp(c^2) - 1), 2 exp(c^2))
                          + sum_(k = 3..a) 2 binom(a, k) q^k exp(k (k - 1) c^2 / 2)

(Wang, Balle, Kasiviswanathan, AISTATS 2019, theorem 9, which needs the bound above on D_k alone, and so holds for
discrete Gaussians, and for sums of them.) D_a grows with a, so that the bound of the next integer holds for the orders
between. The divergences of the rounds add up, and the best order gives epsilon:

    epsilon = min_a  rounds D_a + log(1 - 1/a) - log(delta a) / (a - 1)

(Canonne et al., proposition 12). It is an upper bound, and no smaller than that of dp-accounting, whose theorem for
continuous noise is sharper for small q.

>>> round(epsilon(2 / 1.1, 0.01, 1000, 1e-5), 2)
15.57
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
        rate: the share of the clients in the cohort of a round.
        rounds: the number of rounds.
        delta: the delta of (epsilon, delta)-differential privacy.
    """
    losses = zip((*_BELOW_TWO, *_INTEGER), _losses(c, rate), strict=True)
    best: float = min(rounds * loss + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, loss in losses)
    return max(0.0, best)


@lru_cache(maxsize=16)
def _losses(c: float, rate: float) -> tuple[float, ...]:
    """D_a of one round for all orders."""
    return tuple(renyi(a, c, rate) for a in (*_BELOW_TWO, *_INTEGER))


def renyi(order: float, c: float, rate: float) -> float:
    """Upper bound on the Rényi divergence of one round, for any order above 1.

    The sum is 1 plus the excess of all other terms, which keeps small values accurate.
    """
    if rate >= 1:
        return order * c * c / 2
    a = max(2, math.ceil(order))
    k = np.arange(2, a + 1, dtype=np.float64)
    steps = np.log((a - np.arange(a)) / np.arange(1, a + 1))
    terms = np.cumsum(steps)[1:] + k * math.log(rate) + k * (k - 1) * (c * c / 2) + math.log(2)
    terms[0] += min(0.0, math.log(2) + math.log(-math.expm1(-c * c)))
    return float(np.logaddexp(0.0, np.logaddexp.reduce(terms))) / (a - 1)


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
