"""Keys: shared randomness that server and clients draw without sending it.

A `Key` is 64 bits. All draws are pure functions of the key and a position, computed in integer arithmetic
(Philox4x32-10, Salmon et al., SC 2011), so the same key gives the same bits in numpy and in torch, on CPU and on
CUDA, on ARM and on x86, and in future versions. `torch.Generator` does not guarantee this.

    word(4 j + i) = Philox4x32-10(counter = j, key)[i]

All draws but `cpu_words` take `start`, the position of the first value: a long stream can be drawn in parts, in any
order. `cpu_words` is a second stream of each key, for what is drawn on CPUs only: numpy computes it in C.

>>> key = Key(7).fold("mask", 3)
>>> key.signs(4).tolist() == key.signs(2).tolist() + key.signs(2, start=2).tolist()
True

A `SecretKey` draws what an adversary must not predict, such as the noise of differential privacy in a deployment.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # of 32 bits
CHUNK = 1 << 15  # counters at a time: working arrays stay in the cache, and threads seldom wait for the GIL
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and Weyl increments of the published algorithm
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = np.full((1, 1), MASK, np.uint64), np.full((1, 1), 32, np.uint64)  # arrays are faster than scalars
_MULTIPLIERS = np.array([[_M0], [_M1]], np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[_W0], [_W1]], np.uint64)  # of each round


def philox_numpy(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of each row of counters, in numpy.

    Args:
        counter: (n, 4) integers below 2**32.
        key: two integers below 2**32.

    Returns:
        (n, 4) uint32.
    """
    upper, lower = (np.ascontiguousarray(counter.T[i::2], np.uint64).copy() for i in range(2))
    _philox_in_place(upper, lower, *key)
    return interleaved(upper, lower)


