"""Sums of which nobody sees the terms: numbers as whole words, hidden by masks that cancel (secure aggregation).

    y_i = q_i + sum_(j > i) m_ij - sum_(j < i) m_ji   mod 2^32,     sum_i y_i = sum_i q_i   mod 2^32
    q = round(x 2^16),     m_ij = SHAKE-256(secret of i and j, round)

One message alone is uniformly random to whoever does not know the secrets. Paper: Bonawitz et al., CCS 2017, without
its key agreement and its recovery of clients that drop out: secrets of pairs are given, and a sum that lacks a client
is refused.

>>> secret = lambda i, j: bytes([i, j])
>>> one = hide(np.array([0.5, -1.0]), 2, 0, (0, 1), 7, secret)
>>> two = hide(np.array([1.5, 3.0]), 1, 1, (0, 1), 7, secret)
>>> reveal([one, two], 2).tolist()                                 # (2 x_0 + 1 x_1) / 3
[0.8333333333333334, 0.3333333333333333]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from thinwire.errors import Diverged, WireError

Secret: TypeAlias = Callable[[int, int], bytes]  # what the clients i < j share, and nobody else knows

_SCALE = 1 << 16
_EXTRA = 2  # words after the numbers: the client's weight, and 1, so that a sum without somebody is noticed


def hidden_size(count: int) -> int:
    """How many bytes that many numbers take."""
    return 4 * (count + _EXTRA)


def hide(x: np.ndarray, weight: int, client: int, cohort: Sequence[int], version: int, secret: Secret) -> bytes:
    """A client's numbers, times its weight, and the weight itself, under its masks.

    Args:
        x: (n,) real numbers.
        weight: how much the client counts in the mean, a whole number.
        client: its number.
        cohort: the numbers of all clients that will be added up, itself among them.
        version: the version from which they trained; masks are never used twice.
        secret: the secret of each pair.
    """
    most = ((1 << 31) - 1) // len(cohort)  # so that no sum can leave the ring
    words = np.append(np.rint(x.astype(np.float64) * (weight * _SCALE)), [weight, 1])
    if float(np.abs(words).max()) > most:
        raise Diverged(
            f"client {client} has a number of size {np.abs(x).max(initial=0):.3g} and counts {weight}; the sum of "
            f"{len(cohort)} such clients does not fit into 32 bits. Count clients alike (client_weight = 'uniform'), or "
            "try a smaller rate"
        )
    return hide_words(words.astype(np.int64), client, cohort, version, secret)


def hide_words(words: np.ndarray, client: int, cohort: Sequence[int], version: int, secret: Secret) -> bytes:
    """Whole numbers (int64) under a client's masks: the numbers that are added up, its weight, and 1."""
    total = words.astype(np.uint32)
    for other in cohort:
        if other != client:
            mask = _mask(secret(min(client, other), max(client, other)), version, len(words))
            total = total + mask if client < other else total - mask
    return total.astype("<u4").tobytes()


def reveal(messages: Iterable[bytes | memoryview], count: int) -> np.ndarray:
    """The weighted mean of what all clients of a cohort hid, as float64; one message less and nothing is revealed."""
    total, weight = reveal_sum(messages, count)
    mean: np.ndarray = total / (weight * float(_SCALE))
    return mean


def reveal_sum(messages: Iterable[bytes | memoryview], count: int) -> tuple[np.ndarray, int]:
    """The sum of whole numbers that all clients of a cohort hid, as int32, and that of their weights."""
    total, said = np.zeros(count + _EXTRA, np.uint32), 0
    for data in messages:
        if len(data) != hidden_size(count):
            raise WireError(f"expected {hidden_size(count)} bytes of hidden numbers, got {len(data)}")
        total += np.frombuffer(data, "<u4")
        said += 1
        del data  # before the next one is read: all of them may be large
    weight, clients = (int(word) for word in total[count:])
    if clients != said or not weight:
        raise WireError("the masks do not cancel: a client of the cohort is missing, or said something else; ask again")
    return total[:count].view(np.int32), weight


def _mask(secret: bytes, version: int, words: int) -> np.ndarray:
    stream = hashlib.shake_256(b"thinwire.mask" + version.to_bytes(8, "little") + secret).digest(4 * words)
    return np.frombuffer(stream, "<u4").astype(np.uint32)
