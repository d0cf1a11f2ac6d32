"""Whole numbers of a few bits each, side by side without gaps, and whole numbers of any length.

Number i of k bits lies at bits i k to (i + 1) k - 1, bit j being bit j % 8 of byte j // 8.

>>> pack(np.array([1, 2, 3, 0]), 2).hex()
'39'
>>> unpack(bytes.fromhex("39"), 4, 2).tolist()
[1, 2, 3, 0]
"""

from __future__ import annotations

import numpy as np

from thinwire.errors import WireError

_CHUNK = 1 << 10  # numbers at a time on the way over single bits, a multiple of 8


def width(count: int, bits: int) -> int:
    """How many bytes that many numbers take."""
    return -(-count * bits // 8)


def pack(values: np.ndarray, bits: int) -> bytes:
    """Numbers from 0 to 2**bits - 1 as bytes, for 0 to 56 bits; unused bits of the last byte are 0."""
    if bits == 0 or len(values) == 0:
        return b""
    if bits == 8:
        return values.astype(np.uint8).tobytes()
    if bits == 1:
        return np.packbits(values.astype(np.uint8), bitorder="little").tobytes()
    if bits < 8:  # eight numbers are `bits` bytes, and fit into one word
        rows = np.zeros((-(-len(values) // 8), 8), np.uint64)
        rows.reshape(-1)[: len(values)] = values
        words = rows[:, 0].copy()
        for i in range(1, 8):
            words |= rows[:, i] << np.uint64(i * bits)
        packed = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits]
        return packed.tobytes()[: width(len(values), bits)]
    out = []
    for at in range(0, len(values), _CHUNK):
        some = values[at : at + _CHUNK].astype("<u8").view(np.uint8).reshape(-1, 8)[:, : -(-bits // 8)]
        single = np.unpackbits(np.ascontiguousarray(some), axis=1, bitorder="little")[:, :bits]
        out.append(np.packbits(single, bitorder="little").tobytes())
    return b"".join(out)


def unpack(data: bytes, count: int, bits: int) -> np.ndarray:
    """That many numbers from exactly these bytes: uint8 up to 8 bits, uint32 up to 32, else int64."""
    if len(data) != width(count, bits):
        raise WireError(f"{count} numbers of {bits} bits take {width(count, bits)} bytes, got {len(data)}")
    kind = np.uint8 if bits <= 8 else np.uint32 if bits <= 32 else np.int64
    if not data:
        return np.zeros(count, kind)
    if (spare := 8 * len(data) - count * bits) and data[-1] >> 8 - spare:
        raise WireError("bits are set after the last number")
    if bits == 8:
        return np.frombuffer(data, np.uint8)
    if bits == 1:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
    if bits < 8:
        words = np.zeros((-(-count // 8), 8), np.uint8)
        full = len(data) // bits
        words[:full, :bits] = np.frombuffer(data, np.uint8, full * bits).reshape(-1, bits)
        words[full:, : len(data) - full * bits] = np.frombuffer(data, np.uint8, offset=full * bits)
        word = words.reshape(-1).view("<u8")
        mask = np.uint64((1 << bits) - 1)
        small = np.empty((len(words), 8), np.uint8)
        for i in range(8):
            small[:, i] = (word >> np.uint64(i * bits)) & mask
        return small.reshape(-1)[:count]
    out = np.empty(count, kind)
    for at in range(0, count, _CHUNK):
        n = min(_CHUNK, count - at)
        some = np.frombuffer(data, np.uint8, width(n, bits), at * bits // 8)
        single = np.zeros((n, 64), np.uint8)
        single[:, :bits] = np.unpackbits(some, count=n * bits, bitorder="little").reshape(n, bits)
        out[at : at + n] = np.packbits(single, axis=1, bitorder="little").view("<u8").reshape(-1)
    return out


def varint(value: int) -> bytes:
    """A whole number as unsigned LEB128 in its shortest form, at most five bytes."""
    if not 0 <= value < 1 << 35:
        raise WireError(f"{value} does not fit into five bytes")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def read_varint(data: bytes | memoryview, position: int = 0) -> tuple[int, int]:
    """Such a number, and the position after it."""
    value = 0
    for i in range(5):
        if position + i >= len(data):
            raise WireError("the bytes end inside a length")
        byte = data[position + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if byte == 0 and i > 0:
                raise WireError("a length is not in its shortest form")
            return value, position + i + 1
    raise WireError("a length is longer than five bytes")
