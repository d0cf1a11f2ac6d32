"""Tests of the recurrence of an LSTM layer; that of triton in its interpreter, skipped without triton."""

import pytest
import torch
from torch.func import grad_and_value, vmap

from tests.interpreted import interpreted
from thinwire.kernels import recurrent

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def test_hidden_states_are_those_of_nn_lstm():
    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(3, 16), torch.randn(5, 4, 3)
    with torch.no_grad():
        wanted, _ = layer(x)
        inputs = x @ layer.weight_ih_l0.T + layer.bias_ih_l0 + layer.bias_hh_l0
        assert torch.allclose(recurrent.recurrence(inputs, layer.weight_hh_l0), wanted, atol=1e-6)


@pytest.mark.parametrize("examples", [5, 20])
def test_states_and_gradients_of_the_kernels_equal_those_of_torch(examples, monkeypatch):
    module = interpreted("thinwire.kernels.lstm_triton")
    monkeypatch.setattr(recurrent, "_kernels", lambda: module)
    monkeypatch.setattr(recurrent, "has_triton", lambda device: True)
    torch.manual_seed(0)
    args = torch.randn(2, 4, examples, 4 * 48), 0.3 * torch.randn(2, 4 * 48, 48), torch.randn(2, 4, examples, 48)

    def loss(recurrence):
        return vmap(grad_and_value(lambda x, w, f: (recurrence(x, w) * f).sum(), argnums=(0, 1)))(*args)

    (found, value), (wanted, expected) = loss(recurrent.recurrence), loss(recurrent._by_steps)
    assert torch.allclose(value, expected, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}, {"nonlinearity": "relu"}],
    ids=["one", "deep", "plain", "relu"],
)
def test_layers_batched_by_vmap_equal_those_of_torch(kind, options):
    if "nonlinearity" in options and kind != "RNN":
        pytest.skip("only nn.RNN has it")
    torch.manual_seed(0)
    module, x = getattr(torch.nn, kind)(3, 4, **options), torch.randn(2, 5, 6, 3)  # two clients
    states = torch.randn(2, module.num_layers * (2 if module.bidirectional else 1), x.shape[2 - module.batch_first], 4)
    states = (states, states.cos()) if kind == "LSTM" else (states,)
    weights = {name: torch.stack([w.detach(), w.detach() + 0.1]) for name, w in module.named_parameters()}

    def loss(weights, x, *states):
        first = states if kind == "LSTM" else states[0]
        out, last = torch.func.functional_call(module, weights, (x, first))
        return out.sin().sum() + sum(block.cos().sum() for block in (last if kind == "LSTM" else (last,)))

    with recurrent.batchable():
        grads, values = vmap(grad_and_value(loss))(weights, x, *states)
    for i in range(2):
        own = {name: block[i].clone().requires_grad_() for name, block in weights.items()}
        value = loss(own, x[i], *(block[i] for block in states))
        value.backward()
        assert torch.allclose(values[i], value, rtol=1e-5)
        for name, block in own.items():
            assert torch.allclose(grads[name][i], block.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_packed_sequences_and_projections_are_left_to_torch():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 3), [5, 3])
    projected, gru = torch.nn.LSTM(3, 8, proj_size=2), torch.nn.GRU(3, 4)
    with recurrent.batchable():
        assert gru(packed)[0].data.shape == (8, 4)
        assert projected(torch.randn(5, 2, 3))[0].shape == (5, 2, 2)


@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_and_without_a_mask_is_batched_without_a_loop_over_clients(masked, recwarn):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    weights = {name: torch.stack([w.detach()] * 3) for name, w in layer.named_parameters()}
    mask = torch.full((4, 4), -torch.inf).triu(1) if masked else None
    with recurrent.batchable():
        grads = vmap(grad_and_value(lambda w, x: torch.func.functional_call(layer, w, (x, mask)).square().sum()))(
            weights, torch.randn(3, 2, 4, 8)
        )[0]
    assert grads["self_attn.in_proj_weight"].shape == (3, 24, 8)
    assert not recwarn.list
