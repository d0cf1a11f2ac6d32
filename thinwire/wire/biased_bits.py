"""Bits of which one value is more frequent, within a fraction of a percent of their entropy.

Sender and receiver know the number of bits n and of ones k. Bits are packed into bytes (`bits.py`), and a byte with i
ones has the probability q^i (1 - q)^(8 - i), q = k / n: asymmetric numeral systems (as in `ans.py`) of 256 symbols,

    x <- (x // f_s) 2^20 + c_s + x % f_s        f_s: frequency of byte s of 2^20,  c_s: the sum of those before it

with states x from 2^32 to 2^64 - 1 and words of 32 bits. Byte j is coded by state j % m of m, one for each 8,192 bytes
(at least one), which share one stream of words, so that long vectors are coded m bytes at a time.

    8 m  the states, as the decoder begins with them
         words of 32 bits, in the order in which the decoder needs them

If that is not shorter, the packed bytes are sent instead: the length tells. No ones, or only ones, take no bytes.

>>> bits = np.arange(4000) % 10 == 0
>>> data = encode(bits)
>>> len(data), bool((decode(data, 4000, 400) == bits).all())  # the entropy is 234.5 bytes
(240, True)
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, pack, unpack, width

_BITS = 20
_TOTAL = 1 << _BITS
_LOWEST = 1 << 32
_EACH = 1 << 13  # bytes for each state
_MANY = 16  # states from which numpy is faster than a loop


class Model(NamedTuple):
    """Frequencies of the 256 bytes, and the sums of those before them."""

    frequency: np.ndarray
    before: np.ndarray


@lru_cache(maxsize=256)
def model(n: int, ones: int) -> Model:
    """The distribution of bytes for so many ones of n bits, computed with integers."""
    q = min(65535, max(1, (ones << 16) // n))
    weights = [q ** bin(s).count("1") * (65536 - q) ** (8 - bin(s).count("1")) for s in range(256)]
    total = sum(weights)
    frequency = [1 + weight * (_TOTAL - 256) // total for weight in weights]
    frequency[max(range(256), key=lambda s: frequency[s])] += _TOTAL - sum(frequency)
    table = np.array(frequency, np.uint64)
    return Model(table, np.concatenate(([0], np.cumsum(table)[:-1])).astype(np.uint64))


def encode(bits: np.ndarray) -> bytes:
    """Encode booleans. The inverse of `decode`."""
    n, ones = len(bits), int(np.count_nonzero(bits))
    if ones in (0, n):
        return b""
    packed, write = pack(bits, 1), _encode_rows if _states(n) >= _MANY else _encode_one_by_one
    states, words = write(np.frombuffer(packed, np.uint8), model(n, ones), _states(n))
    coded = states.astype("<u8").tobytes() + words.astype("<u4").tobytes()
    return coded if len(coded) < len(packed) else packed


def decode(data: Bytes, n: int, ones: int) -> np.ndarray:
    """Decode n booleans, so many of them true, from exactly these bytes. The inverse of `encode`."""
    if ones in (0, n):
        if data:
            raise WireError(f"{ones} ones of {n} bits take no bytes, got {len(data)}")
        return np.full(n, bool(ones))
    out = unpack(data if len(data) == width(n, 1) else _unpacked(data, n, ones), n, 1).astype(np.bool_)
    if int(np.count_nonzero(out)) != ones:
        raise WireError(f"{np.count_nonzero(out)} of {n} bits are ones, {ones} were announced")
    return out


def _unpacked(data: Bytes, n: int, ones: int) -> bytes:
    """The packed bits of coded ones."""
    count = _states(n)
    if not 8 * count <= len(data) < width(n, 1) or len(data) % 4:
        raise WireError(f"{n} bits take {count} states of 8 bytes and words of 4, got {len(data)} bytes")
    states, words = np.frombuffer(data[: 8 * count], "<u8"), np.frombuffer(data[8 * count :], "<u4")
    read = _decode_rows if count >= _MANY else _decode_one_by_one
    packed, states, used = read(states.astype(np.uint64), words, model(n, ones), width(n, 1))
    if used != len(words) or bool((states != _LOWEST).any()):
        raise WireError(f"the bytes do not hold exactly {n} coded bits")
    return packed.tobytes()


def _states(n: int) -> int:
    """The number of states for n bits."""
    return max(1, n // 8 // _EACH)


def _encode_one_by_one(symbols: np.ndarray, known: Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    frequency, before = known.frequency.tolist(), known.before.tolist()
    states, words = [_LOWEST] * count, []
    for i, s in zip(range(len(symbols) - 1, -1, -1), symbols[::-1].tolist(), strict=True):
        state, f = states[i % count], frequency[s]
        if state >= f << 64 - _BITS:
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        states[i % count] = (state // f << _BITS) + before[s] + state % f
    return np.array(states, np.uint64), np.array(words[::-1], np.uint64)


def _decode_one_by_one(
    states: np.ndarray, words: np.ndarray, known: Model, size: int
) -> tuple[np.ndarray, np.ndarray, int]:
    frequency, before = known.frequency.tolist(), known.before.tolist()
    now, count, used, out = states.tolist(), len(states), 0, bytearray(size)
    stream = words.tolist()
    for i in range(size):
        state = now[i % count]
        low = state & _TOTAL - 1
        s = out[i] = bisect_right(before, low) - 1
        state = frequency[s] * (state >> _BITS) + low - before[s]
        if state < _LOWEST:
            if used == len(stream):
                raise WireError("the bytes end before the last coded bit")
            state = state << 32 | stream[used]
            used += 1
        now[i % count] = state
    # a damaged state may grow beyond its range
    return np.frombuffer(bytes(out), np.uint8), np.array([min(x, (1 << 64) - 1) for x in now], np.uint64), used


def _encode_rows(symbols: np.ndarray, known: Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As `_encode_one_by_one`, one byte of each state at a time."""
    states, words = np.full(count, _LOWEST, np.uint64), []
    for start in range((len(symbols) - 1) // count * count, -1, -count):
        row = symbols[start : start + count]
        f, c, state = known.frequency[row], known.before[row], states[: len(row)]
        full = state >= f << np.uint64(64 - _BITS)
        words.append((state[full] & np.uint64(0xFFFFFFFF))[::-1])
        state = np.where(full, state >> np.uint64(32), state)
        states[: len(row)] = (state // f << np.uint64(_BITS)) + c + state % f
    return states, np.concatenate(words)[::-1]


def _decode_rows(states: np.ndarray, words: np.ndarray, known: Model, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """As `_decode_one_by_one`, one byte of each state at a time."""
    states, count, used, out = states.copy(), len(states), 0, np.empty(size, np.uint8)
    for start in range(0, size, count):
        state = states[: min(count, size - start)]
        low = state & np.uint64(_TOTAL - 1)
        row = np.searchsorted(known.before, low, side="right") - 1
        out[start : start + len(state)] = row
        state = known.frequency[row] * (state >> np.uint64(_BITS)) + low - known.before[row]
        short = np.flatnonzero(state < _LOWEST)
        if used + len(short) > len(words):
            raise WireError("the bytes end before the last coded bit")
        state[short] = state[short] << np.uint64(32) | words[used : used + len(short)].astype(np.uint64)
        used += len(short)
        states[: len(state)] = state
    return out, states, used
