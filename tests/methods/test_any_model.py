"""Untouched presets on models of any kind: without a linear layer, with small layers only, with vectors only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.core.tree import Spec


class LastOutput(nn.Module):
    """A recurrent network whose last outputs are the class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores, (n, 3)."""
        return self.gru(x)[0][:, -1]


class MeanOfTokens(nn.Module):
    """The mean of the embeddings of tokens."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores, (n, 3)."""
        return self.embed(x).mean(1)


class Scales(nn.Module):
    """A factor and an offset for each feature: no matrix at all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores, (n, 3)."""
        return self.scale * x + self.shift


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


MODELS = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(1, 3, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten()),
        _floats(24, 1, 9),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 16, 5), nn.ReLU(), nn.Conv1d(16, 3, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()
        ),
        _floats(24, 2, 9),
    ),
    "gru": (LastOutput, _floats(24, 5, 4)),
    "embedding": (MeanOfTokens, torch.arange(24 * 5).view(24, 5) % 12),
    "large embedding": (lambda: MeanOfTokens(500), torch.arange(24 * 5).view(24, 5) % 500),
    "small linear": (lambda: nn.Linear(4, 2), _floats(24, 4)),
    "wide head": (lambda: nn.Linear(40, 30), _floats(24, 40)),
    "vectors": (Scales, _floats(24, 3)),
}
METHODS = ["mapo", "thin", "fedpara", "topk", "lora", "flasc"]


@pytest.mark.filterwarnings("ignore:round")  # a round on random labels may be at chance
@pytest.mark.parametrize("name", MODELS)
def test_no_preset_refuses_a_model_and_all_of_them_train_it(name):
    make, inputs = MODELS[name]
    labels = torch.arange(24) % 2
    clients = [(inputs[:10], labels[:10]), (inputs[10:], labels[10:])]
    for method in METHODS:
        torch.manual_seed(0)
        model = make()
        before = {key: block.clone() for key, block in model.state_dict().items()}
        rounds = 4 if method == "thin" else 1  # it rounds few and small values at random, in one round perhaps all to 0
        run = tw.simulate(model, clients, method, rounds=rounds, test=clients[0], backend="loop")
        assert all(torch.isfinite(block).all() for block in run.weights.values()), method
        assert any(not torch.equal(run.weights[key], before[key]) for key in run.weights), method


def test_lower_ranks_and_dense_matrices_are_said():
    net = nn.Sequential(nn.Linear(100, 6), nn.Linear(6, 400), nn.Linear(400, 300), nn.Linear(300, 3))
    small = nn.Linear(4, 2)
    for space in (tw.methods.lora().space, tw.methods.flasc().space):
        assert space.note(Spec.of(dict(net.named_parameters()))) == (
            "Trained without an adapter: 0.weight, 1.weight, 3.weight."
        )
        assert space.note(Spec.of(dict(small.named_parameters()))) == "Trained without an adapter: weight."
        assert space.note(Spec.of(dict(Scales().named_parameters()))) == "Trained without an adapter: scale, shift."
    assert tw.spaces.LoRA(rank=8).note(Spec.of(dict(net.named_parameters()))) == (
        "LoRA has rank 8, but for smaller matrices: 0.weight 6, 1.weight 6, 3.weight 3."
    )
    assert tw.methods.fedpara().space.note(Spec.of(dict(Scales().named_parameters()))) == "FedPara leaves all dense."
