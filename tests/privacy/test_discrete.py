"""Tests of the discrete Gaussian: probabilities, moments, fixed values."""

import hashlib
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from thinwire.core.key import Key, SecretKey
from thinwire.privacy.discrete import _accepts, _coarse, _table, discrete_gaussian


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The chi-square statistic in standard deviations from its mean; bins with few expected samples are merged."""
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
    """Probabilities of -far .. far."""
    weights = np.array([math.exp(-x * x / (2 * variance)) for x in range(-far, far + 1)])
    return weights / weights.sum()


@pytest.mark.parametrize("variance", [1, 2, 9, 100, 2500, 70_000, 300_000])
def test_samples_have_the_exact_probabilities(variance):
    """From the table alone up to a standard deviation of 255, then with low bits (70,000 one, 300,000 two)."""
    n, far = 400_000, math.ceil(8 * math.sqrt(variance))
    drawn = discrete_gaussian(n, variance, Key(11).fold(variance))
    assert np.abs(drawn).max() <= far
    counts = np.bincount(drawn + far, minlength=2 * far + 1)
    assert abs(chi_square(counts, n * probabilities(variance, far))) < 4


@pytest.mark.parametrize("variance", [300_000, (1 << 40) + 12345, 1 << 56])
def test_low_bits_are_uniform(variance):
    """Near the center the density is constant to 1e-6 over 2^m neighbors, so their low bits are uniform."""
    drawn = discrete_gaussian(400_000, variance, Key(3))
    counts = np.bincount(np.abs(drawn) % 8, minlength=8)[1:]  # 0 has one sign, so its bin differs
    assert abs(chi_square(counts, np.full(7, counts.sum() / 7))) < 4


@pytest.mark.parametrize("variance", [1, 100, 70_000, 1 << 30, 1 << 56])
def test_moments_equal_those_of_a_gaussian(variance):
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
                assert abs(exact - table.whole[i]) < 1 << 10  # a tail of 2^-118 is truncated
        assert np.array_equal(table.high, [threshold >> 64 for threshold in table.whole])


def test_ties_of_64_bits_draw_more_bits():
    table = _table(100, 0)
    at = 7
    high = np.full(1500, table.high[at])
    found = _coarse(table, high, Key(1))
    assert set(np.unique(found)) == {at, at + 1}
    below = (table.whole[at] & (1 << 64) - 1) / 2**64  # the fraction of lower bits below the threshold
    assert (found == at).mean() == pytest.approx(below, abs=0.05)


@pytest.mark.parametrize("a", [0, 1, 300, 999])
def test_acceptance_has_the_right_probability(a):
    n = 200_000
    fraction = _accepts(np.full(n, a), 1000, Key(2).fold(a)).mean()
    assert fraction == pytest.approx(math.exp(-a / 1000), abs=4 * math.sqrt(0.25 / n))


def test_samples_are_fixed_on_all_platforms():
    """Integer arithmetic only: the digest is the same on x86 and ARM. A change would break reproducibility."""
    drawn = [discrete_gaussian(70_000, variance, Key(1)) for variance in (1, 70_000, 1 << 56)]
    digest = hashlib.sha256(b"".join(one.astype("<i8").tobytes() for one in drawn)).hexdigest()
    assert digest[:16] == "f62abd8a9325c93b"
    assert np.array_equal(discrete_gaussian(10, 5, Key(1)), discrete_gaussian(10, 5, Key(1)))
    assert not np.array_equal(discrete_gaussian(10, 50, Key(1)), discrete_gaussian(10, 50, Key(2)))


def test_a_secret_key_draws_the_same_distribution():
    drawn = discrete_gaussian(300_000, 100, SecretKey(1 << 200))
    assert abs(chi_square(np.bincount(drawn + 80, minlength=161), 300_000 * probabilities(100, 80))) < 4


def test_invalid_variances_are_refused():
    for variance in (0, -1, (1 << 56) + 1):
        with pytest.raises(ValueError, match="from 1 to"):
            discrete_gaussian(1, variance, Key(0))
    assert len(discrete_gaussian(0, 1, Key(0))) == 0


@pytest.mark.parametrize("b", [3, 1 << 57, (1 << 57) - 12345])
def test_acceptance_is_exact_for_large_denominators(b):
    """Random words above the limit are drawn again: ignoring them would favor short series by 1 %."""
    n, exponent = 400_000, (2 * b // 3) / b
    accepted = _accepts(np.full(n, 2 * b // 3, np.int64), b, Key(5)).mean()
    assert abs(accepted - math.exp(-exponent)) < 4 * math.sqrt(0.25 / n)
