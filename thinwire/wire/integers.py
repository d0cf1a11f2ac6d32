"""Vectors of integers around zero as bytes, near their entropy: for example sums of quantized updates.

Up to 4,096 values, without a table (`ans.py`):

    1  model + 32 shift + 128 escapes     model: a distribution, 0 to 31;  shift: 0 to 3;  escapes: 1 if there are any
       the low `shift` bits of all values, packed
    v  number of escapes, then v each     |high| - 23 of every value with |high| >= 23; only if there are any
       high = value >> shift of all values, at most 23 in size, coded

More values:

    1  bits: 2 to 32
       value + 2^(bits - 1) of all values, as in `symbols.py`

>>> data = encode(np.array([3, 0, -1, 100, 0, 0]))
>>> len(data), decode(data, 6).tolist()
(10, [3, 0, -1, 100, 0, 0])
"""

from __future__ import annotations

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import ans, bits as _bits, symbols
from thinwire.wire.bits import Bytes, read_varint, varint

LARGEST = (1 << 31) - 1  # the largest size of a value
_FEW = 4096  # the code without a table takes longer for each value
_SHIFTS = 4
_WIDE = 5.0  # standard deviation above which the lowest bit is noise


def encode(values: np.ndarray) -> bytes:
    """Encode int64 values of at most 2^31 - 1 in size. The inverse of `decode`."""
    if not len(values):
        return b""
    if len(values) > _FEW:
        bits = max(2, int(np.abs(values).max()).bit_length() + 1)
        return bytes([bits]) + symbols.encode(values + (1 << bits - 1), bits)
    spread, shift = float(np.abs(values).mean()) * 1.25, 0
    while spread > _WIDE and shift < _SHIFTS - 1:
        spread, shift = spread / 2, shift + 1
    high = values >> shift
    clipped = np.clip(high, -ans.LARGEST, ans.LARGEST)
    excess = (np.abs(high) - ans.LARGEST)[np.abs(high) >= ans.LARGEST].tolist()
    model = ans.best_model(clipped)
    head = bytes([model | shift << 5 | (128 if excess else 0)]) + _bits.pack(values & (1 << shift) - 1, shift)
    escapes = b"".join(map(varint, (len(excess), *excess))) if excess else b""
    return head + escapes + ans.encode(clipped, model)


def decode(data: Bytes, count: int) -> np.ndarray:
    """Decode `count` values from exactly these bytes, as int64. The inverse of `encode`."""
    if not count:
        if data:
            raise WireError(f"no values take no bytes, got {len(data)}")
        return np.zeros(0, np.int64)
    if not data:
        raise WireError(f"no bytes for {count} values")
    if count > _FEW:
        if not 2 <= data[0] <= 32:
            raise WireError(f"values of {data[0]} bits are not possible, expected 2 to 32")
        levels = symbols.decode(data[1:], count, data[0]).astype(np.int64)
        levels -= 1 << data[0] - 1  # in place, to save memory
        return levels
    model, shift = data[0] & 31, data[0] >> 5 & 3
    position = 1 + _bits.width(count, shift)
    low = _bits.unpack(data[1:position], count, shift)
    excess = []
    if data[0] & 128:
        number, position = read_varint(data, position)
        if not 1 <= number <= count:
            raise WireError(f"{number} of {count} values announced as large")
        for _ in range(number):
            one, position = read_varint(data, position)
            excess.append(one)
    high = ans.decode(data[position:], count, model)
    large = np.flatnonzero(np.abs(high) == ans.LARGEST)
    if len(large) != len(excess):
        raise WireError(f"{len(excess)} large values announced, {len(large)} found")
    high[large] += np.sign(high[large]) * np.array(excess, np.int64)
    out: np.ndarray = (high << shift) + low
    if int(np.abs(out).max()) > LARGEST:
        raise WireError(f"a value is larger than {LARGEST}")
    return out
