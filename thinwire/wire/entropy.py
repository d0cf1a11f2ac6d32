"""Entropy coding of bytes: Huffman codes, computed by zlib.

    squeeze(data) = a raw deflate stream if that is shorter than data, else data itself

Deflate is used without its search for repeated strings (Z_HUFFMAN_ONLY): quantized values have none, and chance matches
cost more than they save. Runs of one byte are coded as runs (Z_RLE) where that is shorter. Sections that no code
shortens are stored uncompressed. A reader needs nothing but deflate.

The reader knows the length of the data, and a stream is always shorter, so the length tells which of the two was sent.
The result is never longer than the data.

>>> data = bytes([7, 8] * 500)
>>> len(squeeze(data)) < 250, expand(squeeze(data), 1000) == data, squeeze(b"abc")
(True, True, b'abc')
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from thinwire.errors import WireError
from thinwire.wire.bits import Bytes, read_varint, varint

_PIECE = (1 << 16) - 1  # the longest stored block of deflate
_BLOCK = (1 << 15) - 1  # symbols of a coded block of zlib
_SAMPLE = 1 << 11  # bytes of a sample
_END = b"\3\0"  # an empty last block


def squeeze(data: bytes) -> bytes:
    """Compress data; the result is never longer than the data. The inverse is `expand`."""
    if len(data) < 16:  # no stream is shorter here
        return data
    if len(data) <= _PIECE:
        short = _deflate(data, zlib.Z_HUFFMAN_ONLY)
        if 4 * len(short) < len(data):
            short = min(short, _deflate(data, zlib.Z_RLE), key=len)
    else:
        short = b"".join(_sections(data))
    return short if len(short) < len(data) else data


def _sections(data: bytes) -> Iterator[bytes]:
    """Compress long data as one stream. Coding is slow, so samples decide which sections to code, and how."""
    whole = np.frombuffer(data, np.uint8)
    starts = range(0, len(data), _PIECE)
    pays = [not _is_noise(whole[at : at + _PIECE : _PIECE // _SAMPLE]) for at in starts]
    strategy = _strategy(data) if any(pays) else zlib.Z_HUFFMAN_ONLY
    if all(pays):
        yield _deflate(data, strategy)
        return
    for coded, pieces in groupby(zip(starts, pays, strict=True), key=lambda piece: piece[1]):
        at = [start for start, _ in pieces]
        if coded:
            yield _deflate(data[at[0] : at[-1] + _PIECE], strategy, last=False)
        else:
            yield from (_stored(data[start : start + _PIECE]) for start in at)
    yield _END


def _is_noise(sample: np.ndarray) -> bool:
    """Whether an ideal code saves less than 1.5 %; a Huffman code, whose codes are whole bits, saves even less."""
    unseen = 255 / (2 * math.log(2)) / 8  # bytes by which the entropy of a sample of noise is underestimated
    return entropy(sample) + unseen > 0.985 * len(sample)


def _strategy(data: bytes) -> int:
    """The zlib strategy that compresses a sample of the data best."""
    size = _SAMPLE // 8
    sample = b"".join(data[at : at + size] for at in range(0, len(data) - size, len(data) // 8))
    same = np.diff(np.frombuffer(sample, np.uint8)) == 0
    if np.count_nonzero(same[2:] & same[1:-1] & same[:-2]) < _SAMPLE // 64:  # too few runs to matter
        return zlib.Z_HUFFMAN_ONLY
    runs = len(_deflate(sample, zlib.Z_RLE)) < len(_deflate(sample, zlib.Z_HUFFMAN_ONLY))
    return zlib.Z_RLE if runs else zlib.Z_HUFFMAN_ONLY


def entropy(data: Bytes | np.ndarray) -> float:
    """The zero-order entropy in bytes: a lower bound on the length of any code of single bytes.

    >>> entropy(bytes([0, 1, 2, 3] * 4))
    4.0
    """
    whole = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    count = np.bincount(whole, minlength=256)
    bits = len(whole) * np.log2(max(1, len(whole))) - count @ np.log2(np.maximum(count, 1))
    return float(bits) / 8


def at_least(data: np.ndarray) -> float:
    """A length that `squeeze` of bytes (uint8) exceeds: the entropy of each block; 0 where runs may be shorter.

    >>> data = np.random.default_rng(0).binomial(40, 0.5, 50_000).astype(np.uint8)
    >>> 0.99 < at_least(data) / len(squeeze(data.tobytes())) < 1
    True
    """
    if len(data) > _PIECE:
        return 0.0
    size = sum(entropy(data[start : start + _BLOCK]) for start in range(0, len(data), _BLOCK)) - 1
    return size if 4 * size >= len(data) else 0.0


def expand(data: Bytes, length: int) -> Bytes:
    """Decompress to exactly `length` bytes; never allocates more. The inverse is `squeeze`."""
    if len(data) == length:
        return data
    if len(data) > length:
        raise WireError(f"expected at most {length} bytes, got {len(data)}")
    inflate = zlib.decompressobj(-15)
    try:
        out = inflate.decompress(data, length + 1)
    except zlib.error as error:
        raise WireError(f"a compressed section is damaged ({error})") from None
    if len(out) != length or not inflate.eof or inflate.unused_data or inflate.unconsumed_tail:
        raise WireError(f"a compressed section does not hold the {length} bytes expected")
    return out


def squeeze_groups(data: np.ndarray, group: np.ndarray, count: int) -> bytes:
    """Squeeze the bytes (uint8) of each group: the sizes of all groups but the last, then all. See `expand_groups`."""
    codes = [squeeze(data[group == number].tobytes()) for number in range(count)]
    return b"".join((*(varint(len(code)) for code in codes[:-1]), *codes))


def expand_groups(data: Bytes, group: np.ndarray, count: int) -> np.ndarray:
    """Decode bytes, given the group of each. The inverse of `squeeze_groups`."""
    sizes, at = [], 0
    for _ in range(count - 1):
        size, at = read_varint(data, at)
        sizes.append(size)
    if (last := len(data) - at - sum(sizes)) < 0:
        raise WireError(f"codes of {sum(sizes)} bytes announced, {len(data) - at} are left")
    out = np.empty(len(group), np.uint8)
    for number, size in enumerate((*sizes, last)):
        inside = group == number
        out[inside] = np.frombuffer(expand(data[at : at + size], int(np.count_nonzero(inside))), np.uint8)
        at += size
    return out


def _deflate(data: bytes, strategy: int, last: bool = True) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return deflate.compress(data) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH)


def _stored(data: bytes) -> bytes:
    """A stored (uncompressed) block of deflate."""
    size = len(data).to_bytes(2, "little")
    return b"\0" + size + bytes(255 - byte for byte in size) + data
