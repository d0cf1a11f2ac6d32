"""Tests of the Triton group norm, in the interpreter of triton: equal to torch. Skipped without triton."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import conv, group_norm


@pytest.fixture
def fused(monkeypatch):
    module = interpreted("thinwire.kernels.group_norm_triton")
    monkeypatch.setattr(group_norm, "_kernels", lambda: module)
    monkeypatch.setattr(group_norm, "has_triton", lambda device: True)
    monkeypatch.setattr(module, "VALUES", 64)  # several blocks of pixels, the last one not full
    monkeypatch.setattr(module, "LINE", 4)  # several blocks of channels

    def within(function, *args):
        with conv.by_products():
            return function(*args)

    return within


# images, channels, groups, size
@pytest.mark.parametrize("shape", [(2, 8, 4, (5, 3)), (3, 16, 16, (2, 2)), (1, 4, 1, (7,)), (2, 8, 2, (4, 4))], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_values_and_gradients_equal_those_of_torch(fused, shape, last):
    n, channels, groups, size = shape
    torch.manual_seed(0)
    x, weight, bias = 3 + 2 * torch.randn(3, n, channels, *size), torch.randn(3, channels), torch.randn(3, channels)
    if last:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)

    def loss(x, weight, bias):
        return torch.sin(F.group_norm(x, groups, weight, bias)).sum()

    exact, value = vmap(grad_and_value(loss, argnums=(0, 1, 2)))(x.double(), weight.double(), bias.double())
    wanted, _ = vmap(grad_and_value(loss, argnums=(0, 1, 2)))(x, weight, bias)
    found, same = vmap(grad_and_value(lambda *args: fused(loss, *args), argnums=(0, 1, 2)))(x, weight, bias)
    assert torch.allclose(same.double(), value, rtol=1e-5)
    for a, b, torchs in zip(found, exact, wanted, strict=True):
        assert a.shape == b.shape
        far = float((torchs - b).abs().max())  # groups of four values can have a small variance
        assert float((a - b).abs().max()) <= 4 * far + 1e-5 * float(b.abs().max())
    alone = torch.func.grad(lambda *args: fused(loss, *args), argnums=(0, 1, 2))(x[0], weight[0], bias[0])
    for a, b in zip(alone, wanted, strict=True):
        assert torch.allclose(a, b[0], atol=1e-4 * float(b.abs().max()))


def test_a_large_mean_loses_no_precision(fused):
    torch.manual_seed(0)
    x, weight, bias = 1000 + torch.randn(2, 8, 8, 8), torch.ones(8), torch.zeros(8)
    out = fused(F.group_norm, x, 2, weight, bias)
    exact = F.group_norm(x.double(), 2, weight.double(), bias.double())
    # the mean itself is rounded to 2^-15, so no more is lost
    assert float((out - exact).abs().max()) < 6e-5


def test_bfloat16_stays_bfloat16(fused):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 8, 4, 4).bfloat16(), torch.randn(8), torch.randn(8)
    out = fused(F.group_norm, x, 2, weight, bias)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), F.group_norm(x.float(), 2, weight, bias), rtol=2**-7, atol=1e-5)


def test_unsupported_norms_are_left_to_torch(fused, monkeypatch):
    monkeypatch.setattr(group_norm, "group_norm", None)  # fails if it is called
    fused(F.group_norm, torch.randn(2, 6, 4, 4), 3, torch.ones(6), torch.ones(6))
    fused(F.group_norm, torch.randn(2, 8, 4, 4).double(), 2, torch.ones(8).double(), torch.ones(8).double())


@pytest.mark.parametrize("given", ["neither", "weight", "bias"])
def test_a_norm_without_weight_or_bias(fused, monkeypatch, given):
    torch.manual_seed(0)
    x, calls, real = torch.randn(3, 2, 8, 4, 4), [], group_norm.group_norm
    monkeypatch.setattr(group_norm, "group_norm", lambda *args: calls.append(1) or real(*args))
    affine = {name: torch.randn(8) for name in ("weight", "bias") if name == given}

    def loss(x):
        return torch.sin(F.group_norm(x, 2, **affine)).sum()

    wanted, value = vmap(grad_and_value(loss))(x)
    found, same = vmap(grad_and_value(lambda x: fused(loss, x)))(x)
    assert calls
    assert torch.allclose(same, value, rtol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5)
