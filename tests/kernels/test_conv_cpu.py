"""Tests of convolutions of one client on a CPU: values and derivatives equal those of torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.simulation.test_engine import job
from thinwire.core.parallel import compute_with
from thinwire.data.task import Task, pool_clients
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.kernels import conv_cpu as columns
from thinwire.kernels.conv_cpu import by_columns, convolve_alone
from thinwire.kernels.low_rank import corrected

# images, channels, height, width, outputs, kernel, stride, padding; the last uses NNPACK and several pieces
SHAPES = [
    (4, 1, 9, 7, 5, (5, 5), (1, 1), (2, 2)),
    (3, 3, 8, 8, 6, (3, 2), (2, 1), (1, 0)),
    (2, 5, 8, 9, 3, (1, 1), (2, 2), (0, 0)),
    (2, 4, 6, 6, 3, (2, 2), (1, 1), (2, 2)),
    (16, 20, 9, 9, 18, (3, 3), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_values_and_two_derivatives_equal_those_of_torch(shape, last, monkeypatch):
    monkeypatch.setattr(columns, "PIECE", 1 << 12)
    n, i, h, w, o, size, stride, padding = shape
    torch.manual_seed(0)
    inputs = torch.randn(n, i, h, w), torch.randn(o, i, *size), torch.randn(o)
    x, kernel, bias = (block.double().requires_grad_() for block in inputs)
    if last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    results = []
    for conv in (torch.conv2d, convolve_alone):
        out = conv(x, kernel, bias, stride, padding)
        first = torch.autograd.grad(out.sin().sum(), (x, kernel, bias), create_graph=True)
        second = torch.autograd.grad(sum(block.square().sum() for block in first), (x, kernel, bias))
        results.append([block.detach() for block in (out, *first, *second)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).abs().max()) < 1e-9 * float(theirs.abs().max())


def test_gradients_in_single_precision_and_with_a_frozen_kernel():
    torch.manual_seed(0)
    for i in (3, 32):
        x, kernel = torch.randn(32, i, 10, 10), torch.randn(24, i, 5, 5, requires_grad=True)
        (ours,) = torch.autograd.grad(convolve_alone(x, kernel, None, (1, 1), (2, 2)).square().sum(), kernel)
        (theirs,) = torch.autograd.grad(torch.conv2d(x, kernel, None, 1, 2).square().sum(), kernel)
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
        frozen = convolve_alone(x.requires_grad_(), kernel.detach(), None, (1, 1), (2, 2))
        assert torch.autograd.grad(frozen.sum(), x)[0].shape == x.shape


@pytest.fixture
def no_onednn(monkeypatch):
    """As on machines without oneDNN."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def network():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 20, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    )


def test_layers_are_replaced_and_images_and_gradients_stay_channels_last(no_onednn):
    seen, net = [], network()
    by_columns(net)
    x = torch.randn(16, 2, 10, 10)
    for layer in net:
        x = layer(x)
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        x.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))
    x.flatten(1).sum(1).square().sum().backward()
    assert len(seen) == 2 * len(net)
    assert all(seen)


def test_unsupported_cases_are_left_to_torch(no_onednn, monkeypatch):
    calls = []
    alone = columns.convolve_alone
    monkeypatch.setattr(columns, "convolve_alone", lambda *args: calls.append(1) or alone(*args))
    left = (nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, padding="same"))
    kept = nn.Sequential(*left, nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))
    by_columns(kept)
    assert {type(one) for one in kept} == {nn.Conv2d}
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(2, 2, 9, 9)
    plain = layer(x)
    by_columns(layer)
    weights = dict(layer.named_parameters())
    grad(lambda w: functional_call(layer, w, (x,)).sum())(weights)  # torch.func has its own rules
    vmap(lambda one: layer(one[None]))(x)
    layer(x[0])
    with torch.no_grad():
        layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    layer(x)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    a, b = torch.ones(1, 18), torch.ones(3, 1)
    with corrected(weights, {"weight": (a, b, False)}):  # which intercepts the functions of torch
        more = layer(x)
    assert not calls
    assert torch.allclose(more - plain, F.conv2d(x, torch.ones(3, 2, 3, 3)), atol=1e-4)
    assert torch.allclose(layer(x), plain, atol=1e-5)
    assert calls


