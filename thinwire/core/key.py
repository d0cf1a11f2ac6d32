"""Random numbers that two machines agree on without sending them.

A `Key` is 64 bits. Everything drawn from it is a pure function of the key and of a position, computed in integer
arithmetic only (Philox4x32-10, Salmon et al., SC 2011), so the same key gives the same bits in numpy and in torch, on
CPU and on CUDA, on ARM and on x86, today and in five years. `torch.Generator` promises none of this.

    word(4 j + i) = Philox4x32-10(counter = j, key)[i]

Every draw takes `start`, the position of its first number: a long stream can be made block by block, in any order.

>>> key = Key(7).fold("frame", 3)
>>> key.signs(4).tolist() == key.signs(2).tolist() + key.signs(2, start=2).tolist()
True
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Device: TypeAlias = "torch.device | str | None"

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and Weyl increments of the published algorithm
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = np.full((1, 1), _MASK, np.uint64), np.full((1, 1), 32, np.uint64)  # arrays: quicker than single numbers
_MULTIPLIERS = np.array([[_M0], [_M1]], np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[_W0], [_W1]], np.uint64)  # of each round
_CHUNK = 1 << 15  # counters at a time: working arrays stay in the cache, and threads seldom ask for Python's lock

# A normal is Bin(32, 1/2) - 16 plus a triangular number of 16 fractional bits, an integer below 2**21 in size: exact in
# float32, so one rounded multiplication by this constant is the only floating-point operation, equal everywhere.
NORMAL_SCALE = float(np.float32(1 / math.sqrt((8 + 1 / 6) * 2.0**32 - 1 / 6)))


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
    return _interleaved(upper, lower)


def _interleaved(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """The words of each counter side by side, from its first and third word and from the others."""
    out = np.empty((upper.shape[1], 4), np.uint32)
    out[:, 0::2], out[:, 1::2] = upper.T, lower.T
    return out


def _philox_in_place(upper: np.ndarray, lower: np.ndarray, k0: Any, k1: Any, done: int = 0) -> None:
    """Philox on counters, of which two rows hold the first and third words, and two the others.

    In place: on new arrays most of the time is spent on memory. So many rounds were done otherwise.
    """
    products = np.empty_like(upper)
    crossed = products[::-1]  # each half goes on with what the other made
    for keys in np.array([k0, k1], np.uint64).reshape(2, -1) + _WEYL[done:] & _LOW:
        np.multiply(upper, _MULTIPLIERS, products)
        np.right_shift(crossed, _SHIFT, upper)
        np.bitwise_xor(upper, lower, upper)
        np.bitwise_xor(upper, keys, upper)
        np.bitwise_and(crossed, _LOW, lower)


def _philox_counted(first: int, last: int, k0: int, k1: int) -> np.ndarray:
    """Philox4x32-10 of the counters first .. last - 1, as (n, 4) uint32."""
    high, border = first >> 32, (first >> 32) + 1 << 32
    if last > border:
        return np.concatenate((_philox_counted(first, border, k0, k1), _philox_counted(border, last, k0, k1)))
    low = np.arange(first & _MASK, last - (high << 32), dtype=np.uint64)
    return _interleaved(*_philox_alike(low, high, np.uint64(k0), np.uint64(k1)))


def _philox_alike(low: np.ndarray, high: int, k0: Any, k1: Any) -> tuple[np.ndarray, np.ndarray]:
    """Philox4x32-10 of counters with the same second word, and 0 in the third and fourth.

    Half of the first two rounds is then the arithmetic of single numbers, or of one for each key.

    Args:
        low: the first word of each counter.
        high: the second word of all.
        k0: the first word of the key, or of each counter's own key.
        k1: the second.

    Returns:
        the first and third words as two rows, and the others.
    """
    upper, lower = np.empty((2, len(low)), np.uint64), np.empty((2, len(low)), np.uint64)
    (c0, c2), (c1, c3) = upper, lower
    np.multiply(low, np.uint64(_M0), c3)
    np.right_shift(c3, _SHIFT[0], c2)
    np.bitwise_xor(c2, k1, c2)
    np.bitwise_and(c3, _LOW[0], c3)
    product = (k0 ^ np.uint64(high)) * np.uint64(_M0)  # the second round: here c0 and c1 are alike
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

    int64 products wrap modulo 2**64, so the upper half is a shift and a mask away.

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
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


@dataclass(frozen=True)
class Key:
    """A name for a stream of random numbers that everybody can draw again.

    `fold` derives new keys from words and numbers, so that each use has a stream of its own and no two uses can get in
    each other's way.

    >>> Key(1).fold("cohort", 5) == Key(1).fold("cohort", 5) != Key(1).fold("cohort", 6)
    True
    """

    value: int

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 64:
            raise ValueError(f"a key is a whole number from 0 to 2**64 - 1, not {self.value}")

    def fold(self, *parts: str | int) -> Key:
        """A new key from this one and some words or whole numbers (BLAKE2b, 64 bits)."""
        return _fold(self.value, parts)

    # -- integers --------------------------------------------------------------------------------------------------

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`."""
        first, last = start // 4, -(-(start + n) // 4)
        out = np.empty((last - first, 4), np.uint32)
        for lo in range(first, last, _CHUNK):
            out[lo - first : lo - first + _CHUNK] = _philox_counted(lo, min(lo + _CHUNK, last), *self._halves())
        return out.reshape(-1)[start - 4 * first :][:n]

    def words(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """n words of the stream as int64 below 2**32, from position `start`."""
        device = torch.device(device or "cpu")
        if device.type == "cpu":  # numpy is half as fast again as torch here, and gives the same bits
            return torch.from_numpy(self.words_numpy(n, start).astype(np.int64))
        return self.words_torch(n, start, device)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, always computed by torch on that device."""
        first, last = start // 4, -(-(start + n) // 4)
        block = torch.arange(first, last, dtype=torch.int64, device=device)
        zero = torch.zeros_like(block)
        counter = torch.stack((block & _MASK, block >> 32, zero, zero), dim=1)
        return philox_torch(counter, self._halves()).reshape(-1)[start - 4 * first :][:n]

    def integers(self, n: int, below: int, start: int = 0, device: Device = None) -> Tensor:
        """n whole numbers from 0 to `below` - 1, for `below` up to 2**31 (multiply and shift)."""
        if not 1 <= below <= 1 << 31:
            raise ValueError(f"`below` must be from 1 to 2**31, not {below}")
        return (self.words(n, start, device) * below) >> 32

    def permutation(self, n: int, device: Device = None) -> Tensor:
        """A random order of 0 .. n-1: positions sorted by 63 random bits each."""
        w = self.words(2 * n, device=device).view(n, 2)
        return torch.argsort((w[:, 0] << 31) | (w[:, 1] >> 1), stable=True)

    def choice(self, n: int, k: int) -> list[int]:
        """k different numbers out of 0 .. n-1, in the order drawn; the cost depends on k, not on n."""
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
        """+1 or -1 as float32; number i is bit i % 32 of word i // 32, so one Philox block makes 128 of them."""
        n = math.prod(shape)
        first, last = start // 32, -(-(start + n) // 32)
        if torch.device(device or "cpu").type == "cpu":
            drawn = self.words_numpy(last - first, first).astype("<u4", copy=False)
            bits = np.unpackbits(drawn.view(np.uint8), bitorder="little").astype(np.float32)
            bits *= 2
            bits -= 1
            return torch.from_numpy(bits[start - 32 * first :][:n].reshape(shape))
        words = self.words(last - first, first, device)
        shifts = torch.arange(32, dtype=torch.int64, device=words.device)
        flat = ((words[:, None] >> shifts) & 1).to(torch.float32).view(-1)
        return flat.mul_(2).sub_(1)[start - 32 * first :][:n].view(shape)

    def normal(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """Nearly Gaussian float32 numbers of mean 0 and variance 1.

            ((popcount(u) - 16) 2**16 + lo(v) - hi(v)) / sqrt((8 + 1/6) 2**32 - 1/6),    u, v: two words

        Excess kurtosis -0.06, largest size 5.9; the middle cannot be told from a Gaussian by a Kolmogorov-Smirnov test
        of 10**5 numbers. Sixty-four bits each, so two in a Philox block.
        """
        return self.normal_integers(*shape, start=start, device=device).to(torch.float32) * NORMAL_SCALE

    def normal_integers(self, *shape: int, start: int = 0, device: Device = None) -> Tensor:
        """The whole numbers behind `normal`, as int64 below 2**21 in size: sums of their squares are exact."""
        n = math.prod(shape)
        words = self.words(2 * n, 2 * start, device).view(n, 2)
        u, v = words[:, 0], words[:, 1]
        return (((_popcount(u) - 16) << 16) + (v & 0xFFFF) - (v >> 16)).view(shape)

    def _halves(self) -> tuple[int, int]:
        return self.value & _MASK, self.value >> 32


@dataclass(frozen=True)
class SecretKey(Key):
    """A key of 256 bits for what an adversary must not guess, such as the noise of differential privacy.

        word(j) = word j of SHAKE-256(key)

    Philox is fast and can be repeated, but it was not made to resist attacks. This one is for a process that draws for
    itself and shares the key with nobody; all draws are on the CPU.

    >>> SecretKey(5).fold("noise").words_numpy(3).tolist() == SecretKey(5).fold("noise").words_numpy(3).tolist()
    True
    """

    def __post_init__(self) -> None:
        if not 0 <= self.value < 1 << 256:
            raise ValueError("a secret key is a whole number from 0 to 2**256 - 1")

    @classmethod
    def draw(cls) -> SecretKey:
        """A key that the operating system draws."""
        return cls(secrets.randbits(256))

    def fold(self, *parts: str | int) -> SecretKey:
        """A new key from this one and some words or whole numbers (BLAKE2b, 256 bits)."""
        digest = hashlib.blake2b(_spelled(parts), digest_size=32, key=self._bytes(), person=b"thinwire.key").digest()
        return SecretKey(int.from_bytes(digest, "little"))

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`; the words before it are computed, too."""
        stream = hashlib.shake_256(self._bytes()).digest(4 * (start + n))
        return np.frombuffer(stream, "<u4")[start:].astype(np.uint32)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, moved to that device."""
        return torch.from_numpy(self.words_numpy(n, start).astype(np.int64)).to(device)

    def _bytes(self) -> bytes:
        return self.value.to_bytes(32, "little")


def permutations(keys: Sequence[Key], sizes: Sequence[int]) -> list[np.ndarray]:
    """`key.permutation(n)` for many keys at once, which takes far less time than one after another.

    >>> [int(i) for i in permutations([Key(1), Key(2)], [3, 2])[0]] == Key(1).permutation(3).tolist()
    True
    """
    blocks = [-(-2 * n // 4) for n in sizes]  # two words a number, four words a block
    ends = np.cumsum(blocks)
    counter = np.arange(sum(blocks), dtype=np.uint64) - np.repeat(ends - blocks, blocks).astype(np.uint64)
    halves = np.repeat(np.array([key._halves() for key in keys], np.uint64).reshape(-1, 2).T, blocks, axis=1)
    order = np.empty((len(counter), 2), np.int64)
    for lo in range(0, len(counter), _CHUNK):
        part = slice(lo, lo + _CHUNK)
        upper, lower = _philox_alike(counter[part], 0, *halves[:, part])
        order[part] = (upper.view(np.int64) << 31 | lower.view(np.int64) >> 1).T
    if len(set(sizes)) == 1:  # the common case: all in one go
        return list(_sorted_places(order.reshape(len(keys), -1)[:, : sizes[0]]))
    flat, starts = order.reshape(-1), 2 * (ends - blocks)
    return [_sorted_places(flat[at : at + n]) for at, n in zip(starts, sizes, strict=True)]


def _sorted_places(numbers: np.ndarray) -> np.ndarray:
    """`np.argsort(numbers, kind="stable")` of whole numbers from 0 to 2**63 - 1, faster where they are many.

    The place of each stands in its own last bits, so that numbers alone are sorted. Where two differ in nothing but
    these bits, which among random numbers hardly ever happens, it is done the long way.

    >>> _sorted_places(np.array([5, 3, 1 << 62])).tolist(), _sorted_places(np.array([7, 3, 7])).tolist()
    ([1, 0, 2], [1, 0, 2])
    """
    n = numbers.shape[-1]
    bits = n.bit_length()
    ranked: np.ndarray = np.sort(numbers >> bits << bits | np.arange(n))
    ranks = ranked >> bits
    if (ranks[..., 1:] == ranks[..., :-1]).any():
        return np.argsort(numbers, kind="stable")
    ranked &= (1 << bits) - 1
    return ranked


@lru_cache(maxsize=1 << 12, typed=True)  # both ends of a round ask for the same keys
def _fold(value: int, parts: tuple[str | int, ...]) -> Key:
    text = value.to_bytes(8, "little") + _spelled(parts)
    digest = hashlib.blake2b(text, digest_size=8, person=b"thinwire.key").digest()
    return Key(int.from_bytes(digest, "little"))


def _spelled(parts: tuple[str | int, ...]) -> bytes:
    """Words and whole numbers as bytes, such that no two lists of them give the same."""
    text: list[bytes] = []
    for part in parts:
        data = part.encode() if isinstance(part, str) else b"%d" % part
        # type and length first: ("a", "b") and ("ab",), or "1" and 1, must not meet
        text += (b"s" if isinstance(part, str) else b"i", len(data).to_bytes(4, "little"), data)
    return b"".join(text)


def _popcount(x: Tensor) -> Tensor:
    """How many of the 32 low bits are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) & _MASK) >> 24
