"""Tests of privacy accounting against exact divergences and loss distributions."""

import math

import numpy as np
import pytest

from thinwire.privacy.accountant import epsilon, gap, renyi, renyi_fractional


def discrete(variance: float, far: int = 400) -> np.ndarray:
    weights = np.exp(-(np.arange(-far, far + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


def shifted(p: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate((np.zeros(by), p[: len(p) - by]))


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    seen = (p > 1e-290) & (q > 1e-290)
    terms = order * np.log(p[seen]) + (1 - order) * np.log(q[seen])
    return float(np.logaddexp.reduce(terms)) / (order - 1)


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
@pytest.mark.parametrize(("variance", "step"), [(1, 1), (4, 1), (4, 3), (50, 5)])
def test_divergences_of_sampled_noise_are_below_the_bound(variance, step, rate):
    """Divergences of one sampled value, summed over all integers, in both directions."""
    without = discrete(variance)
    taken = (1 - rate) * without + rate * shifted(without, step)
    c = step / math.sqrt(variance)
    for order in (2, 3, 5, 8):
        real = max(divergence(taken, without, order), divergence(without, taken, order))
        assert real <= renyi(order, c, rate) * (1 + 1e-9)
    for order in (1.1, 1.5, 1.9, 2, 3.3):
        real = max(divergence(taken, without, order), divergence(without, taken, order))
        assert real <= renyi_fractional(order, c, rate) * (1 + 1e-9)


@pytest.mark.parametrize("clients", [2, 3, 10])
@pytest.mark.parametrize("variance", [1, 2])
def test_divergences_of_a_sum_of_noise_are_below_the_bound(clients, variance):
    """A sum of discrete Gaussians is not a discrete Gaussian; `gap` bounds the difference."""
    one = discrete(variance, 60)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    c = 2 / math.sqrt(clients * variance) + gap(clients, variance, 1)
    for order in (1.5, 2, 4):
        assert divergence(total, shifted(total, 2), order) <= order * c * c / 2
    assert gap(clients, 64, 1 << 40) < 1e-200


@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(1.0, 1.0, 1), (1.0, 0.2, 2), (2.0, 0.5, 4)])
def test_epsilon_holds_for_the_exact_loss_distribution(sigma, rate, rounds):
    """The exact delta of all rounds, from the privacy loss distribution, is at most the requested delta."""
    variance = (4 * sigma) ** 2  # one client changes the value by four steps
    without = discrete(variance, 100)
    taken = (1 - rate) * without + rate * shifted(without, 4)
    delta = 1e-5
    bound = epsilon(1 / sigma, rate, rounds, delta)
    for p, q in ((taken, without), (without, taken)):
        p, q = p[8:], q[8:]
        losses, many = np.log(p / q), np.array([0.0])
        weights = np.array([1.0])
        for _ in range(rounds):  # convolved on a grid of 0.001, rounded up
            sums = np.ceil(np.add.outer(many, losses).ravel() * 1000).astype(int)
            least = sums.min()
            weights = np.bincount(sums - least, np.multiply.outer(weights, p).ravel())
            many = (np.arange(len(weights)) + least) / 1000
        real = (weights * np.maximum(0, -np.expm1(bound - many))).sum()
        assert real <= delta * 1.001


def test_epsilon_equals_published_values():
    """Values of dp-accounting 0.6, RdpAccountant with integer orders."""
    for (sigma, rate, rounds), known in {
        (1.1, 0.01, 1000): 1.725290818,
        (2.0, 0.05, 50): 0.882224697,
        (1.1, 0.1, 200): 9.263966794,
        (1.1, 0.4, 200): 47.526972495,
        (1.0, 1.0, 1): 4.752728337,
    }.items():
        assert epsilon(1 / sigma, rate, rounds, 1e-5) == pytest.approx(known, rel=1e-8)
    assert epsilon(0.1, 0.1, 0, 0.5) == 0


def test_epsilon_equals_that_of_dp_accounting():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    for sigma, rate, rounds in ((0.8, 0.01, 300), (1.3, 0.2, 40), (4.0, 0.5, 500)):
        one = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(sigma))
        orders = [*range(2, 65), *range(72, 129, 8), *range(160, 513, 32), 1024]
        theirs = RdpAccountant(orders).compose(accounting.SelfComposedDpEvent(one, rounds)).get_epsilon(1e-5)
        assert epsilon(1 / sigma, rate, rounds, 1e-5) == pytest.approx(theirs, rel=1e-9)
    from dp_accounting.pld import PLDAccountant

    one = accounting.PoissonSampledDpEvent(0.05, accounting.GaussianDpEvent(2.0))
    exact = PLDAccountant().compose(accounting.SelfComposedDpEvent(one, 50)).get_epsilon(1e-5)
    assert exact <= epsilon(1 / 2.0, 0.05, 50, 1e-5) <= 1.15 * exact
