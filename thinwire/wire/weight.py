"""The weight of a client in the mean as one variable-length integer: a count as itself, other values as float32.

    u = w                    for an integer w from 0 to 2^24: the number of examples, two bytes from 128 to 16,383
    u = 2^24 + float32(w)    otherwise: the bits of w as an unsigned integer, at most five bytes

float32 represents all integers up to 2^24, so what is decoded is always float32(w), and a weight has one encoding.

>>> encode(600.0).hex(), decode(encode(600.0)), decode(encode(0.75)), len(encode(0.75))
('d804', 600.0, 0.75, 5)
"""

from __future__ import annotations

import struct

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint

MOST_COUNT = 1 << 24  # the first integer after it is not a float32


def encode(weight: float) -> bytes:
    """Encode a weight, rounded to float32. See `decode`."""
    bits = struct.pack("<f", weight)
    rounded: float = struct.unpack("<f", bits)[0]
    if _is_count(rounded):
        return varint(int(rounded))
    return varint(MOST_COUNT + int.from_bytes(bits, "little"))


def decode(data: Bytes) -> float:
    """Decode a weight that `encode` encoded. It is not checked to be positive or finite."""
    value, end = read_varint(data)
    if end != len(data):
        raise WireError(f"{len(data) - end} bytes follow the end of a weight")
    if value <= MOST_COUNT:
        return float(value)
    if (bits := value - MOST_COUNT) >> 32:
        raise WireError(f"a weight of {value} is neither a count nor a float32")
    weight: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    if _is_count(weight):
        raise WireError(f"the weight {weight:g} must be written as a count")
    return weight


def _is_count(weight: float) -> bool:
    return 0 <= weight <= MOST_COUNT and weight == int(weight)
