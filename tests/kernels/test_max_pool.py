"""Tests of the Triton max pooling, in the interpreter of triton: equal to torch. Skipped without triton."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import conv, max_pool


@pytest.fixture
def fused(monkeypatch):
    module = interpreted("thinwire.kernels.max_pool_triton")
    monkeypatch.setattr(max_pool, "_kernels", lambda: module)
    monkeypatch.setattr(max_pool, "has_triton", lambda device: True)

    def within(function, *args):
        with conv.by_products():
            return function(*args)

    return within


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", [2, (2, 3)])
def test_values_and_gradients_equal_those_of_torch_also_where_values_are_equal(fused, window, last):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, 4, 6).relu()  # many zeros
    if last:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)

    def loss(x):
        return torch.sin(F.max_pool2d(x, window) + torch.arange(8.0).view(8, 1, 1)).sum()

    wanted, found = (grad_and_value(loss)(x[0]), grad_and_value(lambda x: fused(loss, x))(x[0]))
    assert torch.equal(wanted[0], found[0])
    assert float(found[1]) == pytest.approx(float(wanted[1]))
    many = vmap(grad_and_value(lambda x: fused(loss, x)))(x)
    assert torch.equal(many[0], vmap(grad_and_value(loss))(x)[0])


def test_other_poolings_are_left_to_torch(fused, monkeypatch):
    monkeypatch.setattr(max_pool, "max_pool", None)
    x = torch.randn(2, 3, 6, 6)
    assert fused(lambda x: F.max_pool2d(x, 3, 1), x).shape == (2, 3, 4, 4)
    assert fused(lambda x: F.max_pool2d(x, 3, 2, 1), x).shape == (2, 3, 3, 3)
    assert fused(lambda x: F.max_pool2d(x, 4), x).shape == (2, 3, 1, 1)
    assert len(fused(lambda x: F.max_pool2d(x, 2, return_indices=True), x)) == 2
