"""Tests of entropy-coded integers: ans.py and integers.py."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thinwire.errors import WireError
from thinwire.wire import ans, integers

VALUES = st.lists(st.integers(-integers.LARGEST, integers.LARGEST), min_size=0, max_size=60)


def rounded(n: int, spread: float, seed: int = 1) -> np.ndarray:
    return np.rint(np.random.default_rng(seed).normal(0, spread, n)).astype(np.int64)


def entropy_bytes(values: np.ndarray) -> float:
    _, counts = np.unique(values, return_counts=True)
    share = counts / len(values)
    return float(-(counts * np.log2(share)).sum() / 8)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_any_integers_come_back(values):
    array = np.array(values, np.int64)
    assert integers.decode(integers.encode(array), len(array)).tolist() == values


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 2.5, 9.0, 60.0, 5e8])
def test_integers_of_any_spread_come_back(spread):
    for n in (1, 2, 255, 4096, 4097, 20_000):
        values = rounded(n, spread)
        assert (integers.decode(integers.encode(values), n) == values).all(), n


@pytest.mark.parametrize("spread", [0.3, 0.5, 1.0, 2.0, 5.0, 20.0])
def test_a_thousand_values_are_near_their_entropy(spread):
    values = rounded(1000, spread)
    assert len(integers.encode(values)) <= 1.04 * entropy_bytes(values) + 8


def test_all_models_have_the_frequencies_of_the_format():
    """Computed from integers alone: another sum would be another format."""
    total = 0
    for number in range(ans.MODELS):
        frequency, before, symbol = ans.model(number)
        assert sum(frequency) == len(symbol) == 1 << 14
        assert min(frequency) >= 1
        assert frequency == frequency[::-1]
        assert before == [sum(frequency[:s]) for s in range(len(frequency))]
        total = (31 * total + sum(i * f for i, f in enumerate(frequency[: ans.LARGEST]))) % 1_000_003
    assert total == 315_147


def test_every_model_codes_every_symbol():
    symbols = np.array([*range(-ans.LARGEST, ans.LARGEST + 1), 0, 0, 0])
    for number in range(ans.MODELS):
        assert (ans.decode(ans.encode(symbols, number), len(symbols), number) == symbols).all(), number


@pytest.mark.parametrize("n", [200, 5000])
def test_damaged_bytes_are_refused_or_decode_to_that_many_values(n):
    data, random = integers.encode(rounded(n, 1.5)), np.random.default_rng(3)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[random.integers(len(damaged))] ^= 1 << int(random.integers(8))
        try:
            assert len(integers.decode(bytes(damaged), n)) == n
        except WireError:
            refused += 1
    assert refused > 0
    for cut in (0, 1, 3, len(data) - 1):
        with pytest.raises(WireError):
            integers.decode(data[:cut], n)
    with pytest.raises(WireError):
        integers.decode(data + b"\0\0", n)


def test_more_large_values_than_announced_are_refused():
    data = bytearray(integers.encode(np.array([*[0] * 30, 40, 0, 0, -50])))
    assert data[0] & 128
    with pytest.raises(WireError, match="announced"):
        integers.decode(bytes([data[0], 1, data[2], *data[4:]]), 34)
