"""Groups of bits of which one value is more frequent, within a fraction of a percent of their entropy.

Sender and receiver know of each group the number of bits n and of ones k. The bits of a group are packed into bytes
(`bits.py`), and a byte with i ones has the probability q^i (1 - q)^(8 - i), q = k / n: asymmetric numeral systems (as
in `ans.py`) of 256 symbols, with a distribution for each group,

    x <- (x // f_s) 2^20 + c_s + x % f_s        f_s: frequency of byte s of 2^20,  c_s: the sum of those before it

with states x from 2^32 to 2^64 - 1 and words of 32 bits. Byte j of all groups is coded by state j % m of m, one for
each 8,192 bytes (at least one), which share one stream of words.

    8 m  the states, as the decoder begins with them
         words of 32 bits, in the order in which the decoder needs them

If that is not shorter, the packed bytes are sent instead: the length tells. Groups without ones, or with only ones,
take no bytes.

>>> bits = np.arange(4000) % 10 == 0
>>> data = encode([bits])
>>> len(data), bool((decode(data, [(4000, 400)])[0] == bits).all())  # the entropy is 234.5 bytes
(240, True)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, pack, unpack, width

_BITS = 20
_TOTAL = 1 << _BITS
_LOWEST = 1 << 32
_EACH = 1 << 13  # bytes for each state


class Models(NamedTuple):
    """For each group the frequencies of the 256 bytes and the sums of those before them; the group of each byte."""

    frequency: np.ndarray  # (groups, 256)
    before: np.ndarray
    group: np.ndarray  # (bytes,)


@lru_cache(maxsize=256)
def frequencies(n: int, ones: int) -> tuple[int, ...]:
    """The frequencies of bytes for so many ones of n bits, computed with integers."""
    q = min(65535, max(1, (ones << 16) // n))
    by_ones = [q**i * (65536 - q) ** (8 - i) for i in range(9)]
    weights = [by_ones[s.bit_count()] for s in range(256)]
    total = sum(weights)
    out = [1 + weight * (_TOTAL - 256) // total for weight in weights]
    out[out.index(max(out))] += _TOTAL - sum(out)
    return tuple(out)


def encode(groups: Sequence[np.ndarray]) -> bytes:
    """Encode groups of booleans. The inverse of `decode`."""
    counts = [(len(bits), int(np.count_nonzero(bits))) for bits in groups]
    packed = b"".join(pack(bits, 1) for bits, count in zip(groups, counts, strict=True) if _is_mixed(*count))
    if not packed:
        return b""
    states, words = _encode(np.frombuffer(packed, np.uint8), _models(counts), _states(len(packed)))
    coded = states.astype("<u8").tobytes() + words.astype("<u4").tobytes()
    return coded if len(coded) < len(packed) else packed


def decode(data: Bytes, counts: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Decode groups of so many booleans, and so many true ones, from exactly these bytes. The inverse of `encode`."""
    if any(ones > n for n, ones in counts):
        raise WireError(f"there are groups of more ones than bits: {counts}")
    size = sum(width(n, 1) for n, ones in counts if _is_mixed(n, ones))
    packed = data if len(data) == size else _unpacked(data, counts, size)
    out, position = [], 0
    for n, ones in counts:
        bits = np.full(n, bool(ones))
        if _is_mixed(n, ones):
            end = position + width(n, 1)
            bits = unpack(packed[position:end], n, 1).astype(np.bool_)
            position = end
        if (found := int(np.count_nonzero(bits))) != ones:
            raise WireError(f"{found} of {n} bits are ones, {ones} were announced")
        out.append(bits)
    return out


def _unpacked(data: Bytes, counts: Sequence[tuple[int, int]], size: int) -> bytes:
    """The packed bits of a code."""
    count = _states(size)
    if not 8 * count <= len(data) < size or len(data) % 4:
        raise WireError(f"{size} bytes of bits take {count} states of 8 bytes and words of 4, got {len(data)} bytes")
    states, words = np.frombuffer(data[: 8 * count], "<u8"), np.frombuffer(data[8 * count :], "<u4")
    packed, states, used = _decode(states.astype(np.uint64), words, _models(counts))
    if used != len(words) or bool((states != _LOWEST).any()):
        raise WireError(f"the bytes do not hold exactly {size} coded ones")
    return packed.tobytes()


def _is_mixed(n: int, ones: int) -> bool:
    return 0 < ones < n


def _states(size: int) -> int:
    """The number of states for so many packed bytes."""
    return max(1, size // _EACH)


def _models(counts: Sequence[tuple[int, int]]) -> Models:
    mixed = [count for count in counts if _is_mixed(*count)]
    table = np.array([frequencies(*count) for count in mixed], np.uint64)
    group = np.repeat(np.arange(len(mixed)), [width(n, 1) for n, _ in mixed])
    return Models(table, np.cumsum(table, axis=1, dtype=np.uint64) - table, group)


def _encode(symbols: np.ndarray, models: Models, count: int) -> tuple[np.ndarray, np.ndarray]:
    f_of = models.frequency[models.group, symbols].tolist()
    c_of = models.before[models.group, symbols].tolist()
    states, words = [_LOWEST] * count, []
    for i in range(len(symbols) - 1, -1, -1):
        state, f = states[i % count], f_of[i]
        if state >= f << 64 - _BITS:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        states[i % count] = (state // f << _BITS) + c_of[i] + state % f
    return np.array(states, np.uint64), np.array(words[::-1], np.uint64)


def _decode(states: np.ndarray, words: np.ndarray, models: Models) -> tuple[np.ndarray, np.ndarray, int]:
    frequency, before, group = models.frequency.tolist(), models.before.tolist(), models.group.tolist()
    now, count, used, out = states.tolist(), len(states), 0, bytearray(len(group))
    stream = words.tolist()
    for i, g in enumerate(group):
        state = now[i % count]
        low = state & _TOTAL - 1
        s = out[i] = bisect_right(before[g], low) - 1
        state = frequency[g][s] * (state >> _BITS) + low - before[g][s]
        if state < _LOWEST:
            if used == len(stream):
                raise WireError("the bytes end before the last coded bit")
            state = state << 32 | stream[used]
            used += 1
        now[i % count] = state
    return np.frombuffer(bytes(out), np.uint8), np.array(now, np.uint64), used
