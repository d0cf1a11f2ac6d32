"""Bytes that are not all equally likely, in fewer bytes: Huffman codes, by way of zlib.

    squeeze(data) = the raw deflate stream of its literals if that is shorter than data, else data itself

Deflate without its search for repetitions (Z_HUFFMAN_ONLY): numbers have none, and what a search finds by chance costs
more than it saves. Only where nearly all bytes are the same, and a Huffman code wastes most of its one bit a byte, runs
of equal bytes are sent as such (Z_RLE), if that is shorter; both are deflate to the reader.

Whether a stream or the data itself was sent follows from the length, because the reader always knows how long the data
will be, and a stream is shorter. So nothing ever grows, not even by a byte.

>>> data = bytes([7, 8] * 500)
>>> len(squeeze(data)) < 250, expand(squeeze(data), 1000) == data, squeeze(b"abc")
(True, True, b'abc')
"""

from __future__ import annotations

import zlib

import numpy as np

from thinwire.codecs.bits import Bytes
from thinwire.errors import WireError


def squeeze(data: bytes) -> bytes:
    """The data in at most as many bytes as it has."""
    if len(data) < 16:  # no stream pays off here
        return data
    if len(data) >= 1 << 16:  # trying takes long: a part from the middle says whether a stream pays off, and which
        part = data[len(data) // 2 :][: 1 << 14]
        if entropy(part) > 0.995 * len(part):
            return data
        part = part[: 1 << 12]
        runs = len(_deflate(part, zlib.Z_RLE)) < len(_deflate(part, zlib.Z_HUFFMAN_ONLY))
        short = _deflate(data, zlib.Z_RLE if runs else zlib.Z_HUFFMAN_ONLY)
    else:
        short = _deflate(data, zlib.Z_HUFFMAN_ONLY)
        if 4 * len(short) < len(data):
            short = min(short, _deflate(data, zlib.Z_RLE), key=len)
    return short if len(short) < len(data) else data


def entropy(data: bytes) -> float:
    """How many bytes a code of single bytes takes at least: their zero-order entropy.

    >>> entropy(bytes([0, 1, 2, 3] * 4))
    4.0
    """
    count = np.bincount(np.frombuffer(data, np.uint8), minlength=1)
    share = count[count > 0] / max(1, len(data))
    return -float((share * np.log2(share)).sum()) * len(data) / 8


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


def _deflate(data: bytes, strategy: int) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
    return deflate.compress(data) + deflate.flush()
