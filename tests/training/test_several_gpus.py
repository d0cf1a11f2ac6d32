"""`examples/several_gpus.py`: torchrun with two gloo processes gives the upload of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw

TRAINER = f"{Path(__file__).parents[2] / 'examples/several_gpus.py'}:fit"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "lora"])
def test_two_processes_of_torchrun_send_what_one_sends(method, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(50, 20, generator=generator), torch.randint(3, (50,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    options = {"rounds": 1, "cohort": 1, "test": (inputs, targets), "lr": 0.1, "progress": False}
    options |= {"set": {"local.epochs": 2, "local.batch": 15}}  # the last batch has five examples: three and two
    found = {}
    for processes in ("", "1", "2"):  # without: our own steps
        monkeypatch.setenv("PROCESSES", processes)
        trainer = {"trainer": TRAINER} if processes else {}
        run = tw.simulate(model, [(inputs, targets)], method, **options, **trainer)
        found[processes] = {name: one.detach() for name, one in run.model().state_dict().items()}
    moved = max(float((found["1"][name] - one).abs().max()) for name, one in model.state_dict().items())
    assert moved > 0.01
    for name, one in found["1"].items():
        assert torch.allclose(one, found["2"][name], atol=1e-6), name
        assert torch.allclose(one, found[""][name], atol=1e-6), name
