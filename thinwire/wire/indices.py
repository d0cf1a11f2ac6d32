"""A set of k positions out of n as bytes, close to the lower bound of log2 C(n, k) bits.

Sender and receiver know n and k. The gaps between positions are nearly geometric, so their low bits are noise and are
packed without a code; only the high parts are entropy-coded. The first byte is the form, and the shortest is sent:

    0 gaps     v escapes; low r bits of all gaps, packed; escaped high parts, packed; high parts, one byte each
               (255: escaped), squeezed.   r = max(0, floor(log2(n / k)) - 4)
    1 bitmap   n bits, squeezed
    2 rice     1 byte r; low r bits of all gaps, packed; high parts in unary (that many zeros, then a one)
    3 rows     n bits of matrices whose rows have more or fewer ones (`row_bits.py`)

An empty or full set takes no bytes.

>>> data = encode(np.array([3, 17, 900]), 1000)
>>> len(data), decode(data, 1000, 3).tolist()
(7, [3, 17, 900])
"""

from __future__ import annotations

import math

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import bits as _bits, row_bits
from thinwire.wire.entropy import entropy, expand, squeeze

GAPS, BITMAP, RICE, ROWS = 0, 1, 2, 3
_ESCAPE = 255
_FEW = 4096  # more positions are never sent in unary
_PAYS = 0.98  # rows are slower to read than the other forms: only if they save so much


def _allowed(form: int, n: int, k: int) -> bool:
    """Whether a form may be used for k of n positions. It bounds the memory of a reader."""
    allowed = {GAPS: 3 * k <= n, BITMAP: 8 * k >= n, RICE: k < _FEW, ROWS: 8 * k >= n}
    return allowed.get(form, False)


def encode(indices: np.ndarray, n: int, shapes: row_bits.Shapes = ()) -> bytes:
    """Encode strictly ascending positions below n, in one vector or in matrices of these shapes. See `decode`."""
    k = len(indices)
    if k in (0, n):
        return b""
    gaps = _between(indices, n)
    if k >= _FEW and _allowed(BITMAP, n, k):  # encoding several forms is slow: estimate which is the shortest
        return _shortest_of_many(indices, gaps, n, shapes)
    forms = []
    if _allowed(RICE, n, k):
        forms.append(bytes([RICE]) + _rice(gaps))
    if _allowed(GAPS, n, k):
        forms.append(bytes([GAPS]) + _gaps(gaps, n, *_high(gaps, _low_bits(n, k))))
    if _allowed(BITMAP, n, k):
        forms.append(bytes([BITMAP]) + squeeze(_bitmap(indices, n).tobytes()))
    return min(forms, key=len)


def _shortest_of_many(indices: np.ndarray, gaps: np.ndarray, n: int, shapes: row_bits.Shapes) -> bytes:
    """The form of many positions whose estimated length is the least."""
    bits = np.zeros(n, np.uint8)
    bits[indices] = 1
    bitmap, r = np.packbits(bits, bitorder="little"), _low_bits(n, len(indices))
    sizes, high, long = {BITMAP: entropy(bitmap)}, np.zeros(0, np.uint8), np.zeros(0, np.int64)
    if _allowed(GAPS, n, len(indices)):
        high, long = _high(gaps, r)
        sizes[GAPS] = entropy(high) + _bits.width(len(indices), r)
    if shapes and (rows := row_bits.encode(bits, shapes, _PAYS * min(sizes.values()))):
        return bytes([ROWS]) + rows
    if sizes.get(GAPS, math.inf) < sizes[BITMAP]:
        return bytes([GAPS]) + _gaps(gaps, n, high, long)
    return bytes([BITMAP]) + squeeze(bitmap.tobytes())


