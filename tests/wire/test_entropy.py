"""Tests of entropy coding."""

import heapq
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thinwire.errors import WireError
from thinwire.wire import bits, symbols
from thinwire.wire.entropy import at_least, expand, squeeze


@given(st.binary(max_size=400) | st.lists(st.sampled_from([0, 1, 7]), max_size=2000).map(bytes))
def test_squeeze_round_trip_never_grows(data):
    assert len(squeeze(data)) <= len(data)
    assert expand(squeeze(data), len(data)) == data


def test_compressed_size_is_close_to_the_entropy():
    data = np.random.default_rng(0).binomial(20, 0.5, 100_000).astype(np.uint8)
    p = np.bincount(data) / len(data)
    bound = -(p[p > 0] * np.log2(p[p > 0])).sum() * len(data) / 8
    assert bound <= len(squeeze(data.tobytes())) < 1.02 * bound


@pytest.mark.parametrize("order", ["nrnsn", "rn", "nr", "sss", "n"])
@pytest.mark.parametrize("size", [70_000, 200_001])
def test_incompressible_sections_are_stored(order, size):
    rng = np.random.default_rng(0)
    parts = {
        "n": rng.integers(0, 256, size, dtype=np.uint8).tobytes(),  # noise
        "r": bytes(size),  # runs
        "s": rng.binomial(20, 0.5, size).astype(np.uint8).tobytes(),  # skewed
    }
    data = b"".join(parts[kind] for kind in order)
    short = squeeze(data)
    assert expand(short, len(data)) == data == (short if order == "n" else zlib.decompress(short, -15))
    coded = [zlib.compressobj(9, zlib.DEFLATED, -15, 9, how) for how in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)]
    assert len(short) <= 1.01 * min(len(whole.compress(data) + whole.flush()) for whole in coded)


def huffman_bytes(data, blocks):
    """The size of an optimal code of single bytes, including the end-of-block symbol of each block."""
    heap = [blocks, *(count for count in np.bincount(np.frombuffer(data, np.uint8)).tolist() if count)]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits / 8


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("packed", [False, True])
def test_skewed_bytes_take_no_more_than_an_optimal_code_of_single_bytes(p, packed):
    values = (np.random.default_rng(0).random(400_000) > p).astype(np.int64)
    data = bits.pack(values, 2) if packed else values.astype(np.uint8).tobytes()
    # deflate writes a new code table every 32,767 bytes: 74 bits, then 7 bits for each byte value in use and 14 for
    # each range of unused byte values
    blocks = -(-len(data) // 32_767)
    codes = blocks * (74 + (7 + 14) * (len(set(data)) + 2)) / 8
    assert len(squeeze(data)) <= huffman_bytes(data, blocks) + codes


@pytest.mark.parametrize("p", [0.99, 0.999])
def test_long_runs_take_less_than_one_bit_per_byte(p):
    data = (np.random.default_rng(0).random(400_000) > p).astype(np.uint8).tobytes()
    # a code of single bytes takes at least one bit per byte; a run takes at most 5 bits for its length, 15 for its
    # code, 1 for its distance, and 15 for the byte after it: less than 50 bits for the 100 bytes of an average run
    assert len(squeeze(data)) < len(data) / 8 / 2


def test_a_decompression_bomb_allocates_no_more_than_expected():
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress(bytes(50_000_000)) + deflate.flush()
    tracemalloc.start()
    with pytest.raises(WireError, match="does not hold"):
        expand(bomb, 100_000)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_missing_or_trailing_bytes_are_refused():
    data = bytes([1, 2, 3] * 200)
    short = squeeze(data)
    for bad in (short[:-1], short + b"\0", b"", b"\xff" * 20, data + b"\0"):
        with pytest.raises(WireError):
            expand(bad, len(data))
    for length in (len(data) - 1, len(data) + 1):
        with pytest.raises(WireError):
            expand(short, length)


@given(st.integers(1, 32), st.integers(0, 300), st.integers(0, 1 << 30))
def test_symbols_round_trip_in_at_most_their_packed_size(width, count, seed):
    values = np.random.default_rng(seed).integers(0, 1 << width, count)
    data = symbols.encode(values, width)
    assert len(data) <= bits.width(count, width)
    assert np.array_equal(symbols.decode(data, count, width), values)


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8, 11])
def test_damaged_symbols_decode_to_valid_levels_or_are_refused(bits):
    rng = np.random.default_rng(bits)
    values = np.clip(rng.normal(0, 0.1, 3000) * (1 << bits), 0, (1 << bits) - 1).astype(np.int64)
    data = symbols.encode(values, bits)
    for _ in range(500):
        bad = bytearray(data)
        bad[rng.integers(len(bad))] = rng.integers(256)
        try:
            out = symbols.decode(bytes(bad[: rng.integers(1, 2 * len(bad))]), len(values), bits)
        except WireError:
            continue
        assert out.shape == values.shape
        assert 0 <= out.min() <= out.max() < 1 << bits


def drawn_levels(width: int, count: int, spread: float, by_region: bool, seed: int) -> np.ndarray:
    draw, middle = np.random.default_rng(seed), (1 << width) // 2
    scale = spread * np.repeat(draw.random(-(-count // 512)) ** 2, 512)[:count] if by_region else spread
    return np.clip(np.rint(draw.normal(size=count) * scale + middle), 0, (1 << width) - 1).astype(np.uint8)


@pytest.mark.parametrize("size", [16, 1000, 32767, 32768, 65535, 65536])
def test_the_lower_bound_is_below_the_length(size):
    for spread in (0.01, 0.3, 3.0, 100.0):
        data = drawn_levels(8, size, spread, by_region=False, seed=0)
        assert at_least(data) < len(squeeze(data.tobytes())), spread
