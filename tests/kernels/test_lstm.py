"""Tests of the recurrence of an LSTM layer; that of triton in its interpreter, skipped without triton."""

import pytest
import torch
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import lstm

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def test_hidden_states_are_those_of_nn_lstm():
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(3, 16), torch.randn(5, 4, 3)
    with torch.no_grad():
        wanted, _ = layer(x)
        inputs = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + layer.bias_hh_l0
        assert torch.allclose(lstm.recurrence(inputs, layer.weight_hh_l0), wanted, atol=1e-6)


@pytest.mark.parametrize("examples", [5, 20])
def test_states_and_gradients_of_the_kernels_equal_those_of_torch(examples, monkeypatch):
    module = interpreted("thinwire.kernels.lstm_triton")
    monkeypatch.setattr(lstm, "_kernels", lambda: module)
    monkeypatch.setattr(lstm, "has_triton", lambda device: True)
    torch.manual_seed(0)
    args = torch.randn(2, 4, examples, 4 * 48), 0.3 * torch.randn(2, 4 * 48, 48), torch.randn(2, 4, examples, 48)

    def loss(recurrence):
        return vmap(grad_and_value(lambda x, w, f: (recurrence(x, w) * f).sum(), argnums=(0, 1)))(*args)

    (found, value), (wanted, expected) = loss(lstm.recurrence), loss(lstm._by_steps)
    assert torch.allclose(value, expected, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())
