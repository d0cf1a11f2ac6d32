"""Tests of the encoding of sets of positions."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thinwire.errors import WireError
from thinwire.wire import indices


def drawn(n, k, seed=0):
    return np.sort(np.random.default_rng(seed).choice(n, k, replace=False))


@given(st.sets(st.integers(0, 4999), max_size=600), st.integers(0, 3000))
def test_positions_round_trip(chosen, more):
    n = max(chosen, default=0) + 1 + more
    at = np.array(sorted(chosen), np.int64)
    assert indices.decode(indices.encode(at, n), n, len(at)).tolist() == at.tolist()


@pytest.mark.parametrize("n", [100_000, 1_000_000])
@pytest.mark.parametrize("density", [1 / 4, 0.1, 0.01])
def test_encoded_size_is_close_to_the_lower_bound(n, density):
    k = int(n * density)
    data = indices.encode(drawn(n, k), n)
    bound = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / 8
    # within 3 % from 4,000 positions on; a Rice code of geometric gaps is within 4 % of their entropy, plus a header
    assert bound < len(data) <= (1.03 * bound if k >= 4000 else 1.04 * bound + 2)
    assert np.array_equal(indices.decode(data, n, k), drawn(n, k))


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_empty_and_full_sets_take_no_bytes(n):
    assert indices.encode(np.zeros(0, np.int64), n) == b""
    assert indices.encode(np.arange(n), n) == b""
    assert indices.decode(b"", n, n).tolist() == list(range(n))
    with pytest.raises(WireError):
        indices.decode(b"\0", n, n)


def test_clustered_positions_with_long_gaps_round_trip():
    n = 10_000_000
    at = np.unique(np.concatenate([np.arange(s, s + 3000) for s in (5, 400_000, 9_990_000)] + [drawn(n, 40)]))
    data = indices.encode(at, n)
    assert data[0] == indices.GAPS
    # r low bits of each gap, at most one bit for its high part, three bytes for a long one, the code's table
    low, long = (n // len(at)).bit_length() - 1 - 4, 43
    assert len(data) < len(at) * (low + 1) / 8 + 3 * long + 300
    assert np.array_equal(indices.decode(data, n, len(at)), at)


@pytest.mark.parametrize(
    ("n", "k", "form"),
    [(1000, 30, indices.RICE), (100_000, 8000, indices.GAPS), (20_000, 9000, indices.BITMAP), (64, 1, indices.RICE)],
)
def test_damaged_positions_decode_to_valid_positions_or_are_refused(n, k, form):
    data = indices.encode(drawn(n, k), n)
    assert data[0] == form
    rng = np.random.default_rng(n)
    wrong = [data[:i] for i in range(0, len(data), 1 + len(data) // 200)] + [data + b"\0", data * 2]
    for _ in range(1500):
        bad = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            bad[min(int(rng.exponential(1 + len(bad) / rng.integers(1, 40))), len(bad) - 1)] = rng.integers(256)
        wrong.append(bytes(bad))
    for bad in wrong:
        try:
            out = indices.decode(bad, n, k)
        except WireError:
            continue
        assert len(out) == k
        assert out[0] >= 0
        assert out[-1] < n
        assert (np.diff(out) > 0).all()


@pytest.mark.parametrize("k", [-1, 11])
def test_more_positions_than_values_are_refused(k):
    with pytest.raises(WireError):
        indices.decode(b"\0\0", 10, k)


def test_bytes_of_a_small_set_are_fixed():
    # gaps 3, 13, 882; seven low bits 3, 13, 114; high parts 0, 0, 6
    low, unary = 3 | 13 << 7 | 114 << 14, 0b1_0000_0011
    expected = bytes([indices.RICE, 7]) + low.to_bytes(3, "little") + unary.to_bytes(2, "little")
    assert indices.encode(np.array([3, 17, 900]), 1000) == expected


@pytest.mark.parametrize(
    ("n", "k", "form"), [(100, 60, indices.GAPS), (100, 3, indices.BITMAP), (9000, 4096, indices.RICE)]
)
def test_forms_that_are_never_sent_are_refused(n, k, form):
    with pytest.raises(WireError, match="never sent in form"):
        indices.decode(bytes([form]) + bytes(40), n, k)


def test_too_many_bytes_for_a_small_set_are_refused_before_unpacking():
    tracemalloc.start()
    with pytest.raises(WireError, match="longer than all 1000 values"):
        indices.decode(bytes([indices.RICE, 0]) + bytes(10_000_000), 1000, 3)
    assert tracemalloc.get_traced_memory()[1] < 20_100_000  # the bytes themselves, twice
    tracemalloc.stop()