def _between(indices: np.ndarray, n: int) -> np.ndarray:
    """The number of positions that are skipped before each one."""
    at = indices.astype(np.int32 if n < 1 << 31 else np.int64)  # half the memory, half the time
    gaps = np.empty_like(at)
    gaps[0] = at[0]
    np.subtract(at[1:], at[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _high(gaps: np.ndarray, r: int) -> tuple[np.ndarray, np.ndarray]:
    """The high part of each gap as a byte, 255 for a longer one; and where those are."""
    high, long = (gaps >> r if r else gaps).astype(np.uint8), np.flatnonzero(gaps >= _ESCAPE << r)
    high[long] = _ESCAPE
    return high, long


def _bitmap(indices: np.ndarray, n: int) -> np.ndarray:
    bitmap = np.zeros(n, bool)
    bitmap[indices] = True
    return np.packbits(bitmap, bitorder="little")


def decode(data: _bits.Bytes, n: int, k: int, shapes: row_bits.Shapes = ()) -> np.ndarray:
    """Decode exactly k strictly ascending positions below n, as int64. The inverse of `encode`."""
    if not 0 <= k <= n:
        raise WireError(f"{k} positions of {n} are not possible")
    if k in (0, n):
        if data:
            raise WireError(f"{k} positions of {n} take no bytes, got {len(data)}")
        return np.arange(k, dtype=np.int64)
    if not data:
        raise WireError("the bytes end before the positions")
    form, body = data[0], data[1:]
    if form not in (GAPS, BITMAP, RICE, ROWS):
        raise WireError(f"form {form} of positions is not known, expected 0 to 3")
    if not _allowed(form, n, k):
        raise WireError(f"{k} positions of {n} are never sent in form {form}")
    if form in (BITMAP, ROWS):
        packed = form == BITMAP
        bitmap = _bits.unpack(expand(body, _bits.width(n, 1)), n, 1) if packed else row_bits.decode(body, n, shapes)
        if (found := int(np.count_nonzero(bitmap))) != k:
            raise WireError(f"expected {k} positions, got {found}")
        return np.flatnonzero(bitmap)
    out = _read_gaps(body, n, k) if form == GAPS else _read_rice(body, n, k)
    if int(out.max()) >= n:
        raise WireError(f"a gap between positions is longer than all {n} values")
    out += 1
    np.cumsum(out, out=out)
    out -= 1
    if int(out[-1]) >= n:
        raise WireError(f"position {int(out[-1])} does not exist, there are {n} values")
    return out


def _low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1 - 4)


def _gaps(gaps: np.ndarray, n: int, high: np.ndarray, long: np.ndarray) -> bytes:
    r = _low_bits(n, len(gaps))
    return b"".join(
        (
            _bits.varint(len(long)),
            _bits.pack(gaps & ((1 << r) - 1), r) if r else b"",
            _bits.pack(gaps[long] >> r, (n >> r).bit_length()),
            squeeze(high.tobytes()),
        )
    )


def _read_gaps(data: _bits.Bytes, n: int, k: int) -> np.ndarray:
    r = _low_bits(n, k)
    escapes, start = _bits.read_varint(data)
    if escapes > k:
        raise WireError(f"{escapes} long gaps among {k}")
    wide = (n >> r).bit_length()
    middle = start + _bits.width(k, r)
    end = middle + _bits.width(escapes, wide)
    low = _bits.unpack(data[start:middle], k, r)
    escaped = _bits.unpack(data[middle:end], escapes, wide)
    high = np.frombuffer(expand(data[end:], k), np.uint8).astype(np.int64)
    long = high == _ESCAPE
    if int(long.sum()) != escapes or (escapes and int(escaped.min()) < _ESCAPE):
        raise WireError("the long gaps are not those announced")
    high[long] = escaped
    high <<= r
    high |= low
    return high


def _rice(gaps: np.ndarray) -> bytes:
    guess = max(0, int(math.log2(0.69 * float(gaps.mean()) + 1e-9))) if gaps.any() else 0
    r = min(range(max(0, guess - 1), guess + 3), key=lambda r: len(gaps) * r + int((gaps >> r).sum()))
    high = gaps >> r
    ones = np.cumsum(high + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1, np.uint8)
    unary[ones] = 1
    return bytes([r]) + _bits.pack(gaps & ((1 << r) - 1), r) + np.packbits(unary, bitorder="little").tobytes()


def _read_rice(data: _bits.Bytes, n: int, k: int) -> np.ndarray:
    if not data or data[0] > n.bit_length():
        raise WireError("the number of low bits of the positions is missing or too large")
    r = data[0]
    middle = 1 + _bits.width(k, r)
    low = _bits.unpack(data[1:middle], k, r)
    if len(data) - middle > _bits.width(k + (n >> r), 1):  # before it is unpacked to eight times as many bytes
        raise WireError(f"the gaps between {k} positions are longer than all {n} values")
    unary = np.unpackbits(np.frombuffer(data, np.uint8, offset=middle), bitorder="little")
    ones = np.flatnonzero(unary) if int(np.count_nonzero(unary)) == k else np.zeros(0, np.int64)
    if len(ones) != k or int(ones[-1]) // 8 != len(data) - middle - 1:
        raise WireError(f"expected {k} positions and nothing after them")
    high: np.ndarray = np.diff(ones, prepend=np.int64(-1)) - 1
    high <<= r  # no overflow: the sum of all is at most k + (n >> r)
    high |= low
    return high
