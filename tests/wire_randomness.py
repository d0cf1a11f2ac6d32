"""Shared randomness of the wire format, written from docs/wire.md: it imports neither thinwire, numpy nor torch."""

from hashlib import blake2b


def fold(key, *parts):
    """Derive a key from a key and some strings or integers."""
    digest = blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"thinwire.key")
    for part in parts:
        data = str(part).encode()
        digest.update((b"s" if isinstance(part, str) else b"i") + len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little")


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
