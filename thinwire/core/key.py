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
from typing import Any, ClassVar, Self, TypeAlias

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


def philox_numpy(counter: np.ndarray, k0: Any, k1: Any) -> np.ndarray:
    """Philox4x32-10 of each row of counters, in numpy.

    Args:
        counter: (n, 1 to 4) the first words of each counter, integers below 2**32; the others are 0.
        k0: the first word of the key, or (n,) one for each counter.
        k1: the second word.

    Returns:
        (n, 4) uint32.
    """
    state = np.zeros((4, len(counter)), np.uint64)
    state[: counter.shape[1]] = counter.T
    upper, lower = state[::2], state[1::2]
    products = np.empty_like(upper)  # in place, because new arrays would take most of the time
    crossed = products[::-1]  # each half continues with the product of the other
    for keys in np.array([k0, k1], np.uint64).reshape(2, -1) + _WEYL & _LOW:
        np.multiply(upper, _MULTIPLIERS, products)
        np.right_shift(crossed, _SHIFT, upper)
        np.bitwise_xor(upper, lower, upper)
        np.bitwise_xor(upper, keys, upper)
        np.bitwise_and(crossed, _LOW, lower)
    return state.T.astype(np.uint32, order="C")


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

    _bytes: ClassVar[int] = 8
    _secret: ClassVar[bool] = False

    def fold(self, *parts: str | int) -> Self:
        """Derive a key from this one and some strings or integers (BLAKE2b).

        Strings are labels of what is drawn, such as "cohort" or "frame" (the basis of a space). They are part of the
        wire format: another label draws other values.
        """
        value = self.value.to_bytes(self._bytes, "little")
        text, key = (b"", value) if self._secret else (value, b"")
        for part in parts:  # type and length first, so that ("a", "b") differs from ("ab",), and "1" from 1
            label = part.encode() if isinstance(part, str) else b"%d" % part
            text += (b"s" if isinstance(part, str) else b"i") + len(label).to_bytes(4, "little") + label
        digest = hashlib.blake2b(text, digest_size=self._bytes, key=key, person=b"thinwire.key").digest()
        return type(self)(int.from_bytes(digest, "little"))

    # -- integers --------------------------------------------------------------------------------------------------

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`."""
        first, last = start // 4, -(-(start + n) // 4)
        out = np.empty((last - first, 4), np.uint32)
        for lo in range(first, last, CHUNK):
            block = np.arange(lo, min(lo + CHUNK, last), dtype=np.uint64)
            counter = np.stack((block & np.uint64(MASK), block >> np.uint64(32)), 1)
            out[lo - first : lo - first + CHUNK] = philox_numpy(counter, self.value & MASK, self.value >> 32)
        return out.reshape(-1)[start - 4 * first :][:n]

    def cpu_words(self, n: int) -> np.ndarray:
        """The first n uint32 words of the second stream, several times faster than `words_numpy`.

        word(8 j + 2 i) and word(8 j + 2 i + 1) = the lower and the upper half of
        Philox4x64-10(counter = j + 1, key = (value, 0))[i]
        """
        raw = np.random.Philox(counter=0, key=self.value).random_raw(-(-n // 2))
        return raw.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)[:n]

    def cpu_uniform(self) -> Callable[[int], np.ndarray]:
        """A function that returns the next n float32 multiples of 2**-24 from [0, 1), from the stream of `cpu_words`.

        n is even in all calls but the last.

        >>> draw = Key(0).cpu_uniform()
        >>> bool((np.concatenate((draw(2), draw(3))) == Key(0).cpu_uniform()(5)).all())
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
        if torch.device(device or "cpu").type == "cpu":  # the same bits, 1.5 times faster than torch
            return torch.from_numpy(self.words_numpy(n, start).astype(np.int64))
        return self.words_torch(n, start, device)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, but always computed by torch on that device."""
        first, last = start // 4, -(-(start + n) // 4)
        block = torch.arange(first, last, dtype=torch.int64, device=device)
        zero = torch.zeros_like(block)
        counter = torch.stack((block & MASK, block >> 32, zero, zero), dim=1)
        return philox_torch(counter, (self.value & MASK, self.value >> 32)).reshape(-1)[start - 4 * first :][:n]

    def integers(self, n: int, below: int, start: int = 0, device: Device = None) -> Tensor:
        """n integers from 0 to `below` - 1, for `below` up to 2**31 (multiply and shift)."""
        if not 1 <= below <= 1 << 31:
            raise ValueError(f"`below` must be from 1 to 2**31, not {below}")
        return (self.words(n, start, device) * below) >> 32

    def permutation(self, n: int) -> Tensor:
        """A random permutation of 0 .. n-1: positions sorted by 63 random bits each."""
        return torch.from_numpy(permutations([self], [n])[0])

    def choice(self, n: int, k: int) -> list[int]:
        """k distinct integers from 0 .. n-1, in the order drawn; where k is small, the cost does not depend on n."""
        if not 0 <= k <= n:
            raise ValueError(f"cannot choose {k} of {n}")
        if 3 * k > n:
            return self.permutation(n)[:k].tolist()
        found, draws = list[int](), 2 * k
        while len(found) < k:
            found = list(dict.fromkeys((self.words_numpy(draws).astype(np.int64) * n >> 32).tolist()))[:k]
            draws += 2 * k
        return found

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


def signs_of_each(keys: Sequence[Key], n: int) -> Tensor:
    """`key.signs(n)` for many keys at once, one row each, as int8: for few signs much faster than a loop.

    >>> torch.equal(signs_of_each([Key(1), Key(2)], 40)[1].float(), Key(2).signs(40))
    True
    """
    blocks = -(-n // 128)
    bits = _bits(_blocks(keys, np.full(len(keys), blocks))).view(np.int8)
    bits *= 2
    bits -= 1
    return torch.from_numpy(bits.reshape(len(keys), 128 * blocks)[:, :n])


def _blocks(keys: Sequence[Key], counts: np.ndarray) -> np.ndarray:
    """(sum of counts, 4) the words of the first counters of each key: as many counters as its count."""
    ends, values = np.cumsum(counts), np.array([key.value for key in keys], np.uint64)
    counter = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    key, out = np.repeat(values, counts), np.empty((len(counter), 4), np.uint32)
    for lo in range(0, len(out), CHUNK):
        part = slice(lo, lo + CHUNK)
        halves = key[part] & np.uint64(MASK), key[part] >> np.uint64(32)
        out[part] = philox_numpy(counter[part, None], *halves)
    return out


def _bits(words: np.ndarray) -> np.ndarray:
    """The bits of all words, the lowest first, as uint8."""
    drawn = np.ascontiguousarray(words).astype("<u4", copy=False)
    return np.unpackbits(drawn.reshape(-1).view(np.uint8), bitorder="little")


def permutations(keys: Sequence[Key], sizes: Sequence[int]) -> list[np.ndarray]:
    """`key.permutation(n)` for many keys at once, much faster than a loop.

    >>> [int(i) for i in permutations([Key(1), Key(2)], [3, 2])[0]] == Key(1).permutation(3).tolist()
    True
    """
    blocks = np.array([-(-n // 2) for n in sizes], np.int64)  # two words for each element, four in a block
    words = _blocks(keys, blocks).astype(np.int64)
    order = words[:, ::2] << 31 | words[:, 1::2] >> 1
    if len(set(sizes)) == 1:  # the common case: sort all at once
        return list(_argsort(order.reshape(len(keys), -1)[:, : sizes[0]]))
    flat, starts = order.reshape(-1), 2 * (np.cumsum(blocks) - blocks)
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

    _bytes = 32
    _secret = True

    @classmethod
    def draw(cls) -> SecretKey:
        """A new key from the random source of the operating system."""
        return cls(secrets.randbits(256))

    def words_numpy(self, n: int, start: int = 0) -> np.ndarray:
        """n uint32 words of the stream, from position `start`; all words before it are computed as well."""
        stream = hashlib.shake_256(self.value.to_bytes(32, "little")).digest(4 * (start + n))
        return np.frombuffer(stream, "<u4")[start:].astype(np.uint32)

    def words_torch(self, n: int, start: int = 0, device: Device = None) -> Tensor:
        """As `words`, copied to that device."""
        return torch.from_numpy(self.words_numpy(n, start).astype(np.int64)).to(device)
