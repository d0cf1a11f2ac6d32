"""Scales of quantized values: one bfloat16 for each row of values."""

from __future__ import annotations

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes

FLOAT32 = (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))
_MAX = 0x7F7F  # the bits of the largest bfloat16


def as_rows(x: np.ndarray, length: int) -> np.ndarray:
    """A vector as rows of that length, the last one padded with zeros."""
    if len(x) % length == 0:
        return x.reshape(-1, length)
    rows = np.empty((-(-len(x) // length), length), x.dtype)
    rows.reshape(-1)[: len(x)] = x
    rows.reshape(-1)[len(x) :] = 0
    return rows


def bfloat16_up(size: np.ndarray) -> np.ndarray:
    """The bits of the smallest bfloat16 that is not smaller, or of the largest finite one."""
    return _bfloat16(size, 0xFFFF)


def bfloat16_nearest(size: np.ndarray) -> np.ndarray:
    """The bits of the nearest finite bfloat16; of two, the larger one."""
    return _bfloat16(size, 0x8000)


def _bfloat16(size: np.ndarray, added: int) -> np.ndarray:
    single = size.clip(0, FLOAT32[1]).astype("<f4").view("<u4")
    bits: np.ndarray = np.minimum((single.astype(np.int64) + added) >> 16, _MAX).astype("<u2")
    return bits


def read_scales(data: Bytes, count: int) -> tuple[np.ndarray, memoryview]:
    """So many scales, as the bits of bfloat16, and the bytes after them."""
    scales = np.frombuffer(data[: 2 * count], np.uint8)
    if len(scales) != 2 * count:
        raise WireError(f"expected {count} scales of two bytes, got {len(scales)} bytes")
    scales = scales.view("<u2")
    if int(scales.max()) > _MAX:
        raise WireError("a scale is negative or not finite")
    return scales, memoryview(data)[2 * count :]


def widen(scales: np.ndarray) -> np.ndarray:
    """Scales as float32, from the bits of bfloat16."""
    wide: np.ndarray = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
