"""Sixteen-bit floating point as bytes: fp16 and bf16, entropy-coded.

    v length of the lower bytes, lower bytes, upper bytes, both squeezed

Each word is rotated left by one bit, so that the upper byte is nearly the exponent, which has the least entropy. The
lower bytes are sorted by their upper bytes: the Huffman code then adapts to the exponent.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import numpy as np
import torch

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint
from thinwire.wire.entropy import expand, squeeze

X86 = platform.machine() in ("x86_64", "AMD64")
_CHUNK = 1024  # values at a time, at least


def encode_half(vector: torch.Tensor, half: torch.dtype) -> bytes:
    """Encode a vector, rounded to fp16 or bf16 and clamped to its range. See `decode_half`."""
    limit = min(torch.finfo(half).max, torch.finfo(vector.dtype).max)
    clamped = vector.clamp(-limit, limit).float()
    if half is torch.float16 and not X86:  # numpy rounds to the same values, ten times faster on ARM, slower on x86
        word = clamped.numpy().astype(np.float16).view(np.uint16)
    else:
        word = clamped.to(half).view(torch.int16).numpy().view(np.uint16)
    rotated = (word << np.uint16(1)) | (word >> np.uint16(15))
    high = (rotated >> np.uint16(8)).astype(np.uint8)
    low = rotated.astype(np.uint8)[np.argsort(high, kind="stable")]
    lower, upper = squeeze(low.tobytes()), squeeze(high.tobytes())
    return varint(len(lower)) + lower + upper


def _by_upper_byte(high: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """For each chunk of values, their ranks in a stable sort of all values by upper byte.

    In chunks, because the ranks of all values would take more memory than the values.
    """
    count = np.bincount(high, minlength=256)
    first = np.cumsum(count) - count
    chunk = max(_CHUNK, len(high) // 32)  # the ranks of one chunk take half as much memory as all values
    for at in range(0, len(high), chunk):
        some = high[at : at + chunk]
        order, count = np.argsort(some, kind="stable"), np.bincount(some, minlength=256)
        rank = np.empty(len(some), np.int64)
        rank[order] = np.arange(len(some)) + np.repeat(first - np.cumsum(count) + count, count)
        first += count
        yield slice(at, at + len(some)), rank


def decode_half(data: Bytes, n: int, half: torch.dtype) -> np.ndarray:
    """Decode n values to float32; raises a WireError if one is not finite. See `encode_half`."""
    length, start = read_varint(data)
    if length > len(data) - start:
        raise WireError(f"{length} lower bytes announced, {len(data) - start} are left")
    rest = memoryview(data)[start:]
    lower, high = np.frombuffer(expand(rest[:length], n), np.uint8), np.frombuffer(expand(rest[length:], n), np.uint8)
    word = high.astype(np.uint16)
    word <<= np.uint16(8)
    for part, rank in _by_upper_byte(high):
        word[part] |= lower[rank]
    sign = word << np.uint16(15)
    word >>= np.uint16(1)
    infinite = np.uint16(0x7C00 if half is torch.float16 else 0x7F80)
    if bool(((word & infinite) == infinite).any()):
        raise WireError("a value is not finite")
    word |= sign
    return torch.from_numpy(word.view(np.int16)).view(half).float().numpy()
