"""Tests of the Triton batch norm, in the interpreter of triton: equal to torch. Skipped without triton."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import batch_norm, conv


@pytest.fixture
def fused(monkeypatch):
    module = interpreted("thinwire.kernels.batch_norm_triton")
    monkeypatch.setattr(batch_norm, "_kernels", lambda: module)
    monkeypatch.setattr(batch_norm, "has_triton", lambda device: True)
    monkeypatch.setattr(module, "VALUES", 64)  # several blocks of rows, the last one not full

    def within(function, *args):
        with conv.by_products("fused"):
            return function(*args)

    return within


def loss(x, weight, bias, mean, variance):
    mean, variance = mean.clone(), variance.clone()
    out = F.batch_norm(x, mean, variance, weight, bias, True, 0.1, 1e-5)
    return torch.sin(out).sum(), (mean, variance)


# images, channels, size
@pytest.mark.parametrize("shape", [(4, 8, (5, 3)), (3, 16, (2, 2)), (2, 4, (7,))], ids=str)
def test_values_gradients_and_statistics_equal_those_of_torch(fused, shape):
    n, channels, size = shape
    torch.manual_seed(0)
    x, weight, bias = 3 + 2 * torch.randn(3, n, channels, *size), torch.randn(3, channels), torch.randn(3, channels)
    running = torch.zeros(3, channels), torch.ones(3, channels)
    exact = [tensor.double() for tensor in (x, weight, bias, *running)]
    of = {"argnums": (0, 1, 2), "has_aux": True}
    wanted, (value, after) = vmap(grad_and_value(loss, **of))(*exact)
    found, (same, updated) = vmap(grad_and_value(lambda *args: fused(loss, *args), **of))(x, weight, bias, *running)
    assert torch.allclose(same.double(), value, rtol=1e-4, atol=1e-4)
    for a, b in zip((*found, *updated), (*wanted, *after), strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max()) + 1e-5


def test_evaluation_and_unsupported_norms_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(batch_norm, "has_triton", lambda device: True)
    monkeypatch.setattr(batch_norm, "batch_norm", None)  # fails if it is called
    with conv.by_products("fused"):
        F.batch_norm(torch.randn(2, 8, 4, 4), torch.zeros(8), torch.ones(8), torch.ones(8), torch.ones(8))
        F.batch_norm(torch.randn(2, 6, 4, 4), torch.zeros(6), torch.ones(6), torch.ones(6), torch.ones(6), True)


def test_a_norm_without_weight_and_bias(fused, monkeypatch):
    torch.manual_seed(0)
    x, calls, real = torch.randn(3, 2, 8, 4, 4), [], batch_norm.batch_norm
    monkeypatch.setattr(batch_norm, "batch_norm", lambda *args: calls.append(1) or real(*args))

    def plain(x):
        return torch.sin(F.batch_norm(x, None, None, training=True)).sum()

    wanted, value = vmap(grad_and_value(plain))(x)
    found, same = vmap(grad_and_value(lambda x: fused(plain, x)))(x)
    assert calls
    assert torch.allclose(same, value, rtol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5)
