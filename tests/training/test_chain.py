"""Chains of layers: gradients equal autograd's, other models are refused, results do not depend on threads."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from tests.federation import digits_task, perceptron, same_public
from tests.simulation.test_engine import bits, job, play
from thinwire.core.tree import Spec, Vector, flatten, same
from thinwire.data.losses import mse
from thinwire.data.task import Task, pool_clients
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.models.cnn import conv_net
from thinwire.optimizers import SGD, FedProx
from thinwire.optimizers.base import clip_by_global_norm
from thinwire.protocol import Method
from thinwire.spaces import MAPO
from thinwire.training.chain import Chain, may_be_chain
from thinwire.training.cuda_chain import ChainStep
from thinwire.training.functional import Functional
from thinwire.training.inputs import UnsupportedModel


@pytest.fixture(params=[True, False], ids=["oneDNN", "no oneDNN"])
def onednn(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", request.param)


def test_gradients_of_all_clients_are_clipped_as_those_of_each():
    step = object.__new__(ChainStep)
    step.optimizer, step.grad = SGD(0.1, clip_norm=0.5), torch.randn(5, 40) * torch.tensor([[0.01], [0], [1], [9], [1]])
    step.grad[4, 3] = torch.inf
    wanted = vmap(lambda g: clip_by_global_norm({"": g}, 0.5)[""])(step.grad)
    assert same({"": step._clipped()}, {"": wanted})  # NaN where the norm is infinite


def strided():
    layers = (nn.Conv2d(2, 6, (3, 2), 2, 1, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.Flatten())
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(54, 4))


# model and shape of an image; the first two are packed, the second in the first layer only
NETWORKS = {
    "packed": (lambda: conv_net(1, 12, (3, 5), 0, 4), (1, 12, 12)),
    "packed first": (lambda: conv_net(2, (10, 6), (4, 20), 7, 4), (2, 10, 6)),
    "wide": (lambda: conv_net(3, 8, (20, 18), 6, 4), (3, 8, 8)),
    "maximum": (lambda: conv_net(1, 8, (4,), 0, 4, pool="max"), (1, 8, 8)),
    "strided": (strided, (2, 9, 9)),
    "perceptron": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4)), (3, 2, 2)),
}


def both(model, x, y, mask=None):
    """Gradient and loss by autograd and by the chain, the second time from a flat tree."""
    weights = {name: block.requires_grad_() for name, block in model.weights().items()}
    flat = Vector(flatten(weights).detach(), Spec.of(weights))
    chain = Chain(model)
    return [part.gradient(w, {}, x, y, mask) for part, w in ((model, weights), (chain, weights), (chain, flat))]


def assert_equal(results):
    expected, (loss, _) = results[0]
    for grads, (value, _) in results[1:]:
        assert list(grads) == list(expected)
        assert float(value) == pytest.approx(float(loss), rel=1e-5)
        norm = max(float(block.abs().max()) for block in expected.values())
        for name, block in expected.items():
            assert grads[name].shape == block.shape
            assert float((grads[name] - block).abs().max()) < 1e-4 * norm, name


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_those_of_autograd(name, onednn):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x, y = Functional.of(make()), torch.randn(6, *shape), torch.randint(0, 4, (6,))
    before = x.clone()
    assert_equal(both(model, x, y))
    assert_equal(both(model, x, y, (torch.arange(6) < 4).float()))
    assert torch.equal(x, before), "the examples are not changed"


def test_other_losses_ignored_labels_and_frozen_weights():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), torch.randn(6, 5)
    assert_equal(both(Functional.of(net, mse), x, torch.randn(6, 3)))
    model = Functional.of(net)
    assert_equal(both(model, x, torch.tensor([0, -100, 2, 1, -100, 0])))
    grads, (loss, _) = both(model, x, torch.full((6,), -100))[1]
    assert float(loss) == 0
    assert not any(block.any() for block in grads.values())
    net[0].requires_grad_(False)
    results = both(Functional.of(net), x, torch.tensor([0, 1, 2, 1, 0, 0]))
    assert list(results[1][0]) == ["2.weight", "2.bias"]
    assert_equal(results)


class Skipping(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.relu(self.a(x)))


class Changing(nn.Sequential):
    """A chain when it is looked at, and something else afterwards."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        out = super().forward(x)
        return out if self.calls == 1 else 2 * out


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Skipping(nn.Linear(4, 4)), "not a chain"),
        (Scaled(nn.Linear(4, 4)), None),
        (Tied(), "uses a weight twice"),
        (Changing(nn.Linear(4, 4)), "more than its layers"),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), "begins with"),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "other layers than"),
        (nn.Sequential(nn.Linear(4, 4), nn.Identity()), "other layers than"),
    ],
)
def test_other_models_are_refused(net, reason):
    model, batch = Functional.of(net), (torch.randn(3, 4), torch.tensor([0, 1, 2]), None)
    with pytest.raises(UnsupportedModel, match=reason):
        Chain(model).gradient(model.weights(), {}, *batch)


def test_layers_that_a_chain_may_have():
    assert may_be_chain(Functional.of(conv_net(1, 8, (2,), 0, 3)))
    assert not may_be_chain(Functional.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    assert not may_be_chain(Functional.of(nn.Conv2d(2, 2, 3, groups=2)))
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda layer, args, out: 2 * out)
    assert not may_be_chain(Functional.of(hooked))


def images_task():
    torch.manual_seed(0)
    clients = [(torch.randn(20, 1, 8, 8), torch.randint(0, 3, (20,))) for _ in range(4)]
    return Task(conv_net(1, 8, (4, 6), 0, 3), *pool_clients(clients))


@pytest.mark.parametrize(
    "method",
    [
        Method(client_opt=SGD(0.05, momentum=0.9, clip_norm=0.1)),
        Method(space=MAPO(k=32), client_opt=SGD(0.05)),
        Method(client_opt=SGD(0.05), correction=FedProx(0.1)),
    ],
)
def test_training_equals_the_loop_and_itself_with_any_number_of_threads(method, three_cores):
    run = job(method, images_task(), rounds=3, cohort=3)
    _, first, records = play(run, Engine(backend="chain"))
    torch.set_num_threads(1)
    simulation, second, again = play(run, Engine(backend="chain"))
    assert bits(records) == bits(again)
    assert same_public(first[-1].server.public, second[-1].server.public)
    assert second[-1].backend == "chain"
    other, states, _ = play(run, Engine(backend="loop"))
    ours, loop = (s.weights(t[-1].server.public) for s, t in ((simulation, second), (other, states)))
    assert all(float((ours[name] - block).abs().max()) < 1e-3 for name, block in loop.items())


def test_a_model_that_is_no_chain_is_an_error_only_if_the_backend_was_given():
    task = digits_task(nn.Sequential(perceptron(), nn.Tanh()))
    with pytest.raises(ConfigError, match=r"backend = 'chain': the model has other layers .*; write backend = 'auto'"):
        play(job(task=task), Engine(backend="chain"))
    assert play(job(task=task, rounds=1))[1][-1].backend != "chain"
