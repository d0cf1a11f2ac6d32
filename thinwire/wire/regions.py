"""Entropy coding of bytes whose distribution differs by region: Huffman codes for four classes of regions.

A region is 128 consecutive bytes; the last one may have fewer. Regions with similar bytes have the same class, wherever
they are, and the bytes of a class have one code (`entropy.py`), which a deflate stream of all bytes has only for
regions that follow each other. Low levels of quantized values, for example, are frequent in some matrices of a model.

      classes of the regions, two bits each, packed
    v length of the code of class 0, 1 and 2
      the bytes of class 0, 1, 2 and 3, each squeezed

>>> most = np.where(np.arange(20480) // 512 % 2, 16, 2)
>>> data = np.random.default_rng(0).integers(0, most).astype(np.uint8)
>>> short = squeeze(data, classes(data))
>>> len(short) < 0.9 * len(entropy.squeeze(data.tobytes())), bool((expand(short, 20480) == data).all())
(True, True)
"""

from __future__ import annotations

import numpy as np

from thinwire.errors import WireError
from thinwire.wire import bits as _bits, entropy
from thinwire.wire.bits import Bytes, read_varint, varint

CLASSES = 4
_REGION = 128  # bytes
_EVERY = 4  # regions, of which one is in the sample
_TABLES = 320  # bytes of the Huffman codes, about


def classes(sizes: np.ndarray) -> np.ndarray:
    """The class of each region: a quarter of the regions each, by the means of these numbers, one for each byte."""
    means = np.add.reduceat(sizes, np.arange(0, len(sizes), _REGION), dtype=np.int64) / _lengths(len(sizes))
    out = np.empty(len(means), np.uint8)
    out[np.argsort(means, kind="stable")] = np.arange(len(means)) * CLASSES // len(means)
    return out


def estimate(data: np.ndarray, size: np.ndarray) -> float:
    """About the number of bytes that data takes, from a sample; `size` is the number of each byte for `classes`."""
    sample = data[: len(data) // _REGION * _REGION].reshape(-1, _REGION)[::_EVERY].reshape(-1)
    if not len(sample):
        return float(len(data))
    of_regions = classes(size.take(sample))
    return sum(entropy.entropy(part) for part in _split(sample, of_regions)) * len(data) / len(sample) + _TABLES


def squeeze(data: np.ndarray, of_regions: np.ndarray) -> bytes:
    """Encode bytes (uint8) with these classes of their regions. The inverse of `expand`."""
    parts = [entropy.squeeze(part.tobytes()) for part in _split(data, of_regions)]
    return b"".join((_bits.pack(of_regions, 2), *(varint(len(part)) for part in parts[:-1]), *parts))


def expand(data: Bytes, length: int) -> np.ndarray:
    """Decode `length` bytes from exactly these, as uint8. The inverse of `squeeze`."""
    lengths = _lengths(length)
    at = _bits.width(len(lengths), 2)
    of_regions = _bits.unpack(data[:at], len(lengths), 2)
    sizes = []
    for _ in range(CLASSES - 1):
        size, at = read_varint(data, at)
        sizes.append(size)
    if sum(sizes) > len(data) - at:
        raise WireError(f"codes of {sum(sizes)} bytes announced, {len(data) - at} are left")
    of_bytes, out = np.repeat(of_regions, lengths), np.empty(length, np.uint8)
    for number, size in enumerate((*sizes, len(data) - at - sum(sizes))):
        inside = of_bytes == number
        part = entropy.expand(data[at : at + size], int(np.count_nonzero(inside)))
        out[inside] = np.frombuffer(part, np.uint8)
        at += size
    return out


def _lengths(length: int) -> np.ndarray:
    """The number of bytes of each region."""
    return np.minimum(_REGION, length - np.arange(0, length, _REGION))


def _split(data: np.ndarray, of_regions: np.ndarray) -> list[np.ndarray]:
    """The bytes of each class."""
    whole = len(data) // _REGION
    rows, rest = data[: whole * _REGION].reshape(-1, _REGION), data[whole * _REGION :]
    parts = [rows[of_regions[:whole] == number].reshape(-1) for number in range(CLASSES)]
    if len(rest):
        parts[of_regions[-1]] = np.concatenate((parts[of_regions[-1]], rest))
    return parts
