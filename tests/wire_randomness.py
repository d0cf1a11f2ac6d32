"""Shared randomness and drift check of the wire format, written from docs/wire.md in plain Python."""

import math
import struct
from fractions import Fraction
from hashlib import blake2b


def fold(key, *parts):
    """Derive a key from a key and some strings or integers."""
    digest = blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"thinwire.key")
    for part in parts:
        data = str(part).encode()
        digest.update((b"s" if isinstance(part, str) else b"i") + len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def philox64(key, n):
    """The first n words of 32 bits of Philox4x64-10: the lower halves of its words before the upper ones."""
    full, words, block = 2**64 - 1, [], 1
    while len(words) < 2 * -(-n // 2):
        c, k0, k1 = [block, 0, 0, 0], key, 0
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [p1 >> 64 ^ c[1] ^ k0, p1 & full, p0 >> 64 ^ c[3] ^ k1, p0 & full]
            k0, k1 = k0 + 0x9E3779B97F4A7C15 & full, k1 + 0xBB67AE8584CAA73B & full
        words += [half for word in c for half in (word & 0xFFFFFFFF, word >> 32)]
        block += 1
    return words[:n]


def philox(key, n):
    """The first n words of the stream of a key: Philox4x32-10 of the counters 0, 1, 2, ..."""
    out, mask = [], 0xFFFFFFFF
    for counter in range(-(-n // 4)):
        c, (k0, k1) = [counter & mask, counter >> 32, 0, 0], (key & mask, key >> 32)
        for _ in range(10):
            p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [p1 >> 32 ^ c[1] ^ k0, p1 & mask, p0 >> 32 ^ c[3] ^ k1, p0 & mask]
            k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
        out += c
    return out[:n]


def signs(key, n):
    """n signs: bit i % 32 of word i // 32, 1 for plus."""
    words = philox(key, -(-n // 32))
    return [2 * (words[i // 32] >> i % 32 & 1) - 1 for i in range(n)]


def drift_check(trees, key):
    """The drift check of some trees: the exact sum of all values with random signs, rounded to float32."""
    values = [value for tree in trees for block in tree.values() for value in block]
    drawn = signs(key, 4096 + -(-len(values) // 4096))
    exponent, bits = max(math.frexp(value)[1] for value in values if value), (len(values) - 1).bit_length()
    digits = min(40, 62 - bits)
    whole = [round(Fraction(value) * Fraction(2) ** (digits - exponent)) for value in values]
    total = sum(value * drawn[i % 4096] * drawn[4096 + i // 4096] for i, value in enumerate(whole))
    return struct.unpack("<f", struct.pack("<f", math.ldexp(float(total), exponent - digits - bits - 1)))[0]
