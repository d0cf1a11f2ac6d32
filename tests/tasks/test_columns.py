"""Convolutions of one client with gradients of our own: torch's numbers, at any order of derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from thinwire.tasks import columns
from thinwire.tasks.columns import convolve_alone
from thinwire.tasks.convolve import by_products

# pictures, channels, height, width, outputs, kernel, stride, padding; the last: NNPACK, more pieces than one
SHAPES = [
    (4, 1, 9, 7, 5, (5, 5), (1, 1), (2, 2)),
    (3, 3, 8, 8, 6, (3, 2), (2, 1), (1, 0)),
    (2, 5, 8, 9, 3, (1, 1), (2, 2), (0, 0)),
    (2, 4, 6, 6, 3, (2, 2), (1, 1), (2, 2)),
    (16, 20, 9, 9, 18, (3, 3), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_values_and_both_derivatives_are_those_of_torch(shape, last, monkeypatch):
    monkeypatch.setattr(columns, "PIECE", 1 << 12)
    n, i, h, w, o, size, stride, padding = shape
    torch.manual_seed(0)
    made = torch.randn(n, i, h, w), torch.randn(o, i, *size), torch.randn(o)
    x, kernel, bias = (block.double().requires_grad_() for block in made)
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


def test_gradients_in_single_precision_and_where_none_is_wanted():
    torch.manual_seed(0)
    for i in (3, 32):
        x, kernel = torch.randn(32, i, 10, 10), torch.randn(24, i, 5, 5, requires_grad=True)
        (ours,) = torch.autograd.grad(convolve_alone(x, kernel, None, (1, 1), (2, 2)).square().sum(), kernel)
        (theirs,) = torch.autograd.grad(torch.conv2d(x, kernel, None, 1, 2).square().sum(), kernel)
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())
        frozen = convolve_alone(x.requires_grad_(), kernel.detach(), None, (1, 1), (2, 2))
        assert torch.autograd.grad(frozen.sum(), x)[0].shape == x.shape


def test_pictures_and_their_gradients_stay_channels_last():
    seen = []
    net = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 20, 3, padding=1), nn.MaxPool2d(2))
    with by_products("columns"):
        x = torch.randn(16, 2, 10, 10)
        for layer in net:
            x = layer(x)
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            x.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=torch.channels_last)))
        x.flatten(1).sum(1).square().sum().backward()
    assert len(seen) == 2 * len(net)
    assert all(seen)


def test_what_it_does_not_do_is_left_to_torch():
    x, kernel = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3)
    with by_products("columns"):
        assert torch.equal(
            F.conv2d(x, kernel[:, :2], groups=2),
            torch.convolution(x, kernel[:, :2], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 2),
        )
        slope = grad(lambda k: F.conv2d(x, k).square().sum())(kernel)  # torch.func has rules of its own
        with torch.autocast("cpu", torch.bfloat16):
            assert F.conv2d(x, kernel).dtype == torch.bfloat16
    assert torch.allclose(slope, grad(lambda k: F.conv2d(x, k).square().sum())(kernel), rtol=1e-4, atol=1e-2)
