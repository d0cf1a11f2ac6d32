"""Tests of bit packing and variable-length integers."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thinwire.errors import WireError
from thinwire.wire import bits


@given(st.integers(0, 48), st.lists(st.integers(0, 1 << 62), max_size=70))
def test_pack_round_trip(width, values):
    values = np.array([v & ((1 << width) - 1) for v in values], np.int64)
    data = bits.pack(values, width)
    assert len(data) == bits.width(len(values), width)
    assert bits.unpack(data, len(values), width).tolist() == values.tolist()


@given(st.integers(1, 48), st.lists(st.integers(0, 1 << 62), min_size=1, max_size=40))
def test_value_i_starts_at_bit_i_times_width(width, values):
    values = [v & ((1 << width) - 1) for v in values]
    whole = sum(v << i * width for i, v in enumerate(values))
    assert bits.pack(np.array(values), width) == whole.to_bytes(bits.width(len(values), width), "little")


@pytest.mark.parametrize("width", [3, 8, 11, 17])
def test_long_streams_round_trip(width):
    values = np.arange(200_003) & ((1 << width) - 1)
    assert np.array_equal(bits.unpack(bits.pack(values, width), len(values), width), values)


def test_packing_of_many_values_equals_packing_of_few():
    for width in range(1, 57):
        values = np.random.default_rng(0).integers(0, 1 << width, 5_003)
        parts = [values[at : at + 800] for at in range(0, len(values), 800)]
        assert bits.pack(values, width) == b"".join(bits.pack(part, width) for part in parts), width


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_wrong_number_of_bytes_is_refused(length):
    with pytest.raises(WireError, match="take 2 bytes"):
        bits.unpack(bytes(length), 5, 3)


@pytest.mark.parametrize("width", [1, 3, 9])
def test_bits_after_the_last_value_are_refused(width):
    data = bytearray(bits.pack(np.zeros(5, np.int64), width))
    data[-1] |= 0x80
    with pytest.raises(WireError, match="after the last"):
        bits.unpack(bytes(data), 5, width)


@given(st.integers(0, (1 << 35) - 1))
def test_varint_round_trip(value):
    data = bits.varint(value)
    assert bits.read_varint(b"x" + data + b"y", 1) == (value, 1 + len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x00", b"\xff" * 5])
def test_invalid_varints_are_refused(data):
    with pytest.raises(WireError):
        bits.read_varint(data)


@pytest.mark.parametrize("value", [-1, 1 << 35])
def test_varints_beyond_five_bytes_are_refused(value):
    with pytest.raises(WireError):
        bits.varint(value)
