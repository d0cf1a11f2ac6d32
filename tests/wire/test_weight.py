"""Tests of the weight of a client: exact, short for counts, and with one encoding."""

import math
import struct

import pytest
from hypothesis import given, strategies as st

from tests.wire_reader import read_weight
from thinwire.errors import WireError
from thinwire.wire.bits import read_varint, varint
from thinwire.wire.message import _MAX_COUNT as MAX_COUNT, pack_weight, unpack_weight


def as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


@given(st.floats(width=32) | st.integers(0, 1 << 26).map(float))
def test_a_weight_is_received_as_float32(weight):
    received = unpack_weight(pack_weight(weight))
    assert received == as_float32(weight) or (math.isnan(received) and math.isnan(weight))
    if not math.isnan(weight):
        assert read_weight(read_varint(pack_weight(weight))[0]) == received


@pytest.mark.parametrize(
    ("weight", "size"), [(0, 1), (1, 1), (127, 1), (128, 2), (600, 2), (16_383, 2), (16_384, 3), (MAX_COUNT, 4)]
)
def test_a_number_of_examples_is_short(weight, size):
    assert pack_weight(float(weight)) == varint(weight)
    assert len(pack_weight(float(weight))) == size


@pytest.mark.parametrize("weight", [0.75, 1e-9, MAX_COUNT + 2.0, 2.0**40, 600.5])
def test_other_weights_have_five_bytes(weight):
    assert len(pack_weight(weight)) == 5
    assert unpack_weight(pack_weight(weight)) == as_float32(weight)


@given(st.integers(0, (1 << 35) - 1) | st.integers(0, 1 << 32).map(lambda bits: MAX_COUNT + bits))
def test_a_weight_has_one_encoding(value):
    data = varint(value)
    try:
        weight = unpack_weight(data)
    except WireError:
        return
    if math.isnan(weight):  # refused by its range; a conversion may change which NaN it is
        return
    assert pack_weight(weight) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "end inside a length"),
        (b"\x80\x00", "shortest form"),
        (varint(600) + b"\0", "1 bytes follow the end of a weight"),
        (varint(MAX_COUNT + (1 << 32)), "neither a count nor a float32"),
        (varint(MAX_COUNT + 0x44160000), "the weight 600 must be written as a count"),
        (varint(MAX_COUNT + 0x80000000), "the weight -0 must be written as a count"),
        (varint(MAX_COUNT + 0x4B800000), "must be written as a count"),
    ],
)
def test_other_bytes_are_refused(data, message):
    with pytest.raises(WireError, match=message):
        unpack_weight(data)
