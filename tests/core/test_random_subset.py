"""Random subsets: as specified, distinct, and all equally likely."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.wire_randomness import philox64
from tests.wire_reader import subset
from thinwire.core.key import Key
from thinwire.core.selection import random_subset

KEYS = st.integers(0, 2**64 - 1).map(Key)


@given(KEYS, st.integers(0, 40))
def test_words_are_those_of_philox4x64(key, n):
    assert key.cpu_words(n).tolist() == philox64(key.value, n)


@given(KEYS, st.integers(1, 700), st.data())
def test_a_subset_is_as_the_wire_format_says(key, n, data):
    k = data.draw(st.integers(0, n))
    found = random_subset(key, n, k)
    assert found.dtype == np.int64
    assert len(found) == k
    assert (np.diff(found) > 0).all()
    assert k == 0 or 0 <= found[0] <= found[-1] < n
    assert found.tolist() == subset(key.value, n, k)


@pytest.mark.parametrize(
    ("n", "k"), [(30_000, 9_000), (20_000, 16_000), (3_000_000_000, 300)], ids=["long", "most", "words left out"]
)
def test_a_large_subset_is_as_the_wire_format_says(n, k):
    assert random_subset(Key(5), n, k).tolist() == subset(5, n, k)


@pytest.mark.parametrize("k", [2, 4])
def test_all_small_subsets_are_equally_likely(k):
    draws = 6000
    counts = Counter(tuple(random_subset(Key(i), 6, k).tolist()) for i in range(draws))
    every = list(itertools.combinations(range(6), k))
    expected = draws / len(every)
    chi = sum((counts[one] - expected) ** 2 for one in every) / expected
    assert chi < 36.1, "the 0.999 quantile of chi-squared with 14 degrees of freedom"


def test_all_positions_of_a_large_subset_are_equally_likely():
    n, k, draws = 400, 100, 4000
    counts = np.zeros(n)
    for i in range(draws):
        counts[random_subset(Key(i), n, k)] += 1
    share = k / n
    z = (counts - draws * share) / np.sqrt(draws * share * (1 - share))
    assert abs(z).max() < 4.5
    assert np.var(z) == pytest.approx(1.0, abs=0.25)


def test_uniform_values_are_multiples_of_2_to_the_minus_24():
    drawn = Key(3).cpu_uniform()(10_000)
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert (drawn * 2**24 == np.floor(drawn * 2**24)).all()
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
