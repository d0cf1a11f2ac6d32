"""Bit packing: integers of a few bits each without gaps, and variable-length integers.

Integer i of k bits takes bits i k to (i + 1) k - 1; bit j is bit j % 8 of byte j // 8.

>>> pack(np.array([1, 2, 3, 0]), 2).hex()
'39'
>>> unpack(bytes.fromhex("39"), 4, 2).tolist()
[1, 2, 3, 0]
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

from thinwire.errors import WireError

Bytes = bytes | memoryview  # a view reads a part of a message without a copy


def width(count: int, bits: int) -> int:
    """The number of bytes of `count` integers of so many bits."""
    return -(-count * bits // 8)


def pack(values: np.ndarray, bits: int) -> bytes:
    """Pack integers from 0 to 2**bits - 1, for 0 to 56 bits; unused bits of the last byte are 0. See `unpack`."""
    if bits == 0 or len(values) == 0:
        return b""
    if bits == 8:
        return values.astype(np.uint8).tobytes()
    if bits == 1:
        return np.packbits(values.astype(np.uint8), bitorder="little").tobytes()
    if bits in (2, 4):
        return _pack_within_bytes(values, bits)
    word = _word(bits)
    rows = np.zeros((-(-len(values) // 8), 8), word)  # eight values take `bits` bytes
    rows.reshape(-1)[: len(values)] = values
    out = np.zeros((len(rows), bits), np.uint8)
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        value = rows[:, i] << word(shift)
        for j in range(width(1, shift + bits)):
            out[:, first + j] |= (value >> word(8 * j)).astype(np.uint8)
    return out.tobytes()[: width(len(values), bits)]


def unpack(data: Bytes, count: int, bits: int) -> np.ndarray:
    """Unpack `count` integers from exactly these bytes: uint8 up to 8 bits, uint32 up to 32, else int64. See `pack`."""
    if len(data) != width(count, bits):
        raise WireError(f"{count} values of {bits} bits take {width(count, bits)} bytes, got {len(data)}")
    kind = np.uint8 if bits <= 8 else np.uint32 if bits <= 32 else np.int64
    if not data:
        return np.zeros(count, kind)
    if (spare := 8 * len(data) - count * bits) and data[-1] >> 8 - spare:
        raise WireError("bits are set after the last value")
    if bits == 8:
        return np.frombuffer(data, np.uint8)
    if bits == 1:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
    if bits in (2, 4):
        return _within_bytes(bits).take(np.frombuffer(data, np.uint8)).view(np.uint8)[:count]
    word, groups = _word(bits), -(-count // 8)
    rows = np.zeros((groups, bits), np.uint8)
    rows.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    out = np.empty((groups, 8), kind)
    for i in range(8):
        first, shift = divmod(i * bits, 8)
        value = rows[:, first].astype(word)
        for j in range(1, width(1, shift + bits)):
            value |= rows[:, first + j].astype(word) << word(8 * j)
        out[:, i] = value >> word(shift) & word((1 << bits) - 1)
    return out.reshape(-1)[:count]


def _pack_within_bytes(values: np.ndarray, bits: int) -> bytes:
    """Pack integers of which a byte holds two or four: one word of as many bytes holds them first, one in each byte."""
    each = 8 // bits
    loose = np.zeros(-(-len(values) // each) * each, np.uint8)
    loose[: len(values)] = values
    words = loose.view(f"<u{each}")
    packed = words.copy()
    for i in range(1, each):
        packed |= words >> i * (8 - bits)
    return packed.astype(np.uint8).tobytes()  # the lowest byte of each


@cache
def _within_bytes(bits: int) -> np.ndarray:
    """For each byte the two or four integers that it holds, one in each byte of a word."""
    integers = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return integers.astype(np.uint8).view(f"<u{8 // bits}").reshape(-1)


def _word(bits: int) -> type[np.unsignedinteger]:
    """The smallest type that holds a value of so many bits and up to seven preceding bits of its first byte."""
    return np.uint16 if bits <= 8 else np.uint32 if bits <= 24 else np.uint64


@lru_cache(maxsize=1 << 10)  # lengths and versions repeat
def varint(value: int) -> bytes:
    """Encode an integer as unsigned LEB128 in its shortest form, at most five bytes. See `read_varint`."""
    if not 0 <= value < 1 << 35:
        raise WireError(f"{value} does not fit into five bytes")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def read_varint(data: Bytes, position: int = 0) -> tuple[int, int]:
    """Decode an integer that `varint` encoded; returns it and the position after it."""
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


def prefixed(data: Bytes) -> bytes:
    """The bytes after their length, a varint. See `read_prefixed`."""
    return varint(len(data)) + data


def read_prefixed(data: Bytes, what: str, position: int = 0) -> tuple[memoryview, memoryview]:
    """The bytes that `prefixed` wrote at a position, and those after them; `what` they are, for error messages."""
    length, start = read_varint(data, position)
    if length > len(data) - start:
        raise WireError(f"{what} of {length} bytes announced, {len(data) - start} are left")
    rest = memoryview(data)[start:]
    return rest[:length], rest[length:]
