"""Tests of the code of bits of which one value is more frequent."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire_reader import read_bits
from thinwire.errors import WireError
from thinwire.wire import biased_bits
from thinwire.wire.biased_bits import decode, encode


def drawn(n, share, seed=0):
    return np.random.default_rng(seed).random(n) < share


def entropy(bits):
    """The entropy of the share of ones, in bytes."""
    p = np.count_nonzero(bits) / len(bits)
    return 0.0 if p in (0, 1) else -len(bits) * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8


@given(st.lists(st.booleans(), max_size=300))
def test_bits_are_restored_and_never_longer_than_packed(bits):
    data, ones = encode(np.array(bits, np.bool_)), sum(bits)
    assert decode(data, len(bits), ones).tolist() == bits
    assert read_bits(data, len(bits), ones) == bits
    assert len(data) <= -(-len(bits) // 8)


@pytest.mark.parametrize("share", [0.003, 0.05, 0.3, 0.5, 0.8, 0.99])
def test_the_code_takes_the_entropy_and_a_few_bytes(share):
    bits = drawn(60_000, share)
    data = encode(bits)
    assert np.array_equal(decode(data, len(bits), np.count_nonzero(bits)), bits)
    assert entropy(bits) <= len(data) <= 1.003 * entropy(bits) + 12


def test_several_states_at_a_time_write_the_bytes_of_one_after_another(monkeypatch):
    monkeypatch.setattr(biased_bits, "_EACH", 64)  # 5001 bytes: 78 states
    bits = drawn(40_003, 0.2)
    ones = np.count_nonzero(bits)
    data = encode(bits)
    assert np.array_equal(decode(data, len(bits), ones), bits)
    monkeypatch.setattr(biased_bits, "_MANY", 1000)
    assert encode(bits) == data
    assert np.array_equal(decode(data, len(bits), ones), bits)


@pytest.mark.parametrize("many", [1, 1000])
def test_damaged_bytes_are_refused(monkeypatch, many):
    monkeypatch.setattr(biased_bits, "_MANY", many)
    bits = drawn(3000, 0.1)
    ones, data = np.count_nonzero(bits), encode(bits)
    random = np.random.default_rng(1)
    damaged = [data[:-4], data + b"\0" * 4, data[:-1], data[:4], b"", b"\0" * len(data), b"\xff" * len(data)]
    for _ in range(200):
        broken = bytearray(data)
        broken[random.integers(len(data))] ^= 1 << random.integers(8)
        damaged.append(bytes(broken))
    for one in damaged:
        with pytest.raises(WireError):
            decode(one, len(bits), ones)
    with pytest.raises(WireError):
        decode(data, len(bits), ones + 1)
    with pytest.raises(WireError, match="take no bytes"):
        decode(b"a", 10, 10)
