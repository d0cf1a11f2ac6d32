"""Bytes that are not all equally likely, in fewer bytes: Huffman codes, by way of zlib.

    squeeze(data) = a raw deflate stream if that is shorter than data, else data itself

Deflate without its search for repetitions (Z_HUFFMAN_ONLY): numbers have none, and what a search finds by chance costs
more than it saves. Where the same byte often comes many times in a row, these runs are sent as such (Z_RLE), if that is
shorter. Stretches that no code shortens stand in the stream as they are. All of it is deflate to the reader.

Whether a stream or the data itself was sent follows from the length, because the reader always knows how long the data
will be, and a stream is shorter. So nothing ever grows, not even by a byte.

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
from thinwire.wire.bits import Bytes

_PIECE = (1 << 16) - 1  # the most bytes that deflate takes as they are
_SAMPLE = 1 << 11  # bytes that say what is worth trying
_END = b"\3\0"  # an empty last block


def squeeze(data: bytes) -> bytes:
    """The data in at most as many bytes as it has."""
    if len(data) < 16:  # no stream pays off here
        return data
    if len(data) <= _PIECE:
        short = _deflate(data, zlib.Z_HUFFMAN_ONLY)
        if 4 * len(short) < len(data):
            short = min(short, _deflate(data, zlib.Z_RLE), key=len)
    else:
        short = b"".join(_stretches(data))
    return short if len(short) < len(data) else data


def _stretches(data: bytes) -> Iterator[bytes]:
    """Much data as one stream. To code takes long: samples say where that pays off, and how."""
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
    """Whether a code saves less than 1.5 %: a Huffman code, which has whole bits, would make even less of that."""
    unseen = 255 / (2 * math.log(2)) / 8  # by so many bytes the entropy of a sample of noise is too low
    return entropy(sample) + unseen > 0.985 * len(sample)


def _strategy(data: bytes) -> int:
    """Which one makes a sample from all over the data shorter."""
    size = _SAMPLE // 8
    sample = b"".join(data[at : at + size] for at in range(0, len(data) - size, len(data) // 8))
    same = np.diff(np.frombuffer(sample, np.uint8)) == 0
    if np.count_nonzero(same[2:] & same[1:-1] & same[:-2]) < _SAMPLE // 64:  # too few runs to matter: not worth trying
        return zlib.Z_HUFFMAN_ONLY
    runs = len(_deflate(sample, zlib.Z_RLE)) < len(_deflate(sample, zlib.Z_HUFFMAN_ONLY))
    return zlib.Z_RLE if runs else zlib.Z_HUFFMAN_ONLY


def entropy(data: Bytes | np.ndarray) -> float:
    """How many bytes a code of single bytes takes at least: their zero-order entropy.

    >>> entropy(bytes([0, 1, 2, 3] * 4))
    4.0
    """
    whole = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    count = np.bincount(whole, minlength=1)
    bits = len(whole) * np.log2(max(1, len(whole))) - count @ np.log2(np.maximum(count, 1))
    return float(bits) / 8


def expand(data: Bytes, length: int) -> Bytes:
    """The `length` bytes that `squeeze` was given. Never makes more than that, whatever the stream announces."""
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


def _deflate(data: bytes, strategy: int, last: bool = True) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return deflate.compress(data) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH)


def _stored(data: bytes) -> bytes:
    """A block of deflate that holds the data as it is."""
    size = len(data).to_bytes(2, "little")
    return b"\0" + size + bytes(255 - byte for byte in size) + data