def test_training_equals_training_with_convolutions_of_torch(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("thinwire.federation.federation.compute_with", partial(compute_with, onednn=False))
    clients = [(torch.randn(40, 2, 10, 10), torch.randint(0, 3, (40,))) for _ in range(3)]
    task = Task(nn.Sequential(network(), nn.Flatten(), nn.Linear(80, 3)), *pool_clients(clients))
    ends = []
    for conv, backend in (("grouped", "loop"), ("auto", "loop"), ("auto", "threads")):
        simulation = make_simulation(Engine("cpu", backend, conv=conv), job(task=task, rounds=10))
        state = simulation.start()
        assert isinstance(simulation.model.module[0][0], columns.Conv2d) is (conv == "auto")
        for _ in range(10):
            state, _ = simulation.round(state)
        ends.append(simulation.weights(state.server.public))
    for other in ends[1:]:
        assert all(float((other[name] - block).abs().max()) < 1e-4 for name, block in ends[0].items())


TILED = [  # images, channels, height and width, kernels, size of a kernel, padding
    (4, 16, (16, 16), 5, (5, 5), (2, 2)),
    (9, 17, (13, 30), 3, (5, 7), (0, 3)),
    (16, 16, (8, 9), 4, (8, 4), (5, 1)),
    (5, 16, (31, 17), 2, (5, 5), (4, 4)),
]


@pytest.mark.parametrize("shape", TILED)
@pytest.mark.parametrize("last", [False, True])
def test_the_gradient_of_a_large_kernel_in_tiles_is_that_of_torch(shape, last, no_onednn):
    n, i, (h, w), o, size, padding = shape
    x, kernel = torch.randn(n, i, h, w, requires_grad=True), torch.randn(o, i, *size, requires_grad=True)
    out = convolve_alone(x, kernel, None, (1, 1), padding)
    grad = torch.randn_like(out)
    if last:
        x, grad = (block.detach().contiguous(memory_format=columns.LAST) for block in (x, grad))
    found = columns._kernel_gradient_by_tiles(grad, x, size, padding)
    expected = torch.nn.grad.conv2d_weight(x.double(), kernel.shape, grad.double(), padding=padding)
    assert found.shape == kernel.shape
    assert (found - expected).norm() < 1e-6 * expected.norm()


def test_tiles_of_many_images_are_copied_in_parts(monkeypatch, no_onednn):
    monkeypatch.setattr(torch.backends.nnpack, "is_available", lambda: True)
    copied, by_tiles = [], columns._kernel_gradient_by_tiles

    def watched(grad, x, *rest):
        copied.append(len(x))
        return by_tiles(grad, x, *rest)

    monkeypatch.setattr(columns, "_kernel_gradient_by_tiles", watched)
    x, grad, kernel = torch.randn(7, 16, 16, 16), torch.randn(7, 3, 16, 16), torch.randn(3, 16, 5, 5)
    gradients = []
    for most in (columns.TILED, 3 * 16**3, 1):
        monkeypatch.setattr(columns, "TILED", most)
        gradients.append(columns.backward(grad, x, kernel, None, (1, 1), (2, 2), need_x=False)[1])
    assert copied == [7, 3, 3, 1, *[1] * 7]
    assert all((one - gradients[0]).norm() < 1e-6 * gradients[0].norm() for one in gradients[1:])


def test_tiles_are_used_only_where_they_are_faster(monkeypatch):
    monkeypatch.setattr(torch.backends.nnpack, "is_available", lambda: True)
    x, grad = torch.empty(4, 16, 16, 16), torch.empty(4, 8, 16, 16)
    pays = columns._transforms_pay
    assert pays(grad, x, (5, 5), (1, 1))
    assert not pays(grad, x, (3, 3), (1, 1)), "a product takes as little arithmetic"
    assert not pays(grad, x, (9, 9), (1, 1)), "few pixels are left of a tile"
    assert not pays(grad, x, (5, 5), (2, 2)), "the gradient is no plain convolution"
    assert not pays(grad, x[:, :8], (5, 5), (1, 1)), "torch uses NNPACK from 16 images on, here channels"
    assert not pays(grad[:3], x[:3], (5, 5), (1, 1)), "too few tiles"
    assert not pays(grad, x.double(), (5, 5), (1, 1)), "NNPACK computes in float32"
    monkeypatch.setattr(torch.backends.nnpack, "is_available", lambda: False)
    assert not pays(grad, x, (5, 5), (1, 1))
