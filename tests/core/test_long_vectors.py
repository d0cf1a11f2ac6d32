"""Tests of means of long vectors."""

import pytest
import torch

from thinwire.core import parallel
from thinwire.core.parallel import weighted_sum

FRACTIONS = [0.1, 0.2, 0.3, 0.25, 0.15]


@pytest.fixture
def many(monkeypatch):
    """Make three cores count as many."""
    monkeypatch.setattr(parallel, "FEW", 2)


def vectors(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in FRACTIONS]


@pytest.mark.parametrize("size", [1, 1000, (1 << 17) + 13, 400_001])
def test_the_mean_has_the_same_bits_on_one_core_a_few_and_many(three_cores, monkeypatch, size):
    few = weighted_sum(vectors(size), FRACTIONS)
    with parallel.on_one_core():
        within = weighted_sum(vectors(size), FRACTIONS)
        monkeypatch.setattr(parallel, "FEW", 2)
        many = weighted_sum(vectors(size), FRACTIONS)
    monkeypatch.undo()
    torch.set_num_threads(1)
    one = weighted_sum(vectors(size), FRACTIONS)
    assert torch.equal(few, one)
    assert torch.equal(within, one)
    assert torch.equal(many, one)


def test_the_mean_on_many_cores_reads_views_of_messages(three_cores, many):
    whole = torch.stack(vectors(400_000))
    rows = [row[3:-5] for row in whole]
    expected = weighted_sum([row.clone() for row in rows], FRACTIONS)
    assert torch.equal(weighted_sum(rows, FRACTIONS), expected)
