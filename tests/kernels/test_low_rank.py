"""Tests of unmerged adapters: equal to merged ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import thinwire as tw
from thinwire.core.tree import Tree, stack, unstack
from thinwire.spaces.base import Unmerged
from thinwire.spaces.lora import LoRA
from thinwire.spaces.route import Route
from thinwire.training.functional import Functional


class Transposed(nn.Module):
    """A matrix stored as inputs x outputs, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Everything(nn.Module):
    """A model with each supported use of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(10, 8)
        self.fc = nn.Linear(8, 8)
        self.transposed = Transposed(8, 8)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.word.weight
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(24, 3)

    def forward(self, codes):
        x = torch.tanh(self.transposed(F.gelu(self.fc(self.word(codes)))))  # (n, 4, 8)
        x = x + self.fc.weight.sum(0)  # a use without special support
        x = self.conv(self.tied(x)[:, None, :, :5]).flatten(1)
        return self.head(torch.cat([x] * 3, -1)[:, :24] if x.shape[1] < 24 else x[:, :24])


SPACES = [
    LoRA(rank=2, fan_in_fan_out=("transposed.weight",)),
    LoRA(rank=2, target_modules=("fc.weight",), modules_to_save=("head.*",)),
    LoRA(rank=2, freeze_a=True, fan_in_fan_out=("transposed.weight",)),
    Route(
        (("transposed.weight", LoRA(rank=2, fan_in_fan_out=("*",))), ("fc.*", LoRA(rank=3)), ("*", tw.spaces.Frozen()))
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=["all", "one", "ffa", "route"])
@pytest.mark.parametrize("backend", ["alone", "vmap"])
def test_gradients_equal_those_of_merged_matrices(space, backend):
    torch.manual_seed(0)
    model = Functional.of(Everything().double())
    base = model.weights()
    basis = space.basis(tw.Spec.of(base), tw.Key(0), None)
    first = space.init(base, basis, tw.Key(1))
    points = [{name: b + 0.1 * torch.randn_like(b) for name, b in first.items()} for _ in range(3)]
    codes, labels = torch.randint(0, 10, (3, 6, 4)), torch.randint(0, 3, (3, 6))

    def gradient(space) -> list[Tree]:
        def loss(point: Tree, x, y):
            return model.loss(space.expand(base, basis, point), {}, x, y, None)[0]

        if backend == "vmap":
            found = vmap(grad(loss))(stack(points), codes, labels)
            return [unstack(found, i) for i in range(3)]
        return [grad(loss)(*args) for args in zip(points, codes, labels, strict=True)]

    for ours, theirs in zip(gradient(Unmerged(space)), gradient(space), strict=True):
        assert list(ours) == list(theirs)
        for name, block in theirs.items():
            torch.testing.assert_close(ours[name], block, rtol=1e-8, atol=1e-10)
        assert max(block.abs().max() for block in theirs.values()) > 1e-3


def test_the_base_matrix_is_not_copied_for_each_client():
    """The largest tensor in a linear layer under vmap is one matrix, not one for each client."""
    model = Functional.of(nn.Linear(256, 256))
    base, space = model.weights(), LoRA(rank=2)
    point = space.init(base, {}, tw.Key(0))
    seen: list[int] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.untyped_storage().nbytes() // 4 for t in (out,) if isinstance(t, torch.Tensor))
            return out

    def largest(space) -> int:
        def loss(point: Tree, x, y):
            return model.loss(space.expand(base, {}, point), {}, x, y, None)[0]

        seen.clear()
        with Record():
            vmap(grad(loss))(stack([point] * 8), torch.ones(8, 1, 256), torch.zeros(8, 1, dtype=torch.int64))
        return max(seen)

    assert largest(space) >= 8 * 256 * 256
    assert largest(Unmerged(space)) <= 256 * 256


def test_training_with_unmerged_adapters_equals_training_with_merged_ones(monkeypatch):
    clients = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2) for i in range(3)]
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def train():
        method = tw.Method(LoRA(rank=2), client_opt=tw.optimizers.SGD(0.1))
        return tw.simulate(net, clients, method, rounds=3, local=tw.Local(batch=4), backend="vmap").weights

    ours = train()
    monkeypatch.setattr(LoRA, "unmerged", lambda self: self)
    for name, block in train().items():
        torch.testing.assert_close(ours[name], block, rtol=1e-5, atol=1e-6)
