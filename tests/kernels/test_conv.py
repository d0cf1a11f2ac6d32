"""Tests of batched convolutions: values and gradients equal those of torch, for one client and for many."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value, vmap

from tests.simulation.test_engine import job, play
from thinwire.data.task import Task, pool_clients
from thinwire.federation.engine import Engine
from thinwire.kernels import conv
from thinwire.kernels.conv import by_products


def test_dilated_and_grouped_convolutions_are_left_to_torch():
    x, kernel = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
    with by_products():
        assert torch.equal(F.conv2d(x, kernel, groups=2), torch.conv2d(x, kernel, None, 1, 0, 1, 2))
        assert F.conv2d(x, torch.randn(6, 4, 3, 3), dilation=2, padding="same").shape == (2, 6, 9, 9)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_is_the_same_with_all_convolutions(precision):
    torch.manual_seed(0)
    clients = [(torch.randn(20, 1, 8, 8), torch.randint(0, 3, (20,))) for _ in range(3)]
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    task = Task(net, *pool_clients(clients))
    ends = []
    for products, backend in (("grouped", "vmap"), ("grouped", "graph"), ("auto", "loop")):
        engine = Engine("cpu", backend, conv=products, precision=precision)
        simulation, states, _ = play(job(task=task, rounds=10), engine)
        ends.append(simulation.weights(states[-1].server.public))
    bound = 1e-4 if precision == "float32" else 1e-2
    for other in ends[1:]:
        assert all(float((other[name] - block).abs().max()) < bound for name, block in ends[0].items())


@pytest.mark.parametrize("size", [(6, 4), (12, 6)])
@pytest.mark.parametrize("window", [2, (3, 2)])
def test_average_pooling_equals_that_of_torch(size, window):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, *size)

    def loss(x):
        return torch.sin(F.avg_pool2d(x, window)).sum()

    def ours(x):
        with by_products():
            return loss(x)

    (found, value), (wanted, same) = (vmap(grad_and_value(f))(x) for f in (ours, loss))
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(value, same, atol=1e-5)


def test_other_average_pooling_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(conv, "_Means", None)  # fails if it is called
    x = torch.randn(1, 1, 6, 6)
    with by_products():
        F.avg_pool2d(x, 4)
        for options in ({"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"divisor_override": 3}):
            F.avg_pool2d(x, 2, **options)
