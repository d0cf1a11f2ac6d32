"""Presets on networks that none was tuned for, at FedAvg's learning rates: a perceptron, and Conv1d with a GRU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.federation import digits

PRESETS = ["mapo", "mapa", "fedpara", "lora"]


class Series(nn.Module):
    """A convolution and a recurrent layer for series of 24 steps and three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru, self.fc = (
            nn.Conv1d(3, 16, 5, padding=2),
            nn.GRU(16, 32, batch_first=True),
            nn.Linear(32, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of five frequencies."""
        states, _ = self.gru(torch.relu(self.conv(x))[:, :, ::2].transpose(1, 2))
        return self.fc(states[:, -1])


def series(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy waves of random phase, labeled by their frequency."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (rows,), generator=generator)
    angle = 6.2832 * ((y[:, None] + 1) * torch.arange(24) / 24 + torch.rand(rows, 1, generator=generator))
    waves = torch.stack([angle.sin(), angle.cos(), torch.randn(rows, 24, generator=generator)], 1)
    return waves + 0.3 * torch.randn(waves.shape, generator=generator), y


def trained(preset: str, net: nn.Module, clients, test, lr: float, rounds: int) -> float:
    method = getattr(tw.methods, preset.replace("-", "_"))()
    assert method.client_opt == tw.Method.client_opt  # not filled: FedAvg's rate is used
    method = method.replace(client_opt=tw.optimizers.SGD(lr))
    run = tw.simulate(net, clients, method, rounds=rounds, cohort=6, local=tw.Local(epochs=2, batch=10), test=test)
    return run.accuracy


@pytest.mark.parametrize("lr", [pytest.param(0.1, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_learn_digits_at_the_rate_of_fedavg(preset, lr):
    """FedAvg: 88 % at 0.1 and 93 % at 0.3."""
    x, y = digits()
    clients = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 1200, 100)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    assert trained(preset, net, clients, (x[1200:], y[1200:]), lr, rounds=5) > (0.3 if preset == "mapa" else 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["fedpara", "lora"])
def test_presets_learn_series_at_the_rate_of_fedavg(preset):
    """With the old presets FedPara stayed at chance, and LoRA refused the head of five rows."""
    clients = [series(40 + 10 * i, i) for i in range(8)]
    torch.manual_seed(0)
    assert trained(preset, Series(), clients, series(300, 99), 0.3, rounds=7) > 0.4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round")  # it swings near chance in its first rounds
def test_flasc_learns_series():
    clients = [series(40 + 10 * i, i) for i in range(8)]
    torch.manual_seed(0)
    run = tw.simulate(Series(), clients, "flasc", rounds=16, local=tw.Local(epochs=2, batch=10), test=series(300, 99))
    assert max(record.accuracy for record in run.history) > 0.6
