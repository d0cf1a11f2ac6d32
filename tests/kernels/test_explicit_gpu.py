"""Tests of the layers without autograd, in the interpreter of triton: equal to torch. Skipped without triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import explicit_gpu

CLIENTS, BATCH, ROWS = 2, 6, torch.tensor([6, 4])  # four of the second client's examples count


@pytest.fixture
def kernels(monkeypatch):
    found = interpreted("thinwire.kernels.conv_triton"), interpreted("thinwire.kernels.chain_triton")
    monkeypatch.setattr(explicit_gpu, "_kernels", lambda: found)
    return found[1]


@pytest.mark.parametrize(("width", "last"), [(4, False), (4, True), (32, True)])
def test_gradients_of_a_network_equal_those_of_torch(kernels, width, last):
    torch.manual_seed(0)
    conv = (nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(width, 16, 3, padding=1), nn.ReLU())
    net = nn.Sequential(*conv, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 5))
    weights = {name: 0.3 * torch.randn(CLIENTS, *p.shape) for name, p in net.named_parameters()}
    x, y = torch.randn(CLIENTS, BATCH, 1, 8, 8), torch.randint(0, 5, (CLIENTS, BATCH))

    def loss(weights, x, y, rows):
        counted = torch.arange(BATCH) < rows
        each = F.cross_entropy(functional_call(net, weights, (x,)), y, reduction="none")
        return (each * counted).sum() / rows

    wanted, losses = vmap(grad_and_value(loss))(weights, x, y, ROWS)
    kind = torch.float32
    layers = [
        explicit_gpu.ConvReluPool("0.weight", "0.bias", (1, 1), (2, 2), (2, 2), kind, True, False),
        explicit_gpu.ConvReluPool("3.weight", "3.bias", (1, 1), (1, 1), (2, 2), kind, False, True),
        explicit_gpu.Linear("7.weight", "7.bias", kind, False, False),
        explicit_gpu.Linear("9.weight", "9.bias", kind, False, True),
    ]
    if last:  # in memory
        weights = {k: w.movedim(2, -1).contiguous().movedim(-1, 2) if w.dim() == 5 else w for k, w in weights.items()}
    grads = {name: torch.full_like(block, torch.nan) for name, block in weights.items()}
    for layer in layers:
        x = layer.forward(x, weights)
    total = torch.zeros(CLIENTS)
    grad = kernels.cross_entropy(x, weights["9.bias"], y, ROWS, grads["9.bias"], total)
    for layer in reversed(layers):
        grad = layer.backward(grad, weights, grads)
    assert grad is None
    assert torch.allclose(total, losses * ROWS, rtol=1e-5)
    for name, block in wanted.items():
        assert float((grads[name] - block).abs().max()) <= 2e-6 * float(block.abs().max())


def test_images_of_a_step_are_those_of_the_dataset(kernels):
    torch.manual_seed(0)
    pixels, targets = torch.randint(0, 256, (20, 3, 5, 7), dtype=torch.uint8), torch.randint(0, 5, (20,))
    batches = torch.randint(0, 20, (3, CLIENTS, BATCH + 1))
    mean, deviation = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    x, y, rows = kernels.gather(batches, torch.tensor([1]), pixels, targets, (mean, deviation), torch.float32)
    index = batches[1, :, :-1]
    assert torch.equal(x, (pixels[index].float() / 255 - mean.view(3, 1, 1)) / deviation.view(3, 1, 1))
    assert torch.equal(y, targets[index])
    assert torch.equal(rows, batches[1, :, -1])
    more, *_ = kernels.gather(batches, torch.tensor([1]), pixels, targets, (mean, deviation), torch.float32, 4)
    assert more.stride(2) == 1
    assert torch.equal(more, torch.cat((x, torch.ones_like(x[:, :, :1])), 2))


@pytest.mark.parametrize("size", [(5, 5), (3, 5)])
def test_a_channel_of_ones_in_the_images_gives_the_gradient_of_the_bias(kernels, size):
    torch.manual_seed(0)
    place = ((1, 1), (size[0] // 2, size[1] // 2), (2, 2))
    layer = explicit_gpu.ConvReluPool("w", "b", *place, torch.float32, True, False)
    weights = {"w": torch.randn(CLIENTS, 8, 3, *size), "b": torch.randn(CLIENTS, 8)}
    assert layer.channels(weights["w"]) == 4
    x = torch.randn(CLIENTS, BATCH, 3, 8, 6)
    more = torch.cat((x, torch.ones_like(x[:, :, :1])), 2)
    grad, found = torch.randn(CLIENTS, BATCH, 4, 3, 8), []
    for images in (x, more.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)):
        grads = {name: torch.full_like(block, torch.nan) for name, block in weights.items()}
        found.append((layer.forward(images, weights), grads))
        assert layer.backward(grad, weights, grads) is None
    (out, wanted), (same, grads) = found
    assert torch.allclose(out, same, atol=1e-5)
    for name, block in wanted.items():
        assert float((grads[name] - block).abs().max()) <= 2e-6 * float(block.abs().max())
