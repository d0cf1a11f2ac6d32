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

from thinwire.wire import bits as _bits, entropy
from thinwire.wire.bits import Bytes

CLASSES = 4
_REGION = 128  # bytes
_EVERY = 4  # regions, of which one is in the sample
_TABLES = 320  # bytes of the Huffman codes, about


def classes(sizes: np.ndarray) -> np.ndarray:
    """The class of each region: a quarter of the regions each, by the means of these numbers, one for each byte."""
    means = np.add.reduceat(sizes, np.arange(0, len(sizes), _REGION), dtype=np.int64)
    means = means / np.minimum(_REGION, len(sizes) - np.arange(0, len(sizes), _REGION))  # the last may be shorter
    out = np.empty(len(means), np.uint8)
    out[np.argsort(means, kind="stable")] = np.arange(len(means)) * CLASSES // len(means)
    return out


def estimate(data: np.ndarray, size: np.ndarray) -> float:
    """About the number of bytes that data takes, from a sample; `size` is the number of each byte for `classes`."""
    sample = data[: len(data) // _REGION * _REGION].reshape(-1, _REGION)[::_EVERY].reshape(-1)
    if not len(sample):
        return float(len(data))
    of_bytes = _of_bytes(classes(size.take(sample)), len(sample))
    found = sum(entropy.entropy(sample[of_bytes == number]) for number in range(CLASSES))
    return found * len(data) / len(sample) + _TABLES


def squeeze(data: np.ndarray, of_regions: np.ndarray) -> bytes:
    """Encode bytes (uint8) with these classes of their regions. The inverse of `expand`."""
    groups = entropy.squeeze_groups(data, _of_bytes(of_regions, len(data)), CLASSES)
    return _bits.pack(of_regions, 2) + groups


def expand(data: Bytes, length: int) -> np.ndarray:
    """Decode `length` bytes from exactly these, as uint8. The inverse of `squeeze`."""
    regions = -(-length // _REGION)
    at = _bits.width(regions, 2)
    of_regions = _bits.unpack(data[:at], regions, 2)
    return entropy.expand_groups(data[at:], _of_bytes(of_regions, length), CLASSES)


def _of_bytes(of_regions: np.ndarray, length: int) -> np.ndarray:
    """The class of each byte."""
    return np.repeat(of_regions, _REGION)[:length]