def interleaved(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """(n, 4) words of each counter, from a pair of rows with its first and third and one with its other words."""
    out = np.empty((upper.shape[1], 4), np.uint32)
    out[:, 0::2], out[:, 1::2] = upper.T, lower.T
    return out


def _philox_in_place(upper: np.ndarray, lower: np.ndarray, k0: Any, k1: Any, done: int = 0) -> None:
    """Philox in place: `upper` holds the first and third words of the counters, `lower` the others.

    In place, because new arrays would take most of the time. The first `done` rounds are skipped.
    """
    products = np.empty_like(upper)
    crossed = products[::-1]  # each half continues with the product of the other
    for keys in np.array([k0, k1], np.uint64).reshape(2, -1) + _WEYL[done:] & _LOW:
        np.multiply(upper, _MULTIPLIERS, products)
        np.right_shift(crossed, _SHIFT, upper)
        np.bitwise_xor(upper, lower, upper)
        np.bitwise_xor(upper, keys, upper)
        np.bitwise_and(crossed, _LOW, lower)


def philox_counted(first: int, last: int, k0: int, k1: int) -> np.ndarray:
    """Philox4x32-10 of the counters first .. last - 1, as (n, 4) uint32."""
    high, border = first >> 32, (first >> 32) + 1 << 32
    if last > border:
        return np.concatenate((philox_counted(first, border, k0, k1), philox_counted(border, last, k0, k1)))
    low = np.arange(first & MASK, last - (high << 32), dtype=np.uint64)
    return interleaved(*philox_alike(low, high, np.uint64(k0), np.uint64(k1)))


def philox_alike(low: np.ndarray, high: int, k0: Any, k1: Any) -> tuple[np.ndarray, np.ndarray]:
    """Philox4x32-10 of counters with the same second word, and 0 in the third and fourth.

    Half of the arithmetic of the first two rounds is then the same for all counters of a key.

    Args:
        low: the first word of each counter.
        high: the second word of all.
        k0: the first word of the key, or one for each counter.
        k1: the second word of the key, or one for each counter.

    Returns:
        The first and third words as two rows, and the second and fourth words as two rows.
    """
    upper, lower = np.empty((2, len(low)), np.uint64), np.empty((2, len(low)), np.uint64)
    (c0, c2), (c1, c3) = upper, lower
    np.multiply(low, np.uint64(_M0), c3)
    np.right_shift(c3, _SHIFT[0], c2)
    np.bitwise_xor(c2, k1, c2)
    np.bitwise_and(c3, _LOW[0], c3)
    product = (k0 ^ np.uint64(high)) * np.uint64(_M0)  # the second round: c0 and c1 are the same for all counters
    np.multiply(c2, np.uint64(_M1), c1)
    np.right_shift(c1, _SHIFT[0], c0)
    np.bitwise_xor(c0, k0 + _WEYL[1, 0] & _LOW[0], c0)
    np.bitwise_and(c1, _LOW[0], c1)
    np.bitwise_xor(c3, product >> _SHIFT[0] ^ k1 + _WEYL[1, 1] & _LOW[0], c2)
    c3[:] = product & _LOW[0]
    _philox_in_place(upper, lower, k0, k1, done=2)
    return upper, lower


def philox_torch(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 of each row of counters, in torch on the device of `counter`.

    int64 products wrap modulo 2**64, so a shift and a mask give the upper half.

    Args:
        counter: (n, 4) int64 with values below 2**32.
        key: two integers below 2**32.

    Returns:
        (n, 4) int64 with values below 2**32.
    """
    c0, c1, c2, c3 = counter.unbind(1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = ((p1 >> 32) & MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & MASK) ^ c3 ^ k1
        c1, c3 = p1 & MASK, p0 & MASK
        k0, k1 = (k0 + _W0) & MASK, (k1 + _W1) & MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


Device: TypeAlias = "torch.device | str | None"

# A normal is Bin(32, 1/2) - 16 plus a triangular value of 16 fractional bits: an integer below 2**21 in magnitude,
# exact in float32. The only floating-point operation is one rounded multiplication by this constant, which is the same
# on all platforms.
NORMAL_SCALE = float(np.float32(1 / math.sqrt((8 + 1 / 6) * 2.0**32 - 1 / 6)))


@dataclass(frozen=True)
class Key:
    """A 64-bit key of a reproducible stream of random values.

    `fold` derives new keys from labels, so that each use has an independent stream.

    Args:
        value: an integer from 0 to 2**64 - 1.

    >>> Key(1).fold("cohort", 5) == Key(1).fold("cohort", 5) != Key(1).fold("cohort", 6)
    True
    """

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 64:
            raise ValueError(f"a key must be an integer from 0 to 2**64 - 1, not {self.value}")

    def fold(self, *parts: str | int) -> Key:
        """Derive a key from this one and some strings or integers (BLAKE2b, 64 bits).

        Strings are labels of what is drawn, such as "cohort" or "frame" (the basis of a space). They are part of the
        wire format: another label draws other values.
        """
        return _fold(self.value, parts)

    # -- integers --------------------------------------------------------------------------------------------------

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`."""
        first, last = start // 4, -(-(start + n) // 4)
        out = np.empty((last - first, 4), np.uint32)
        for lo in range(first, last, CHUNK):
            out[lo - first : lo - first + CHUNK] = philox_counted(lo, min(lo + CHUNK, last), *self._halves())
        return out.reshape(-1)[start - 4 * first :][:n]

    def cpu_words(self, n: int) -> np.ndarray:
        """The first n uint32 words of the second stream, several times faster than `words_numpy`.

        word(8 j + 2 i) and word(8 j + 2 i + 1) = the lower and the upper half of
        Philox4x64-10(counter = j + 1, key = (value, 0))[i]
        """
        raw = np.random.Philox(counter=0, key=self.value).random_raw(-(-n // 2))
        return raw.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)[:n]

    def cpu_uniform(self, n: int) -> np.ndarray:
        """n float32 multiples of 2**-24 from [0, 1), from `cpu_words`."""
        return (self.cpu_words(n) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def cpu_uniform_parts(self) -> Callable[[int], np.ndarray]:
        """A function that returns the next n values of `cpu_uniform`; n is even in all calls but the last.

        >>> draw = Key(0).cpu_uniform_parts()
        >>> bool((np.concatenate((draw(2), draw(3))) == Key(0).cpu_uniform(5)).all())
        True
        """
        stream = np.random.Philox(counter=0, key=self.value)

        def draw(n: int) -> np.ndarray:
            words = stream.random_raw(-(-n // 2)).astype("<u8", copy=False).view("<u4")[:n]
            values: np.ndarray = (words >> np.uint32(8)).astype(np.float32)
            values *= np.float32(2.0**-24)
            return values

        return draw

    def words(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """n words of the stream as int64 below 2**32, from position `start`."""
        device = torch.device(device or "cpu")
        if device.type == "cpu":  # the same bits, 1.5 times faster than torch
            return torch.from_numpy(self.words_numpy(n, start).astype(np.int64))
        return self.words_torch(n, start, device)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, but always computed by torch on that device."""
        first, last = start // 4, -(-(start + n) // 4)
        block = torch.arange(first, last, dtype=torch.int64, device=device)
        zero = torch.zeros_like(block)
        counter = torch.stack((block & MASK, block >> 32, zero, zero), dim=1)
        return philox_torch(counter, self._halves()).reshape(-1)[start - 4 * first :][:n]

    def integers(self, n: int, below: int, start: int = 0, device: Device = None) -> Tensor:
        """n integers from 0 to `below` - 1, for `below` up to 2**31 (multiply and shift)."""
        if not 1 <= below <= 1 << 31:
            raise ValueError(f"`below` must be from 1 to 2**31, not {below}")
        return (self.words(n, start, device) * below) >> 32

    def permutation(self, n: int, device: Device = None) -> Tensor:
        """A random permutation of 0 .. n-1: positions sorted by 63 random bits each."""
        w = self.words(2 * n, device=device).view(n, 2)
        return torch.argsort((w[:, 0] << 31) | (w[:, 1] >> 1), stable=True)

    def choice(self, n: int, k: int) -> list[int]:
        """k distinct integers from 0 .. n-1, in the order drawn; the cost depends on k, not on n."""
        if not 0 <= k <= n:
            raise ValueError(f"cannot choose {k} of {n}")
        if 3 * k > n:
            return [int(i) for i in self.permutation(n)[:k]]
        seen: dict[int, None] = {}
        start = 0
        while len(seen) < k:
            for i in self.integers(2 * k, n, start).tolist():
                seen.setdefault(i)
            start += 2 * k
        return list(seen)[:k]

    # -- floats, each an exactly rounded function of integers ------------------------------------------------------

    def uniform(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """float32 multiples of 2**-24 from [0, 1)."""
        return ((self.words(math.prod(shape), start, device) >> 8).to(torch.float32) * 2.0**-24).view(shape)

    def signs(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """+1 or -1 as float32; sign i is bit i % 32 of word i // 32, so one Philox block gives 128 signs."""
        n = math.prod(shape)
        first, last = start // 32, -(-(start + n) // 32)
        if torch.device(device or "cpu").type == "cpu":
            bits = _bits(self.words_numpy(last - first, first)).astype(np.float32)
            bits *= 2
            bits -= 1
            return torch.from_numpy(bits[start - 32 * first :][:n].reshape(shape))
        words = self.words(last - first, first, device)
        shifts = torch.arange(32, dtype=torch.int64, device=words.device)
        flat = ((words[:, None] >> shifts) & 1).to(torch.float32).view(-1)
        return flat.mul_(2).sub_(1)[start - 32 * first :][:n].view(shape)

    def normal(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """Approximately Gaussian float32 values of mean 0 and variance 1.

            ((popcount(u) - 16) 2**16 + lo(v) - hi(v)) / sqrt((8 + 1/6) 2**32 - 1/6),    u, v: two words

        Excess kurtosis -0.06, largest magnitude 5.9; a Kolmogorov-Smirnov test of 10**5 values does not distinguish it
        from a Gaussian. 64 bits each, so one Philox block gives two values.
        """
        return self.normal_integers(*shape, start=start, device=device).to(torch.float32) * NORMAL_SCALE

    def normal_integers(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """The integers of `normal` before scaling, int64 below 2**21 in magnitude: sums of their squares are exact."""
        n = math.prod(shape)
        words = self.words(2 * n, 2 * start, device).view(n, 2)
        u, v = words[:, 0], words[:, 1]
        return (((_popcount(u) - 16) << 16) + (v & 0xFFFF) - (v >> 16)).view(shape)

    def _halves(self) -> tuple[int, int]:
        return self.value & MASK, self.value >> 32


def signs_of_each(keys: Sequence[Key], n: int) -> Tensor:
    """`key.signs(n)` for many keys at once, one row each, as int8: for few signs much faster than a loop.

    >>> torch.equal(signs_of_each([Key(1), Key(2)], 40)[1].float(), Key(2).signs(40))
    True
    """
    bits = _bits(_words_of_each(keys, -(-n // 32))).view(np.int8)
    bits *= 2
    bits -= 1
    return torch.from_numpy(bits.reshape(len(keys), -1)[:, :n])


def choices(keys: Sequence[Key], n: int, k: int) -> list[list[int]]:
    """`key.choice(n, k)` for many keys at once, much faster than a loop where k is small.

    >>> choices([Key(1), Key(2)], 100, 3)[1] == Key(2).choice(100, 3)
    True
    """
    if not 0 <= 3 * k <= n or n > 1 << 31:
        return [key.choice(n, k) for key in keys]
    drawn = (_words_of_each(keys, 2 * k).astype(np.int64) * n >> 32).tolist()
    found = [list(dict.fromkeys(row))[:k] for row in drawn]
    return [one if len(one) == k else key.choice(n, k) for key, one in zip(keys, found, strict=True)]


def _words_of_each(keys: Sequence[Key], n: int) -> np.ndarray:
    """The first n words of each key, one row each."""
    blocks = -(-n // 4)
    counter = np.tile(np.arange(blocks, dtype=np.uint64), len(keys))
    halves = np.repeat(np.array([key._halves() for key in keys], np.uint64).reshape(-1, 2).T, blocks, axis=1)
    return interleaved(*philox_alike(counter, 0, *halves)).reshape(len(keys), 4 * blocks)[:, :n]


def _bits(words: np.ndarray) -> np.ndarray:
    """The bits of all words, the lowest first, as uint8."""
    drawn = np.ascontiguousarray(words).astype("<u4", copy=False)
    return np.unpackbits(drawn.reshape(-1).view(np.uint8), bitorder="little")


def permutations(keys: Sequence[Key], sizes: Sequence[int]) -> list[np.ndarray]:
    """`key.permutation(n)` for many keys at once, much faster than a loop.

    >>> [int(i) for i in permutations([Key(1), Key(2)], [3, 2])[0]] == Key(1).permutation(3).tolist()
    True
    """
    blocks = [-(-2 * n // 4) for n in sizes]  # two words per element, four words per block
    ends = np.cumsum(blocks)
    counter = np.arange(sum(blocks), dtype=np.uint64) - np.repeat(ends - blocks, blocks).astype(np.uint64)
    halves = np.repeat(np.array([key._halves() for key in keys], np.uint64).reshape(-1, 2).T, blocks, axis=1)
    order = np.empty((len(counter), 2), np.int64)
    for lo in range(0, len(counter), CHUNK):
        part = slice(lo, lo + CHUNK)
        upper, lower = philox_alike(counter[part], 0, *halves[:, part])
        order[part] = (upper.view(np.int64) << 31 | lower.view(np.int64) >> 1).T
    if len(set(sizes)) == 1:  # the common case: sort all at once
        return list(_argsort(order.reshape(len(keys), -1)[:, : sizes[0]]))
    flat, starts = order.reshape(-1), 2 * (ends - blocks)
    return [_argsort(flat[at : at + n]) for at, n in zip(starts, sizes, strict=True)]


def _argsort(words: np.ndarray) -> np.ndarray:
    """`np.argsort(words, kind="stable")` of random integers from 0 to 2**63 - 1, but faster.

    The position of each is stored in its lowest bits, so that a plain sort suffices. If two differ in these bits only,
    which is rare among random integers, it falls back to argsort.

    >>> _argsort(np.array([5, 3, 1 << 62])).tolist(), _argsort(np.array([7, 3, 7])).tolist()
    ([1, 0, 2], [1, 0, 2])
    """
    n = words.shape[-1]
    bits = n.bit_length()
    ranked: np.ndarray = np.sort(words >> bits << bits | np.arange(n))
    ranks = ranked >> bits
    if (ranks[..., 1:] == ranks[..., :-1]).any():
        return np.argsort(words, kind="stable")
    ranked &= (1 << bits) - 1
    return ranked


@lru_cache(maxsize=1 << 12, typed=True)  # server and clients of a simulation derive the same keys
def _fold(value: int, parts: tuple[str | int, ...]) -> Key:
    text = value.to_bytes(8, "little") + encode_labels(parts)
    digest = hashlib.blake2b(text, digest_size=8, person=b"thinwire.key").digest()
    return Key(int.from_bytes(digest, "little"))


def encode_labels(parts: tuple[str | int, ...]) -> bytes:
    """Encode strings and integers such that different labels give different bytes."""
    return b"".join([_label(part) for part in parts])


@lru_cache(maxsize=1 << 12, typed=True)  # rounds and clients are in many labels
def _label(part: str | int) -> bytes:
    data = part.encode() if isinstance(part, str) else b"%d" % part
    # type and length first, so that ("a", "b") differs from ("ab",), and "1" from 1
    return (b"s" if isinstance(part, str) else b"i") + len(data).to_bytes(4, "little") + data


def _popcount(x: Tensor) -> Tensor:
    """The number of bits set among the lowest 32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) & MASK) >> 24


@dataclass(frozen=True)
class SecretKey(Key):
    """A key of 256 bits for draws that an adversary must not predict, such as the noise of differential privacy.

        word(j) = word j of SHAKE-256(key)

    Philox, which `Key` uses, is fast but not cryptographically secure. A secret key stays in one process; it draws on
    the CPU.

    >>> SecretKey(5).fold("noise").words_numpy(3).tolist() == SecretKey(5).fold("noise").words_numpy(3).tolist()
    True
    """

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 256:
            raise ValueError("a secret key must be an integer from 0 to 2**256 - 1")

    @classmethod
    def draw(cls) -> SecretKey:
        """A new key from the random source of the operating system."""
        return cls(secrets.randbits(256))

    def fold(self, *parts: str | int) -> SecretKey:
        """Derive a key from this one and some strings or integers (BLAKE2b, 256 bits)."""
        digest = hashlib.blake2b(
            encode_labels(parts), digest_size=32, key=self._bytes(), person=b"thinwire.key"
        ).digest()
        return SecretKey(int.from_bytes(digest, "little"))

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`; all words before it are computed as well."""
        stream = hashlib.shake_256(self._bytes()).digest(4 * (start + n))
        return np.frombuffer(stream, "<u4")[start:].astype(np.uint32)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, copied to that device."""
        return torch.from_numpy(self.words_numpy(n, start).astype(np.int64)).to(device)

    def _bytes(self) -> bytes:
        return self.value.to_bytes(32, "little")
