"""Tests of the code of bits of which one value is more frequent."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

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


@settings(max_examples=50)
@given(st.lists(st.lists(st.booleans(), max_size=60), max_size=6))
def test_groups_are_restored_and_never_longer_than_packed(groups):
    data, counts = encode([np.array(bits, np.bool_) for bits in groups]), [(len(bits), sum(bits)) for bits in groups]
    assert [bits.tolist() for bits in decode(data, counts)] == groups
    assert read_bits(data, counts) == groups
    assert len(data) <= sum(-(-len(bits) // 8) for bits in groups)


@pytest.mark.parametrize("share", [0.003, 0.05, 0.3, 0.5, 0.8, 0.99])
def test_the_code_takes_the_entropy_and_a_few_bytes(share):
    bits = drawn(60_000, share)
    data = encode([bits])
    assert np.array_equal(decode(data, [(len(bits), int(bits.sum()))])[0], bits)
    assert entropy(bits) <= len(data) <= 1.003 * entropy(bits) + 12


def test_each_group_takes_its_own_entropy():
    groups = [drawn(20_000, share) for share in (0.01, 0.5, 0.9)]
    assert len(encode(groups)) <= 1.003 * sum(map(entropy, groups)) + 16


@pytest.mark.parametrize("shares", [(0.2,), (0.02, 0.6, 0.0, 0.3)])
def test_several_states_share_one_stream_of_words(monkeypatch, shares):
    monkeypatch.setattr(biased_bits, "_EACH", 64)  # some hundred states
    groups = [drawn(20_003, share, i) for i, share in enumerate(shares)]
    counts = [(len(bits), int(bits.sum())) for bits in groups]
    data = encode(groups)
    assert all(map(np.array_equal, decode(data, counts), groups))


def test_damaged_bytes_are_refused():
    bits = drawn(800, 0.05)
    ones, data = int(bits.sum()), encode([bits])
    random = np.random.default_rng(1)
    damaged = [data[:-4], data + b"\0" * 4, data[:-1], data[:4], b"", b"\0" * len(data), b"\xff" * len(data)]
    for _ in range(60):
        broken = bytearray(data)
        broken[random.integers(len(data))] ^= 1 << random.integers(8)
        damaged.append(bytes(broken))
    for one in damaged:
        with pytest.raises(WireError):
            decode(one, [(800, ones)])
    for counts in ([(800, ones + 1)], [(10, 11)], [(10, 10)]):
        with pytest.raises(WireError):
            decode(data, counts)
