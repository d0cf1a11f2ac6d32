"""Shamir's secret sharing: any t of n shares recover a secret of 32 bytes, and fewer reveal nothing about it.

    f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)   mod p,     share of point x: f(x),     secret = f(0)

p = 2^256 + 297 is prime; a_1, ... are drawn from the random source of the operating system. Paper: Shamir, 1979.

>>> shares = split(bytes(31) + b"!", [1, 2, 3, 7], 3)
>>> combine({x: shares[x] for x in (1, 3, 7)})[-1:]
b'!'
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from thinwire.errors import WireError

PRIME = (1 << 256) + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
_SUBSETS = 200  # how many sets of shares are tried if some of them are wrong


def split(secret: bytes, points: Sequence[int], threshold: int) -> dict[int, int]:
    """The shares of a secret, by point.

    Args:
        secret: 32 bytes.
        points: different integers above 0.
        threshold: how many shares recover the secret.
    """
    assert len(secret) == SECRET_BYTES
    assert 1 <= threshold <= len(set(points)) == len(points)
    assert min(points) > 0
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(terms, x) for x in points}


def combine(shares: Mapping[int, int]) -> bytes:
    """The secret from as many shares as the threshold; a WireError if it is none of 32 bytes."""
    points = tuple(sorted(shares))
    total = sum(shares[x] * factor for x, factor in zip(points, _factors(points), strict=True)) % PRIME
    if total >> 256:
        raise WireError("the shares do not belong together")
    return total.to_bytes(SECRET_BYTES, "big")


def recover(shares: Mapping[int, int], threshold: int, is_right: Callable[[bytes], bool]) -> bytes:
    """The secret from at least as many shares as the threshold, of which some may be wrong.

    Args:
        shares: the shares, by point.
        threshold: how many recover the secret.
        is_right: whether this is the secret.
    """
    if len(shares) < threshold:
        raise WireError(f"{len(shares)} shares of a secret, {threshold} are needed")
    chosen, draw = sorted(shares)[:threshold], secrets.SystemRandom()
    for _ in range(_SUBSETS if len(shares) > threshold else 1):
        try:
            secret = combine({x: shares[x] for x in chosen})
        except WireError:
            secret = b""
        if secret and is_right(secret):
            return secret
        chosen = draw.sample(sorted(shares), threshold)
    raise WireError("the shares of a secret are not those that its owner made")


def _value(terms: Sequence[int], x: int) -> int:
    """The polynomial at x."""
    total = 0
    for term in reversed(terms):
        total = (total * x + term) % PRIME
    return total


@lru_cache(maxsize=64)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's factors of the values at these points for the value at 0."""
    factors = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
