"""CRC-32 (zlib's) of long messages, and of a concatenation from the CRC-32 of its parts.

A CRC is the remainder of a polynomial over GF(2), modulo the polynomial P of CRC-32. Appending n bytes multiplies it by
x^(8 n):

    crc(A B) = crc(A) x^(8 |B|)  +  crc(B)

P divides x^91639 + x^41678 + 1, and so (by squaring five times) the same with 32 times these powers. So the
remainder stays the same if a 32-bit word is removed and added (by xor) to the words 49,961 and 91,639 places after it.
That shortens a message of any length to its last 91,639 words. It takes two additions of arrays, which numpy does
faster than zlib reads bytes.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from thinwire.wire.bits import Bytes

_POLYNOMIAL = 0xEDB88320  # of zlib, bit-reversed: the highest power of x is the lowest bit


_NEAR, _FAR = 91_639 - 41_678, 91_639  # words
_LEAST = 1 << 20  # bytes: zlib is as fast for shorter messages
_HELD = 4  # steps of which the words are kept, in the cache of a core


def crc32(data: Bytes, value: int = 0) -> int:
    """zlib.crc32(data, value), faster for long messages.

    >>> data = bytes(range(256)) * 8192
    >>> crc32(data, 7) == zlib.crc32(data, 7)
    True
    """
    if len(data) < _LEAST:
        return zlib.crc32(data, value)
    whole = len(data) // 4 * 4
    last = _shortened(np.frombuffer(data, "<u4", whole // 4), ~value & 0xFFFFFFFF)
    return zlib.crc32(data[whole:], zlib.crc32(last.data, 0xFFFFFFFF))


def _shortened(words: np.ndarray, first: int) -> np.ndarray:
    """The last words of a message with the remainder of all; `first` is added to its first word, as zlib does."""
    end = len(words) - _FAR
    held = np.zeros(_FAR + _HELD * _NEAR, words.dtype)  # the words before and at the current place
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
