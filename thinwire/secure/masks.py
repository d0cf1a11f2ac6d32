"""Masked sums: the server sees the sum of the updates only. Pairwise masks hide each update and cancel.

    y_i = q_i + sum_(j > i) m_ij - sum_(j < i) m_ji   mod 2^32,     sum_i y_i = sum_i q_i   mod 2^32
    q = round(x 2^16),     m_ij = SHAKE-256(secret of i and j, round)

Without the secrets, a single message is uniformly random. Paper: Bonawitz et al., CCS 2017. The secrets of pairs are
given: a simulation deals them, clients of a deployment agree on them (`client.py`). There each client adds a mask
of its own, too, and both kinds are recovered where clients dropped out. A sum in which masks remain is refused.

>>> secret = lambda i, j: bytes([i, j])
>>> one = hide(fixed_point(np.array([0.5, -1.0]), 2, 0, 2), 0, (0, 1), 7, secret)
>>> two = hide(fixed_point(np.array([1.5, 3.0]), 1, 1, 2), 1, (0, 1), 7, secret)
>>> total, weight = reveal([one, two], 2)
>>> (total / weight / 2**16).tolist()                                 # (2 x_0 + 1 x_1) / 3
[0.8333333333333334, 0.3333333333333333]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from thinwire.core.key import Key
from thinwire.core.tree import Tree
from thinwire.errors import Diverged, IncompatibleParts, WireError
from thinwire.protocol.contract import EVERYONE, Contract
from thinwire.schedules.base import Plan
from thinwire.wire.bits import Bytes

Secret: TypeAlias = Callable[[int, int], bytes]  # the shared secret of clients i < j

_SCALE = 1 << 16
_EXTRA = 2  # words after the values: the weight of the client, and 1, to detect a missing client


class SecAggCohort(NamedTuple):
    """The clients of a masked sum and the secrets that they share in pairs; the server knows only the clients."""

    cohort: tuple[int, ...]
    secret: Secret
    noise: Key | None = None  # the source of the clients' noise; by default the seed, which the server knows
    own: bytes = b""  # the seed of the client's own mask, in a deployment
    extra: tuple[int, ...] = ()  # further integers of this client that are summed
    least: int = 0  # how many clients remain at least; 0: all

    def mask(self, contract: Contract, payload: Bytes, weight: float, version: int, client: int) -> bytes:
        """An encoded update under the masks of this round; clipped and with noise, where the method is private."""
        if len(self.cohort) < 2 or client not in self.cohort:
            raise IncompatibleParts("secure_aggregation = true needs a cohort of two or more clients")
        if weight != int(weight):
            raise IncompatibleParts(
                f"secure_aggregation = true sums integer weights, not {weight}; write client_weight = 'uniform'"
            )
        values, masked = np.frombuffer(payload, "<f4"), contract.method.privacy.masked
        if masked is None:
            words = fixed_point(values, int(weight), client, len(self.cohort))
        else:
            key = (self.noise or contract.key).fold("privacy", version, client)
            words = np.append(masked.add_to_sum(values, len(self.cohort), key, self.least), [1, 1])
        words = np.append(words, np.array(self.extra, np.int64))
        return hide(words, client, self.cohort, version, self.secret, self.own)


def sum_masked(
    contract: Contract, plan: Plan, version: int, payloads: Sequence[Bytes], noise: Key, began: tuple[int, int] = (0, 0)
) -> Tree:
    """The mean, or the noisy sum, of uploads that reveal nothing each.

    Args:
        contract: the contract at `version`.
        plan: the plan of the round.
        version: the version that clients trained from.
        payloads: the masked payloads; all masks cancel in their sum.
        noise: the source of noise, where the server adds it.
        began: how many clients began the sum, and how many had to remain; 0: those of `payloads`.
    """
    privacy, up, peer = contract.method.privacy, contract.method.ups[0], contract.peer(version, EVERYONE)
    spec = contract.sent(plan).code
    total, weight = reveal(payloads, values_of(contract, plan))
    if privacy.masked is not None:
        released = privacy.masked.of_sum(total, len(payloads), *began)
        return up.decode(released.astype("<f4").tobytes(), spec, peer)
    mean = up.decode((total / (weight * float(_SCALE))).astype("<f4").tobytes(), spec, peer)
    return privacy.aggregate([mean], lambda codes: codes[0], len(payloads), noise)


def values_of(contract: Contract, plan: Plan) -> int:
    """The number of values in an upload."""
    size = contract.method.ups[0].size(contract.sent(plan).code)
    assert size is not None, "a summable codec has a constant size"
    return size // 4


def hidden_size(count: int) -> int:
    """The size in bytes of `count` masked values."""
    return 4 * (count + _EXTRA)


def fixed_point(x: np.ndarray, weight: int, client: int, clients: int) -> np.ndarray:
    """The integers (int64) that a client adds to the sum of so many clients: its values, its weight, and 1.

    >>> fixed_point(np.array([0.5, -1.0]), 2, 0, 8).tolist()
    [65536, -131072, 2, 1]
    """
    most = ((1 << 31) - 1) // clients  # so that no sum overflows the ring
    words = np.append(np.rint(x.astype(np.float64) * (weight * _SCALE)), [weight, 1])
    if float(np.abs(words).max()) > most:
        raise Diverged(
            f"client {client} has a value of magnitude {np.abs(x).max(initial=0):.3g} and weight {weight}; the sum of "
            f"{clients} such clients does not fit into 32 bits. Write client_weight = 'uniform', or a smaller "
            "learning rate"
        )
    return words.astype(np.int64)


def hide(
    words: np.ndarray, client: int, cohort: Sequence[int], version: int, secret: Secret, own: bytes = b""
) -> bytes:
    """Mask integers (int64) of a client: its values, its weight, and 1. See `reveal`.

    Args:
        words: the integers.
        client: the id of the client.
        cohort: the ids of all clients of the sum.
        version: the version from which they trained; masks are never reused.
        secret: the secret of each pair.
        own: the seed of a mask of the client's own, which does not cancel; none if it is empty.
    """
    total: np.ndarray = words.astype(np.uint32) + pair_masks(len(words), client, cohort, version, secret)
    if own:
        total += self_mask(len(words), own, version)
    return bytes(total.astype("<u4").tobytes())


def pair_masks(count: int, client: int, others: Sequence[int], version: int, secret: Secret) -> np.ndarray:
    """The sum of the masks that a client shares with others, added for higher ids, subtracted for lower ones."""
    total = np.zeros(count, np.uint32)
    for other in others:
        if other != client:
            mask = _mask(secret(min(client, other), max(client, other)), version, count)
            total = total + mask if client < other else total - mask
    return total


def self_mask(count: int, own: bytes, version: int) -> np.ndarray:
    """The mask of a client's own, from its seed."""
    return _mask(b"own" + own, version, count)


def reveal(messages: Iterable[Bytes], count: int) -> tuple[np.ndarray, int]:
    """The sum of the integers of a cohort, as int32, and of its weights, from the masked messages of all clients."""
    total, received = np.zeros(count + _EXTRA, np.uint32), 0
    for data in messages:
        if len(data) != hidden_size(count):
            raise WireError(f"expected {hidden_size(count)} bytes of masked values, got {len(data)}")
        total += np.frombuffer(data, "<u4")
        received += 1
    weight, clients = (int(word) for word in total[count:])
    if clients != received or not weight:
        raise WireError(
            "the masks do not cancel: a client of the cohort is missing or its message is invalid; repeat the round"
        )
    return total[:count].view(np.int32), weight


def _mask(secret: bytes, version: int, words: int) -> np.ndarray:
    stream = hashlib.shake_256(b"thinwire.mask" + version.to_bytes(8, "little") + secret).digest(4 * words)
    return np.frombuffer(stream, "<u4").astype(np.uint32)
