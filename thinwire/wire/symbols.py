"""Quantization levels as bytes: packed and entropy-coded.

    1, 2, 4, 8 bits   packed, then squeezed byte by byte
    3 bits            two in a byte, squeezed; or packed, whichever is shorter
    5, 6, 7 bits      one byte each, squeezed; or packed, whichever is shorter
    9 to 32 bits      the lower bits of all, packed; then the upper eight bits of all, squeezed

Many levels of 2 or 4 bits that are larger in some regions are sent as one byte 7, then packed and coded by regions
(`regions.py`), if that is shorter: no deflate stream begins with 7.

>>> import numpy as np
>>> data = encode(np.array([3, 0, 1, 2] * 100), 3)
>>> len(data) < 150, decode(data, 400, 3)[:4].tolist()
(True, [3, 0, 1, 2])
"""

from __future__ import annotations

from functools import cache

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import bits as _bits, regions
from thinwire.wire.entropy import at_least, expand, squeeze

_REGIONS = 7  # the first byte; a deflate stream with these bits has a type of block that does not exist
_MANY = 1 << 14  # levels, from which a code for each class of regions may pay
_PAYS = 0.99


def encode(symbols: np.ndarray, bits: int) -> bytes:
    """Encode integers from 0 to 2**bits - 1 in at most ceil(n bits / 8) bytes. The inverse of `decode`."""
    if bits > 8:
        low = bits - 8
        top = (symbols >> low).astype(np.uint8)
        return _bits.pack(symbols & ((1 << low) - 1), low) + squeeze(top.tobytes())
    packed = _bits.pack(symbols, bits)
    if 8 % bits == 0:
        return _shorter(packed, bits) if bits in (2, 4) and len(symbols) >= _MANY else squeeze(packed)
    loose = squeeze(_loose(symbols, bits).tobytes())
    return loose if len(loose) < len(packed) else packed


def decode(data: _bits.Bytes, count: int, bits: int) -> np.ndarray:
    """Decode `count` integers from exactly these bytes, as uint8 or (beyond 8 bits) uint32. The inverse of `encode`."""
    if bits > 8:
        low = bits - 8
        middle = _bits.width(count, low)
        if len(data) < middle:
            raise WireError(f"expected at least {middle} bytes of levels, got {len(data)}")
        levels = np.frombuffer(expand(data[middle:], count), np.uint8).astype(np.uint32)
        levels <<= np.uint32(low)
        levels |= _bits.unpack(data[:middle], count, low)
        return levels
    packed = _bits.width(count, bits)
    if bits in (2, 4) and len(data) < packed and data[:1] == bytes([_REGIONS]):
        return _bits.unpack(regions.expand(data[1:], packed).tobytes(), count, bits)
    if 8 % bits == 0:
        return _bits.unpack(expand(data, packed), count, bits)
    if len(data) == packed:
        return _bits.unpack(data, count, bits)
    if len(data) > packed:
        raise WireError(f"expected at most {packed} bytes of levels, got {len(data)}")
    loose = np.frombuffer(expand(data, count if bits > 3 else -(-count // 2)), np.uint8)
    out = loose if bits > 3 else np.stack((loose & 7, loose >> 3), 1).reshape(-1)
    if int(out.max()) >> bits or out[count:].any():
        raise WireError(f"a level does not fit into {bits} bits, or follows the last")
    return out[:count]


def _loose(symbols: np.ndarray, bits: int) -> np.ndarray:
    """One level a byte, or two of at most 3 bits: a Huffman code takes at least one bit for each byte."""
    if bits > 3:
        return symbols.astype(np.uint8)
    pairs = np.zeros((-(-len(symbols) // 2), 2), np.uint8)
    pairs.reshape(-1)[: len(symbols)] = symbols
    both: np.ndarray = pairs[:, 0] | pairs[:, 1] << 3
    return both


def _shorter(data: bytes, bits: int) -> bytes:
    """Packed levels by regions, if that is shorter than the code of the whole.

    Coding is slow: the whole is coded only where a bound on its length does not decide.
    """
    packed, sizes = np.frombuffer(data, np.uint8), _sizes(bits)
    expected, bound = regions.estimate(packed, sizes), at_least(packed)
    by_regions = b""
    if expected < _PAYS * bound:
        by_regions = _by_regions(packed, sizes)
        if len(by_regions) < bound:
            return by_regions
    whole = squeeze(data)
    if expected >= _PAYS * len(whole):
        return whole
    return min(whole, by_regions or _by_regions(packed, sizes), key=len)


def _by_regions(packed: np.ndarray, sizes: np.ndarray) -> bytes:
    return bytes([_REGIONS]) + regions.squeeze(packed, regions.classes(sizes.take(packed)))


@cache
def _sizes(bits: int) -> np.ndarray:
    """The sum of the distances of all levels of a byte from the middle, doubled."""
    levels = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    sizes: np.ndarray = np.abs(2 * levels - (1 << bits) + 1).sum(1).astype(np.uint8)
    return sizes
