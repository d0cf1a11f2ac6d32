"""SGD against torch."""

import itertools

import pytest
import torch

from thinwire.core.key import Key
from thinwire.core.tree import add
from thinwire.errors import ConfigError
from thinwire.optimizers import SGD

SETTINGS = [
    {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    for lr, momentum, nesterov, decay in itertools.product((0.01, 0.5), (0.0, 0.9), (False, True), (0.0, 0.1))
    if momentum or not nesterov
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_five_steps_equal_those_of_torch(settings):
    shapes = {"w": (4, 3), "b": (4,), "s": ()}
    coords = {name: Key(1).fold(name).normal(*shape) for name, shape in shapes.items()}
    theirs = {name: torch.nn.Parameter(block.clone()) for name, block in coords.items()}
    torch_sgd = torch.optim.SGD(theirs.values(), **settings)
    ours = SGD(**settings)
    state = ours.init(coords)
    for step in range(5):
        grads = {name: Key(2).fold(name, step).normal(*shape) for name, shape in shapes.items()}
        for name, parameter in theirs.items():
            parameter.grad = grads[name].clone()
        torch_sgd.step()
        change, state = ours.update(grads, state, coords)
        coords = add(coords, change)
        for name, parameter in theirs.items():
            torch.testing.assert_close(coords[name], parameter.detach(), rtol=1e-6, atol=1e-6)


def test_sgd_without_momentum_has_no_state():
    assert SGD(0.1).init({"w": torch.zeros(3)}) == {}


def test_a_step_of_one_on_the_negated_mean_is_averaging():
    mean = {"w": torch.tensor([0.3, -7.0])}
    change, _ = SGD(1.0).update({"w": -mean["w"]}, {}, {"w": torch.ones(2)})
    assert torch.equal(change["w"], mean["w"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": -1.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -1e-3}, "weight_decay"),
        ({"nesterov": True}, "nesterov needs momentum"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SGD(**settings)
