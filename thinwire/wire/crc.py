"""CRC-32 of a concatenation from the CRC-32 of its parts, so that a long part is read only once.

A CRC is the remainder of a polynomial over GF(2). Appending n bytes multiplies it by x^(8 n):

    crc(A B) = crc(A) x^(8 |B|)  +  crc(B)     modulo the polynomial of CRC-32
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zlib, bit-reversed: the highest power of x is the lowest bit


def joined_crc(first: int, second: int, length: int) -> int:
    """zlib.crc32(A + B) from crc32(A), crc32(B) and the length of B.

    >>> import zlib
    >>> joined_crc(zlib.crc32(b"thin"), zlib.crc32(b"wire"), 4) == zlib.crc32(b"thinwire")
    True
    """
    return _times(_shift(length), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial of CRC-32."""
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return out


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x^(8 length), modulo the polynomial of CRC-32."""
    power, out = 1 << 23, 1 << 31  # x^8, and 1
    while length:
        out = _times(power, out) if length & 1 else out
        power = _times(power, power)
        length >>= 1
    return out
