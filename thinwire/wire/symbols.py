"""Quantised numbers as bytes: packed, and shorter where some are likelier than others.

    1, 2, 4, 8 bits   packed, then squeezed byte by byte
    3 bits            two in a byte, squeezed; or packed, whichever is shorter
    5, 6, 7 bits      one byte each, squeezed; or packed, whichever is shorter
    9 to 32 bits      the lower bits packed as they are, then the upper eight bits of all, squeezed

>>> import numpy as np
>>> data = encode(np.array([3, 0, 1, 2] * 100), 3)
>>> len(data) < 150, decode(data, 400, 3)[:4].tolist()
(True, [3, 0, 1, 2])
"""

from __future__ import annotations

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import bits as _bits
from thinwire.wire.entropy import expand, squeeze


def encode(symbols: np.ndarray, bits: int) -> bytes:
    """Numbers from 0 to 2**bits - 1 in at most ceil(n bits / 8) bytes."""
    if bits > 8:
        low = bits - 8
        top = (symbols >> low).astype(np.uint8)
        return _bits.pack(symbols & ((1 << low) - 1), low) + squeeze(top.tobytes())
    packed = _bits.pack(symbols, bits)
    if 8 % bits == 0:
        return squeeze(packed)
    loose = squeeze(_loose(symbols, bits).tobytes())
    return loose if len(loose) < len(packed) else packed


def decode(data: _bits.Bytes, count: int, bits: int) -> np.ndarray:
    """That many numbers from exactly these bytes, as uint8 or (beyond 8 bits) uint32."""
    if bits > 8:
        low = bits - 8
        cut = _bits.width(count, low)
        if len(data) < cut:
            raise WireError(f"expected at least {cut} bytes of numbers, got {len(data)}")
        whole = np.frombuffer(expand(data[cut:], count), np.uint8).astype(np.uint32)
        whole <<= np.uint32(low)
        whole |= _bits.unpack(data[:cut], count, low)
        return whole
    packed = _bits.width(count, bits)
    if 8 % bits == 0:
        return _bits.unpack(expand(data, packed), count, bits)
    if len(data) == packed:
        return _bits.unpack(data, count, bits)
    if len(data) > packed:
        raise WireError(f"expected at most {packed} bytes of numbers, got {len(data)}")
    loose = np.frombuffer(expand(data, count if bits > 3 else -(-count // 2)), np.uint8)
    out = loose if bits > 3 else np.stack((loose & 7, loose >> 3), 1).reshape(-1)
    if int(out.max()) >> bits or out[count:].any():
        raise WireError(f"a number does not fit into {bits} bits, or follows the last")
    return out[:count]


def _loose(symbols: np.ndarray, bits: int) -> np.ndarray:
    """One byte a number; two small ones in a byte, because a Huffman code spends a whole bit at least on each byte."""
    if bits > 3:
        return symbols.astype(np.uint8)
    pairs = np.zeros((-(-len(symbols) // 2), 2), np.uint8)
    pairs.reshape(-1)[: len(symbols)] = symbols
    both: np.ndarray = pairs[:, 0] | pairs[:, 1] << 3
    return both
