"""Tests of the raw codec."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from thinwire.codecs import Peer, Raw
from thinwire.core.key import Key
from thinwire.core.tree import DTYPES, Spec, Vector, same
from thinwire.errors import WireError

PEER = Peer(Key(0))


@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1 << 32)),
        max_size=5,
    )
)
def test_any_bits_round_trip(blocks):
    tree = {}
    for i, (dtype, shape, seed) in enumerate(blocks):
        width = DTYPES[dtype][1]
        bits = (Key(seed).words(width * torch.Size(shape).numel()) & (1 if dtype is torch.bool else 0xFF)).to(
            torch.uint8
        )
        tree[f"b{i}"] = (bits.view(dtype) if len(bits) else torch.zeros(0, dtype=dtype)).view(shape)
    spec = Spec.of(tree)
    data, _ = Raw().encode(tree, {}, PEER)
    assert len(data) == Raw().size(spec) == spec.nbytes
    assert same(Raw().decode(data, spec, PEER), tree)


def test_the_bytes_are_little_endian_and_in_order():
    tree = {"a": torch.tensor([1, -2], dtype=torch.int16), "b": torch.tensor(1.5, dtype=torch.bfloat16)}
    assert Raw().encode(tree, {}, PEER)[0].hex() == "0100feffc03f"


def test_decoded_blocks_are_writable():
    data = bytes(8)
    out = Raw().decode(data, Spec.of({"w": torch.zeros(2)}), PEER)["w"]
    out += 1
    assert data == bytes(8)


@pytest.mark.parametrize("n", [0, 7, 9])
def test_a_wrong_number_of_bytes_is_refused(n):
    with pytest.raises(WireError, match=f"expected 8 bytes of raw values, got {n}"):
        Raw().decode(bytes(n), Spec.of({"w": torch.zeros(2)}), PEER)


def test_a_boolean_byte_above_one_is_refused():
    with pytest.raises(WireError, match="block 't'"):
        Raw().decode(b"\x00\x02", Spec.of({"t": torch.tensor([True, False])}), PEER)


def test_contiguous_values_are_not_copied_by_encode_or_decode():
    tree = Vector(torch.arange(6.0), Spec.of({"a": torch.zeros(2, 2), "b": torch.zeros(2)}))
    data, _ = Raw().encode(tree, {}, PEER)
    assert isinstance(data, memoryview)
    assert bytes(data) == Raw().encode(dict(tree), {}, PEER)[0]
    buffer = np.empty(32, np.uint8)
    for start, shared in ((0, True), (8, True), (3, False)):  # misaligned values are copied
        buffer[start : start + 24] = np.frombuffer(data, np.uint8)
        got = Raw().decode(buffer[start : start + 24].data, Spec.of(tree), PEER)
        assert same(dict(got), dict(tree))
        got["b"][1] += 1
        assert (bytes(buffer[start : start + 24]) != bytes(data)) is shared
    frozen = bytes(data)
    Raw().decode(frozen, Spec.of(tree), PEER)["b"].add_(1)
    assert frozen == bytes(data), "read-only memory is never written to"
