"""Tests of clipping and rounding to a lattice."""

import itertools
import math

import pytest
import torch

from thinwire.core.key import Key
from thinwire.privacy.lattice import length, onto_lattice, squared_length


def exact(z: torch.Tensor) -> int:
    return sum(int(value) ** 2 for value in z)


@pytest.mark.parametrize("size", [1, 7, 5000])
def test_the_norm_never_exceeds_the_bound(size):
    """Checked in Python integers, after clipping and rounding."""
    for factor, most in itertools.product((1e-6, 0.9, 1.0, 1.1, 1e10, 1e38), (1, 3, 1000, 1 << 21, 1 << 30)):
        x = Key(size).normal(size)
        x = (x / x.norm() * factor).clamp(-3e38, 3e38)
        z = onto_lattice(x, float(most), most)
        assert exact(z) == squared_length(z) <= most * most, (factor, most)
        if factor <= 0.9 and most > 10 * math.sqrt(size):
            assert torch.equal(z, torch.round(x.double() * most).long())  # shorter ones are rounded, not scaled
        if factor >= 1 and most > 10 * math.sqrt(size):
            assert math.sqrt(exact(z)) > 0.98 * most


def test_values_that_all_round_up_stay_within_the_bound():
    assert not bool(onto_lattice(torch.full((1000,), 0.51), 1.0, 3).any())
    assert onto_lattice(torch.full((4,), 0.51), 1.0, 3).tolist() == [1, 1, 1, 1]
    assert onto_lattice(torch.zeros(3), 1e9, 5).tolist() == [0, 0, 0]
    assert onto_lattice(torch.zeros(0), 1e9, 5).tolist() == []


def test_the_norm_does_not_depend_on_the_order_of_summation():
    """Integer sums do not depend on the order; the norm is accurate to 2^-30 of the largest value."""
    x = Key(4).normal(10_001)
    assert length(x) == length(x.flip(0)) == length(x[Key(1).permutation(len(x))])
    assert length(x) == pytest.approx(x.double().norm().item(), rel=1e-7)
    for scale in (2.0**-140, 2.0**100):
        assert length(x * scale) == pytest.approx(length(x) * scale, rel=1e-6)
    assert length(torch.zeros(4)) == 0 == length(torch.zeros(0))
