"""Tests of privacy accounting against exact divergences and loss distributions."""

import math

import numpy as np
import pytest

from thinwire.privacy import DP
from thinwire.privacy.accountant import epsilon, gap, renyi


def discrete(variance: float, far: int = 400) -> np.ndarray:
    weights = np.exp(-(np.arange(-far, far + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


def shifted(p: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate((np.zeros(by), p[: len(p) - by]))


def divergence(p: np.ndarray, q: np.ndarray, order: float) -> float:
    seen = (p > 1e-290) & (q > 1e-290)
    terms = order * np.log(p[seen]) + (1 - order) * np.log(q[seen])
    return float(np.logaddexp.reduce(terms)) / (order - 1)


@pytest.mark.parametrize("rate", [0.02, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("variance", "step"), [(1, 1), (4, 1), (4, 3), (50, 5)])
def test_divergences_of_sampled_noise_are_below_the_bound(variance, step, rate):
    """One client of a cohort without replacement is replaced: its values are -step and step, those of others 0."""
    without = discrete(variance)
    one, other = (1 - rate) * without + rate * shifted(without, 2 * step), without
    left = (1 - rate) * shifted(without, step) + rate * shifted(without, 2 * step)
    right = (1 - rate) * shifted(without, step) + rate * without
    c = 2 * step / math.sqrt(variance)
    for order in (1.1, 1.5, 2, 3, 3.3, 5, 8):
        for p, q in ((left, right), (right, left), (one, other)):
            assert divergence(p, q, order) <= renyi(order, c, rate) * (1 + 1e-9)


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


@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(1.0, 1.0, 1), (2.0, 0.25, 2), (2.0, 0.5, 4)])
def test_epsilon_holds_for_the_exact_loss_distribution(sigma, rate, rounds):
    """The exact delta of all rounds, from the privacy loss distribution, is at most the requested delta."""
    variance = (4 * sigma) ** 2  # one client changes the value by four steps
    without = discrete(variance, 100)
    p = (1 - rate) * shifted(without, 4) + rate * shifted(without, 8)
    q = (1 - rate) * shifted(without, 4) + rate * without
    delta = 1e-5
    bound = epsilon(2 / sigma, rate, rounds, delta)
    for one, other in ((p[8:], q[8:]), (q[8:], p[8:])):
        losses, many = np.log(one / other), np.array([0.0])
        weights = np.array([1.0])
        for _ in range(rounds):  # convolved on a grid of 0.001, rounded up
            sums = np.ceil(np.add.outer(many, losses).ravel() * 1000).astype(int)
            least = sums.min()
            weights = np.bincount(sums - least, np.multiply.outer(weights, one).ravel())
            many = (np.arange(len(weights)) + least) / 1000
        real = (weights * np.maximum(0, -np.expm1(bound - many))).sum()
        assert real <= delta * 1.001


KNOWN = {  # (sigma, clients of a round, clients, rounds): dp-accounting 0.6, RdpAccountant, REPLACE_ONE
    (1.1, 10, 1000, 1000): 15.565800659834657,
    (0.8, 10, 1000, 300): 39.700597356808125,
    (2.0, 50, 1000, 50): 4.777223254787517,
    (1.3, 20, 100, 40): 34.80128109654018,
    (4.0, 10, 20, 500): 135.12663110385031,
    (1.0, 8, 8, 1): 10.725509696418232,
    (8.0, 10, 20, 100): 14.335084453428518,
    (3.0, 5, 40, 200): 16.02099512809552,
    (1.1, 100, 1000, 200): 97.18304009519974,
    (6.0, 30, 100, 1000): 51.563026998108434,
    (20.0, 10, 30, 1000): 11.588254192680655,
}


@pytest.mark.parametrize(("setting", "known"), KNOWN.items())
def test_the_told_epsilon_is_at_least_that_of_dp_accounting(setting, known):
    sigma, cohort, clients, rounds = setting
    told = DP(sigma=sigma).epsilon(cohort, clients, rounds)
    assert known <= told <= 1.3 * known
    assert epsilon(0.1, 0.1, 0, 0.5) == 0


def test_the_values_of_dp_accounting_are_those():
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    for (sigma, cohort, clients, rounds), known in KNOWN.items():
        one = accounting.GaussianDpEvent(sigma / 2)
        if cohort < clients:
            one = accounting.SampledWithoutReplacementDpEvent(clients, cohort, one)
        accountant = RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
        theirs = accountant.compose(accounting.SelfComposedDpEvent(one, rounds)).get_epsilon(1e-5)
        assert theirs == pytest.approx(known, rel=1e-9)
