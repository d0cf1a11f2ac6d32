"""The discrete Gaussian: its probabilities, its moments, its bits."""

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from thinwire.core.key import Key
from thinwire.core.secret_key import SecretKey
from thinwire.privacy.discrete import _coarse, _keeps, _table, discrete_gaussian


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the statistic lies above its mean; bins with few expected numbers are joined."""
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    few = int((expected >= 20).sum())
    observed = np.append(observed[:few], observed[few:].sum())
    expected = np.append(expected[:few], expected[few:].sum())
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def probabilities(variance: int, far: int) -> np.ndarray:
    """Of -far .. far."""
    weights = np.array([math.exp(-x * x / (2 * variance)) for x in range(-far, far + 1)])
    return weights / weights.sum()


@pytest.mark.parametrize("variance", [1, 2, 9, 100, 2500, 70_000, 300_000])
def test_numbers_come_with_their_exact_probabilities(variance):
    """By a table alone up to a standard deviation of 255, then with low bits (70,000 one, 300,000 two)."""
    n, far = 400_000, math.ceil(8 * math.sqrt(variance))
    drawn = discrete_gaussian(n, variance, Key(11).fold(variance))
    assert np.abs(drawn).max() <= far
    counts = np.bincount(drawn + far, minlength=2 * far + 1)
    assert abs(chi_square(counts, n * probabilities(variance, far))) < 4


@pytest.mark.parametrize("variance", [300_000, (1 << 40) + 12345, 1 << 56])
def test_low_bits_are_as_likely_as_they_should_be(variance):
    """Near the middle the density is flat to a millionth over 2^m neighbors: their low bits are uniform there."""
    drawn = discrete_gaussian(400_000, variance, Key(3))
    counts = np.bincount(np.abs(drawn) % 8, minlength=8)[1:]  # 0 has one sign, so its bin is another size
    assert abs(chi_square(counts, np.full(7, counts.sum() / 7))) < 4


@pytest.mark.parametrize("variance", [1, 100, 70_000, 1 << 30, 1 << 56])
def test_moments_are_those_of_a_gaussian(variance):
    n = 500_000
    drawn = discrete_gaussian(n, variance, Key(5).fold("moments", variance)) / math.sqrt(variance)
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert (drawn**2).mean() == pytest.approx(1, abs=4 * math.sqrt(2 / n))
    assert (drawn**3).mean() == pytest.approx(0, abs=4 * math.sqrt(15 / n))
    assert (drawn**4).mean() == pytest.approx(3 if variance > 1 else 3 - 1e-3, abs=4 * math.sqrt(96 / n))
    assert np.corrcoef(drawn[1:], drawn[:-1])[0, 1] == pytest.approx(0, abs=4 / math.sqrt(n))
    if variance > 1000:  # Kolmogorov-Smirnov against the continuous one
        ranks = np.array([math.erf(x / math.sqrt(2)) for x in np.sort(drawn)[::50]]) / 2 + 0.5
        assert np.abs(ranks - np.arange(0, n, 50) / n).max() < 1.95 / math.sqrt(n)


def test_the_table_is_exact_to_128_bits():
    for variance, shift in ((1, 0), (1 << 56, 21)):
        table = _table(variance, shift)
        with localcontext(prec=80):
            weights = [(Decimal(-h * h * 4**shift) / (2 * variance)).exp() for h in range(len(table.whole) + 50)]
            total = sum(weights)
            for i in (0, 1, 5, len(table.whole) // 2, len(table.whole) - 1):
                exact = sum(weights[: i + 1]) / total * (1 << 128)
                assert abs(exact - table.whole[i]) < 1 << 10  # a tail of 2^-118 is cut
        assert np.array_equal(table.high, [threshold >> 64 for threshold in table.whole])


def test_where_64_bits_do_not_decide_more_are_drawn():
    table = _table(100, 0)
    at = 7
    high = np.full(1500, table.high[at])
    found = _coarse(table, high, Key(1))
    assert set(np.unique(found)) == {at, at + 1}
    below = (table.whole[at] & (1 << 64) - 1) / 2**64  # the share of lower bits that stay under the threshold
    assert (found == at).mean() == pytest.approx(below, abs=0.05)


@pytest.mark.parametrize("a", [0, 1, 300, 999])
def test_what_is_kept_is_kept_as_often_as_it_should_be(a):
    n = 200_000
    share = _keeps(np.full(n, a), 1000, Key(2).fold(a)).mean()
    assert share == pytest.approx(math.exp(-a / 1000), abs=4 * math.sqrt(0.25 / n))


def test_the_same_bits_everywhere():
    """Integers only: this digest holds on x86 and ARM, and must never change, or runs cannot be repeated."""
    drawn = [discrete_gaussian(70_000, variance, Key(1)) for variance in (1, 70_000, 1 << 56)]
    digest = hashlib.sha256(b"".join(one.astype("<i8").tobytes() for one in drawn)).hexdigest()
    assert digest[:16] == "f62abd8a9325c93b"
    assert np.array_equal(discrete_gaussian(10, 5, Key(1)), discrete_gaussian(10, 5, Key(1)))
    assert not np.array_equal(discrete_gaussian(10, 50, Key(1)), discrete_gaussian(10, 50, Key(2)))


def test_a_secret_key_draws_the_same_distribution():
    drawn = discrete_gaussian(300_000, 100, SecretKey(1 << 200))
    assert abs(chi_square(np.bincount(drawn + 80, minlength=161), 300_000 * probabilities(100, 80))) < 4


def test_variances_that_cannot_be_are_refused():
    for variance in (0, -1, (1 << 56) + 1):
        with pytest.raises(ValueError, match="from 1 to"):
            discrete_gaussian(1, variance, Key(0))
    assert len(discrete_gaussian(0, 1, Key(0))) == 0


@pytest.mark.parametrize("b", [3, 1 << 57, (1 << 57) - 12345])
def test_numbers_are_kept_with_exactly_the_probability_that_they_should(b):
    """Coins whose random number says nothing are tossed again: leaving them out would favor short series by 1 %."""
    n, share = 400_000, (2 * b // 3) / b
    kept = _keeps(np.full(n, 2 * b // 3, np.int64), b, Key(5)).mean()
    assert abs(kept - math.exp(-share)) < 4 * math.sqrt(0.25 / n)
