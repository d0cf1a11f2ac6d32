"""Bytes of live tensors: exact on a perceptron of two layers, and the same with and without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire.experiments.check import check
from thinwire.experiments.config import resolve
from thinwire.training.live_bytes import Fake, LiveBytes

WIDE, HIDDEN, CLASSES, EXAMPLES = 30, 50, 10, 20


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the sum of all outputs."""
    return list(torch.autograd.grad(model(x).sum(), list(model.parameters())))


def test_the_bytes_of_a_perceptron_of_two_layers_are_exact():
    model, x = network(), torch.zeros(EXAMPLES, WIDE)
    with LiveBytes([x, *model.parameters()]) as live:
        out = model(x)
        # before and after the ReLU; autograd keeps the second only, and the outputs are ours
        hidden, outputs = 4 * EXAMPLES * HIDDEN, 4 * EXAMPLES * CLASSES
        assert (live.peak, live.now) == (2 * hidden, hidden + outputs)
        del out
        assert live.now == 0
        grads = step(model, x)
        # the gradient of the ReLU: its output, the gradients after and before it, those of the second layer, two sums
        assert live.peak == 3 * hidden + sum(weight.nbytes for weight in model[2].parameters()) + 8
        assert live.now == sum(grad.nbytes for grad in grads)
    del grads
    assert live.now == 0


def test_tensors_without_values_have_the_same_bytes():
    model, x = network(), torch.zeros(EXAMPLES, WIDE)
    fake = Fake()
    peaks = []
    for one, examples in ((model, x), (fake.module(model), fake.tensor(x))):
        with LiveBytes([examples, *one.parameters()]) as live:
            step(one, examples)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] > 0


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_a_check_counts_what_training_on_real_tensors_takes(backend, monkeypatch):
    quick = {"cohort.size": 3, "local.batch": 8, "rounds": 2, "engine.backend": backend}
    without = check(resolve("fedavgm", "digits", quick))
    monkeypatch.setattr(Fake, "tensor", lambda self, given: given)
    real = check(resolve("fedavgm", "digits", quick))
    assert without["memory_training"] == real["memory_training"] > 3 * without["memory_model"] // 2
    assert without["memory_evaluation"] == real["memory_evaluation"]


def test_a_model_that_looks_at_values_is_counted_on_real_tensors(monkeypatch):
    def refuse(self, given):
        raise RuntimeError("values are needed")

    quick = {"cohort.size": 3, "local.batch": 8, "rounds": 2, "engine.backend": "vmap"}
    without = check(resolve("fedavg", "digits", quick))
    monkeypatch.setattr(Fake, "tensor", refuse)
    real = check(resolve("fedavg", "digits", quick))
    assert 1 <= real["memory_training"] / without["memory_training"] < 1.2  # one client, three times
