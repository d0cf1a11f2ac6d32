"""Gradient checkpointing: a model that runs layers again in the backward pass trains as the same model without it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.optimizers.penalties import L1L2
from thinwire.training.functional import Functional


class Perceptron(nn.Module):
    """Three layers; the middle one, with a batch norm and a tied weight, is checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.middle, self.norm, self.last = (
            nn.Linear(6, 16),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 3),
        )
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.middle.weight

    def _part(self, x):
        return torch.relu(self.norm(self.middle(x))) + self.tied.weight.sum(0)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        again = self.training and self.reentrant is not None
        x = checkpoint(self._part, x, use_reentrant=self.reentrant) if again else self._part(x)
        return self.last(self.tied(x))


def train(net, clients, space=None, backend="loop", **settings):
    """Five epochs of four batches: 20 steps for each client."""
    method = tw.Method(space or tw.spaces.Full(), client_opt=tw.optimizers.SGD(0.05, momentum=0.5), **settings)
    return tw.simulate(
        net, clients, method, rounds=1, local=tw.Local(epochs=5, batch=4), backend=backend, test=clients[0]
    )


def rows(clients=2):
    made = (torch.randn(16, 6, generator=torch.Generator().manual_seed(i)) for i in range(clients))
    return [(x, torch.arange(16) % 3) for x in made]


def assert_same(ours, theirs):
    assert max(float((ours.weights[name] - block).abs().max()) for name, block in theirs.weights.items()) < 1e-6
    assert ours.history[-1].test_loss == pytest.approx(theirs.history[-1].test_loss, abs=1e-6)


@pytest.mark.parametrize("backend", ["loop", "threads", "auto"])
@pytest.mark.parametrize(
    ("space", "reentrant"), [(tw.spaces.Full(), True), (tw.spaces.LoRA(rank=2, alpha=2.0), False)], ids=str
)
def test_a_checkpointed_perceptron_trains_as_without_checkpointing(space, reentrant, backend):
    torch.manual_seed(0)
    plain = Perceptron(None)
    net = copy.deepcopy(plain)
    net.reentrant = reentrant
    expected = train(plain, rows(), space)
    moved = max(float((expected.weights[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())
    assert moved > 0.01
    assert_same(train(net, rows(), space, backend), expected)


def test_a_penalty_gets_the_gradient_of_the_loss():
    torch.manual_seed(0)
    plain = Perceptron(None)
    net = copy.deepcopy(plain)
    net.reentrant = False
    assert_same(*(train(model, rows(), penalty=L1L2(l2=0.1)) for model in (net, plain)))


@pytest.mark.parametrize("backend", ["vmap", "graph"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_vmap_and_graph_raise_an_error(backend, reentrant):
    with pytest.raises(ConfigError, match=r"checkpointing.*write backend = 'auto'"):
        train(Perceptron(reentrant), rows(), backend=backend)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def texts(clients=2):
    made = [torch.randint(0, 32, (16, 7), generator=torch.Generator().manual_seed(i)) for i in range(clients)]
    return [({"input_ids": codes[:, :-1]}, codes[:, 1:]) for codes in made]


def test_a_checkpointed_llama_trains_as_without_checkpointing():
    plain, net = llama(), llama()
    net.gradient_checkpointing_enable({"use_reentrant": True})
    assert_same(train(net, texts()), train(plain, texts()))


def test_a_checkpointed_llama_with_peft_adapters_trains_as_without_checkpointing():
    peft = pytest.importorskip("peft")
    plain, net = (
        peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])) for _ in range(2)
    )
    net.load_state_dict(plain.state_dict())
    net.enable_input_require_grads()  # the frozen layers below an adapter have no gradient
    net.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(train(net, texts()), train(plain, texts()))


def test_running_statistics_are_updated_once():
    torch.manual_seed(0)
    plain = Perceptron(None)
    net = copy.deepcopy(plain)
    net.reentrant = False
    after = []
    for model in (Functional.of(net), Functional.of(plain)):
        weights = {name: w.requires_grad_() for name, w in model.weights().items()}
        _, (_, buffers) = model.gradient(weights, model.buffers(), *rows(1)[0], None)
        after.append(buffers)
        assert all(p.grad is None for p in model.module.parameters())
    assert all(torch.equal(after[0][name], block) for name, block in after[1].items())
