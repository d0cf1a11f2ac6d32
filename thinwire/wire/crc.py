"""CRC-32 (zlib's) of long messages, and of a concatenation from the CRC-32 of its parts.

A CRC is the remainder of a polynomial over GF(2), modulo the polynomial P of CRC-32. Appending n bytes multiplies it by
x^(8 n):

    crc(A B) = crc(A) x^(8 |B|)  +  crc(B)

P divides x^91639 + x^41678 + 1, and so (by squaring five times) the same with 32 times these powers. So the
remainder stays the same if a 32-bit word is removed and added (by xor) to the words 49,961 and 91,639 places after it.
That shortens a message of any length to its last 91,639 words. It takes two additions of arrays, which numpy does
faster than zlib reads bytes on some machines. But these are many short calls, for which many threads wait for each
other; then each thread makes one call of zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from math import inf
from threading import local
from time import thread_time

import numpy as np

from thinwire.core.threads import cores, crowded, each, many_cores
from thinwire.wire.bits import Bytes

_POLYNOMIAL = 0xEDB88320  # of zlib, bit-reversed: the highest power of x is the lowest bit


_NEAR, _FAR = 91_639 - 41_678, 91_639  # words
_LEAST = 1 << 20  # bytes: zlib is as fast for shorter messages
_HELD = 4  # steps of which the words are kept, in the cache of a core
_PIECE = 4 << 20  # bytes: messages of at least two such pieces are read by several cores
_this = local()  # keeps the held words of a thread: new memory is slower than the computation


def crc32(data: Bytes, value: int = 0) -> int:
    """zlib.crc32(data, value), faster for long messages.

    >>> data = bytes(range(256)) * 8192
    >>> crc32(data, 7) == zlib.crc32(data, 7)
    True
    """
    if len(data) < _LEAST or crowded():
        return zlib.crc32(data, value)
    if len(data) >= 2 * _PIECE and cores() > 1:
        return crc32_of_each([data], value)[0]
    return _folded(data, value) if _folding_pays() else zlib.crc32(data, value)


@cache
def _folding_pays() -> bool:
    """Whether additions are faster than zlib on this machine, measured at the first long message."""
    data, least = bytes(2 * _LEAST), dict[Callable[..., int], float]()
    for fn in (zlib.crc32, _folded) * 3:
        began = thread_time()  # other threads may compute, too
        fn(data, 0)
        least[fn] = min(least.get(fn, inf), thread_time() - began)
    return least[_folded] < least[zlib.crc32]


def _folded(data: Bytes, value: int) -> int:
    """The CRC-32 of a long message by additions of arrays."""
    whole = len(data) // 4 * 4
    last = _shortened(np.frombuffer(data, "<u4", whole // 4), ~value & 0xFFFFFFFF)
    return zlib.crc32(data[whole:], zlib.crc32(last.data, 0xFFFFFFFF))


def crc32_of_each(messages: Sequence[Bytes], value: int = 0) -> list[int]:
    """`crc32` of each of some long messages, which all cores read piece by piece, so that all end at the same time.

    >>> crc32_of_each([b"thin", b"wire"]) == [zlib.crc32(b"thin"), zlib.crc32(b"wire")]
    True
    """
    threads, total = cores(), sum(map(len, messages))
    if not many_cores():
        size = max(_PIECE, -(-total // threads))
    else:
        size = min(_PIECE, max(_LEAST, total // (3 * threads)))
    views = [memoryview(data) for data in messages]
    pieces = [[data[start : start + size] for start in range(0, len(data), size)] for data in views]
    found = iter(each(crc32, [piece for parts in pieces for piece in parts], size))
    out = []
    for parts in pieces:
        crc = value
        for piece in parts:
            crc = joined_crc(crc, next(found), len(piece))
        out.append(crc)
    return out


def _shortened(words: np.ndarray, first: int) -> np.ndarray:
    """The last words of a message with the remainder of all; `first` is added to its first word, as zlib does."""
    end = len(words) - _FAR
    held = _held()  # the words before and at the current place
    held[:_FAR] = 0
    at, place = _FAR, 0
    while place < end:
        if at + _NEAR > len(held):
            held[:_FAR] = held[at - _FAR : at]
            at = _FAR
        count = min(_NEAR, end - place)
        now = held[at : at + count]
        np.bitwise_xor(words[place : place + count], held[at - _NEAR : at - _NEAR + count], now)
        np.bitwise_xor(now, held[at - _FAR : at - _FAR + count], now)
        if place == 0:
            now[0] ^= words.dtype.type(first)
        at, place = at + count, place + count
    last, before = words[end:].copy(), held[at - _FAR : at]
    last[:_NEAR] ^= before[_FAR - _NEAR :]
    last ^= before
    return last


def _held() -> np.ndarray:
    """The memory of this thread for held words."""
    if not hasattr(_this, "held"):
        _this.held = np.empty(_FAR + _HELD * _NEAR, "<u4")
    held: np.ndarray = _this.held
    return held


def joined_crc(first: int, second: int, length: int) -> int:
    """zlib.crc32(A + B) from crc32(A), crc32(B) and the length of B.

    >>> import zlib
    >>> joined_crc(zlib.crc32(b"thin"), zlib.crc32(b"wire"), 4) == zlib.crc32(b"thinwire")
    True
    """
    for column in _columns(length):
        if first & 1:
            second ^= column
        first >>= 1
    return second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial of CRC-32."""
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return out


@lru_cache(maxsize=64)  # bodies of many messages have the same length
def _columns(length: int) -> tuple[int, ...]:
    """x^(8 length) times each power of x, that of the lowest bit (x^31) first, modulo the polynomial of CRC-32."""
    column, out = _shift(length), list[int]()
    for _ in range(32):
        out.append(column)
        column = (column >> 1) ^ (_POLYNOMIAL if column & 1 else 0)
    return tuple(reversed(out))


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x^(8 length), modulo the polynomial of CRC-32."""
    power, out = 1 << 23, 1 << 31  # x^8, and 1
    while length:
        out = _times(power, out) if length & 1 else out
        power = _times(power, power)
        length >>= 1
    return out
