"""Tests of bitmaps of matrices and of bytes by regions."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from thinwire.codecs import Peer, Quantize, TopK
from thinwire.core.key import Key
from thinwire.core.tree import Spec
from thinwire.errors import WireError
from thinwire.wire import entropy, indices, regions, row_bits, symbols

PEER = Peer(Key(0))
FACTORS = ((16, 4000), (4000, 16), (7,), (9, 300))


def factors():
    """Low-rank factors whose values differ by input, by output and by column."""
    key, tree = Key(3), {}
    for i, shape in enumerate(FACTORS):
        size = [key.fold(f"{i} {axis}").normal(one).exp() for axis, one in enumerate(shape)]
        scale = size[0] if len(shape) == 1 else size[0][:, None] * size[1]
        tree[f"b{i}"] = key.fold(f"{i}").normal(*shape) * scale
    return tree


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 12)), min_size=1, max_size=4), st.integers(0, 100))
def test_bitmaps_of_matrices_round_trip(shapes, seed):
    shapes = [shape if i % 2 else shape[::-1] for i, shape in enumerate(shapes)]
    n = sum(r * c for r, c in shapes)
    bits = (np.random.default_rng(seed).random(n) < 0.3).astype(np.uint8)
    if n:
        assert np.array_equal(row_bits.decode(row_bits.encode(bits, shapes, np.inf), n, shapes), bits)


def test_positions_in_few_rows_and_columns_take_fewer_bytes_and_decode_to_the_same_values():
    tree = factors()
    spec, codec = Spec.of(tree), TopK(0.25, inner=Quantize(4, per="tree"))
    vector = torch.cat([block.reshape(-1) for block in tree.values()])
    at = vector.abs().topk(int(0.25 * len(vector))).indices.sort().values
    alone = indices.encode(at.numpy(), len(vector))
    together = indices.encode(at.numpy(), len(vector), [(16, 4000), (4000, 16), (1, 7), (9, 300)])
    assert together[0] == indices.ROWS
    assert len(together) < 0.85 * len(alone)
    sent, _ = codec.encode(tree, {}, PEER)
    found = torch.cat([block.reshape(-1) for block in codec.decode(sent, spec, PEER).values()])
    values = {"values": vector[at]}
    levels, _ = codec.inner.encode(values, {}, PEER)
    expected = torch.zeros_like(vector)
    expected[at] = codec.inner.decode(levels, Spec.of(values), PEER)["values"]
    assert torch.equal(found, expected)


def test_random_positions_are_not_sent_in_rows():
    at = np.sort(np.random.default_rng(0).choice(64_000, 16_000, replace=False))
    assert indices.encode(at, 64_000, [(16, 4000)])[0] != indices.ROWS


def test_changed_rows_are_refused_or_read_within_their_size():
    n, shapes, rng = 19_200, [(16, 600), (600, 16)], np.random.default_rng(1)
    bits = (rng.random((16, 1200)) < rng.random(1200) ** 3).astype(np.uint8).reshape(-1)
    data, k = bytes([indices.ROWS]) + row_bits.encode(bits, shapes, np.inf), int(bits.sum())
    assert np.array_equal(indices.decode(data, n, k, shapes), np.flatnonzero(bits))
    refused = 0
    for _ in range(300):
        bad = bytearray(data)
        bad[rng.integers(1, min(len(bad), rng.choice([60, 2000])))] ^= 1 << int(rng.integers(8))
        try:
            found = indices.decode(bytes(bad[: rng.integers(1, 2 * len(bad))]), n, k, shapes)
            assert len(found) == k
            assert int(found[-1]) < n
        except WireError:
            refused += 1
    assert refused > 250


def test_columns_must_be_an_order():
    shapes = [(600, 16)]
    data = row_bits.encode(np.ones(9600, np.uint8), shapes, np.inf)
    with pytest.raises(WireError, match="not an order"):
        row_bits.decode(b"\0" * 8 + data[8:], 9600, shapes)


@pytest.mark.parametrize("bits", [2, 4])
def test_levels_that_are_larger_in_some_regions_take_fewer_bytes(bits):
    rng, highest = np.random.default_rng(0), (1 << bits) - 1
    is_large = np.repeat(rng.random(200) < 0.3, 8 * 128 // bits)
    levels = np.where(is_large, rng.integers(0, highest, len(is_large)), (highest - 1) // 2).astype(np.uint8)
    data = symbols.encode(levels, bits)
    assert data[0] == 7
    assert np.array_equal(symbols.decode(data, len(levels), bits), levels)
    whole = entropy.squeeze(np.packbits(np.unpackbits(levels[:, None], axis=1, bitorder="little")[:, :bits]).tobytes())
    assert len(data) < 0.95 * len(whole)
    with pytest.raises(WireError):
        symbols.decode(data[:-3], len(levels), bits)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 5000])
def test_regions_round_trip(length):
    data = np.random.default_rng(length).integers(0, 3, length).astype(np.uint8)
    short = regions.squeeze(data, regions.classes(data))
    assert np.array_equal(regions.expand(short, length), data)
    with pytest.raises(WireError):
        regions.expand(short, length + 1)
