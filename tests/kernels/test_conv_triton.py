"""Tests of the Triton convolutions, in the interpreter of triton: equal to torch. Skipped without triton."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import conv

# clients, images, channels, size, outputs, kernel, stride, padding
SHAPES = [
    (3, 2, 1, 9, 8, 5, 1, 2),
    (2, 2, 8, 7, 16, 5, 1, 2),
    (2, 3, 16, 9, 20, 3, 2, 1),
    (2, 2, 16, 8, 32, 1, 2, 0),
    (2, 2, 3, 11, 4, 7, 2, 3),
    (1, 2, 64, 5, 40, 3, 1, 0),
]


@pytest.fixture
def kernels(monkeypatch):
    module = interpreted("thinwire.kernels.conv_triton")
    monkeypatch.setattr(conv, "triton_kernels", lambda x: module)
    return module


def check(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 2e-6 * float(b.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_those_of_torch(kernels, shape):
    c, n, i, size, o, k, stride, padding = shape
    torch.manual_seed(0)
    x, kernel, bias = torch.randn(c, n, i, size, size), torch.randn(c, o, i, k, k), torch.randn(c, o)
    options = {"stride": (stride, stride), "padding": (padding, padding)}
    out = vmap(lambda *args: F.conv2d(*args, **options))(x, kernel, bias)
    grad = torch.randn_like(out)

    def wanted(x, kernel, bias, grad):
        return (F.conv2d(x, kernel, bias, **options) * grad).sum()

    by_x, by_kernel, by_bias = vmap(torch.func.grad(wanted, argnums=(0, 1, 2)))(x, kernel, bias, grad)
    check((kernels.forward(x, kernel, bias, **options),), (out,))
    check((kernels.input_gradient(grad, kernel, (size, size), **options),), (by_x,))
    check(kernels.kernel_gradient(grad, x, (k, k), bias=True, **options), (by_kernel, by_bias))
    check(kernels.kernel_gradient(grad, x, (k, k), bias=False, **options)[:1], (by_kernel,))


@pytest.mark.parametrize("shape", SHAPES)
def test_16_bit_input_gradients_read_the_kernel_in_the_order_of_the_forward_direction(kernels, shape):
    c, n, i, size, o, k, stride, padding = shape
    options = {"stride": (stride, stride), "padding": (padding, padding)}
    kernel = torch.randn(c, o, i, k, k).half()  # the interpreter has no constants in bfloat16
    out = kernels.forward(torch.zeros(c, n, i, size, size).half(), kernel, None, **options)
    grad = torch.randn(out.shape).half()
    found = kernels.input_gradient(grad, kernel, (size, size), **options).float()
    wanted = kernels.input_gradient(grad.float(), kernel.float(), (size, size), **options)
    assert float((found - wanted).norm()) <= 1e-3 * float(wanted.norm())


@pytest.mark.parametrize("shape", [(2, 300, 40), (3, 7, 5), (1, 2000, 200)])
def test_sums_of_rows(shape):
    module = interpreted("thinwire.kernels.sums_triton")
    x = torch.randn(shape)
    place = torch.full((shape[0], 2 * shape[2]), torch.nan)
    for found in (module.sum_rows(x), module.sum_rows(x, place[:, : shape[2]])):
        assert torch.allclose(found, x.double().sum(1).float(), atol=1e-4)
    assert bool(place[:, shape[2] :].isnan().all())


def test_memory_order_and_number_of_partial_sums_do_not_matter(kernels, monkeypatch):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 3, 16, 12, 12), torch.randn(2, 3, 16, 12, 12)
    once = kernels.kernel_gradient(grad, x, (3, 3), (1, 1), (1, 1), True)
    last = (block.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) for block in (grad, x))
    assert all(map(torch.equal, once, kernels.kernel_gradient(*last, (3, 3), (1, 1), (1, 1), True)))
    monkeypatch.setattr("thinwire.kernels.conv_blocks.TERMS", 1)
    check(kernels.kernel_gradient(grad, x, (3, 3), (1, 1), (1, 1), True), once)


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), None])
def test_values_and_gradients_under_vmap(kernels, dims):
    torch.manual_seed(0)
    x, kernel, bias = torch.randn(2, 2, 3, 6, 6), torch.randn(2, 4, 3, 3, 3), torch.randn(2, 4)

    def loss(x, kernel, bias):
        once = F.conv2d(x, kernel, bias, padding=1)
        return torch.sin(F.conv2d(once, kernel.transpose(0, 1)[:, :, :1, :1], stride=2)).sum()

    def fused(*args):
        with conv.by_products():
            return loss(*args)

    results = []
    for fn in (loss, fused):
        call = grad_and_value(fn, argnums=(0, 1, 2))
        if dims:
            args = [block if d == 0 else block[0] for block, d in zip((x, kernel, bias), dims, strict=True)]
            grads, value = vmap(call, in_dims=dims)(*args)
        else:
            grads, value = call(x[0], kernel[0], bias[0])
        results.append((*grads, value))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 2e-5 * max(1, float(b.abs().max()))


def test_without_triton_convolutions_are_those_of_torch():
    x, kernel = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    with conv.by_products():
        found = F.conv2d(x, kernel, padding=1)
    assert torch.equal(found, F.conv2d(x, kernel, padding=1))


@pytest.mark.parametrize("last", [False, True])
def test_gradients_have_the_type_of_the_kernel(kernels, last):
    torch.manual_seed(0)
    x, kernel, bias = torch.randn(2, 3, 16, 6, 6).half(), torch.randn(2, 20, 16, 3, 3), torch.randn(2, 20)
    if last:  # in memory
        kernel = kernel.movedim(2, -1).contiguous().movedim(-1, 2)

    def loss(kernel, bias, x, convolve):
        return convolve(x, kernel, bias).float().square().sum()

    def fused(x, kernel, bias):
        return conv.convolve(x, kernel, bias, (1, 1), (1, 1))

    def exact(x, kernel, bias):
        return F.conv2d(x.float(), kernel, bias, padding=1)

    found = vmap(lambda *args: torch.func.grad(loss, argnums=(0, 1, 2))(*args, fused))(kernel, bias, x)
    wanted = vmap(lambda *args: torch.func.grad(loss, argnums=(0, 1, 2))(*args, exact))(kernel, bias, x)
    assert [block.dtype for block in found] == [torch.float32, torch.float32, torch.float16]
    for a, b in zip(found, wanted, strict=True):
        assert float((a.float() - b.float()).norm()) <= 2e-3 * float(b.float().norm())
