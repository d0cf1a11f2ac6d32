"""Adam, AdamW, Yogi and Adagrad against torch."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.core.key import Key
from thinwire.errors import ConfigError

PAIRS = [
    (tw.optimizers.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    (tw.optimizers.Adam(lr=0.1, beta1=0.5, beta2=0.9, eps=1e-3), lambda p: torch.optim.Adam(p, 0.1, (0.5, 0.9), 1e-3)),
    (tw.optimizers.Adam(lr=0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
    (tw.optimizers.AdamW(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    (tw.optimizers.AdamW(lr=0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3)),
    (tw.optimizers.Adagrad(lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1)),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRS, ids=range(len(PAIRS)))
def test_five_steps_equal_those_of_torch(mine, theirs):
    start = {"a": Key(1).normal(3, 2), "b": Key(2).normal(4)}
    parameters = {name: block.clone().requires_grad_() for name, block in start.items()}
    optimizer = theirs(list(parameters.values()))
    coords, state = start, mine.init(start)
    for step in range(5):
        grads = {name: Key(step).fold(name).normal(*block.shape) for name, block in coords.items()}
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        optimizer.step()
        change, state = mine.update(grads, state, coords)
        coords = {name: block + change[name] for name, block in coords.items()}
    for name, parameter in parameters.items():
        assert torch.allclose(coords[name], parameter.detach(), atol=1e-6)


def test_the_second_moment_of_yogi_changes_by_a_share_of_the_square():
    opt = tw.optimizers.Yogi(beta2=0.5)
    state = {**opt.init({"w": torch.zeros(2)}), "v": {"w": torch.tensor([10.0, 0.1])}}
    _, after = opt.update({"w": torch.tensor([1.0, 1.0])}, state, {})
    assert after["v"]["w"].tolist() == pytest.approx([9.5, 0.6])


def test_invalid_settings_are_refused():
    bad = [{"lr": 0}, {"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0}, {"weight_decay": -1}]
    for settings in bad:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            tw.optimizers.Adam(**settings)
    with pytest.raises(ConfigError, match="bias_correction"):
        tw.optimizers.Adagrad(bias_correction=True)
