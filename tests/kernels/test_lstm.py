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


@pytest.mark.parametrize(
    ("inputs", "hidden", "layers", "coded"), [(8, 32, 2, True), (20, 48, 3, False), (5, 16, 1, True)]
)
def test_the_last_state_without_gradients_is_that_of_nn_lstm_up_to_16_bits(inputs, hidden, layers, coded, monkeypatch):
    module = interpreted("thinwire.kernels.lstm_states_triton")
    monkeypatch.setattr(module, "ROWS", 32)
    torch.manual_seed(0)
    exact = torch.nn.LSTM(inputs, hidden, layers, batch_first=True).double()
    n, steps = 40, 6
    values, codes = torch.randn(11, inputs), torch.randint(0, 11, (n, steps))
    x = values[codes] if coded else torch.randn(n, steps, inputs)
    with torch.no_grad():
        wanted = exact(x.double())[0][:, -1]
        parts = [[getattr(exact, f"{name}_l{at}").float() for name in NAMES] for at in range(layers)]
        blocks = [(inner, own, first + second) for inner, own, first, second in parts]
        found = module.last_state(*((values, codes) if coded else (x, None)), blocks)
    assert found.shape == (n, hidden)
    assert found.dtype == torch.float32
    assert float((found - wanted).abs().max()) < 1e-3
