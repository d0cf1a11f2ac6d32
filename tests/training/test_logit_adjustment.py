"""Logit adjustment of local training against plain torch; evaluation and the defaults stay as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thinwire as tw
from tests.training.test_functional_losses import trained_by_torch
from thinwire.data.losses import adjust_logits, cross_entropy
from thinwire.data.task import as_examples
from thinwire.errors import ConfigError
from thinwire.runs.config import digest, resolve
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

FEATURES, CLASSES = 3, 5


def rows(n, labels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=generator), torch.tensor(labels)[torch.arange(n) % len(labels)]


def adjusted_by_torch(outputs, targets, strength=1.0, pseudo_count=0.5):
    """The formula, class by class."""
    n = len(targets)
    shares = [(int((targets == c).sum()) + pseudo_count) / (n + CLASSES * pseudo_count) for c in range(CLASSES)]
    return F.cross_entropy(outputs + strength * torch.tensor(shares).log(), targets)


@pytest.mark.parametrize("backend", ["vmap", "loop", "threads"])
def test_training_steps_equal_those_of_torch(backend):
    """Clients of 7 and 4 examples in batches of 3: the last batches are short, and only their own labels count."""
    torch.manual_seed(0)
    net, local = nn.Linear(FEATURES, CLASSES), tw.Local(epochs=3, batch=3, logit_adjustment=1.0)
    clients = [rows(7, [0, 1]), rows(4, [4, 2, 2], seed=1)]
    run = tw.simulate(
        net, clients, tw.Method(client_opt=tw.optimizers.SGD(0.5)), rounds=1, local=local, backend=backend
    )
    for block, right in zip(
        run.weights.values(), trained_by_torch(net, clients, local, adjusted_by_torch), strict=True
    ):
        torch.testing.assert_close(block, right, rtol=1e-5, atol=1e-6)


def test_outputs_of_classes_that_a_batch_lacks_have_smaller_gradients():
    outputs, targets = torch.zeros(4, CLASSES, requires_grad=True), torch.tensor([0, 1, 0, 1])
    sizes = {}
    for strength in (0.0, 0.5, 1.0):
        shifted = adjust_logits(outputs, targets, torch.ones(4), strength, 0.1)
        (grad,) = torch.autograd.grad(cross_entropy(shifted, targets).mean(), outputs)
        sizes[strength] = float(grad[:, 2:].abs().sum())
    assert sizes[0.0] > 2 * sizes[0.5] > 4 * sizes[1.0] > 0


def test_ignored_labels_of_sequences_do_not_count():
    outputs = torch.zeros(2, 3, CLASSES)
    targets = torch.tensor([[0, -100, -100], [1, 1, -100]])
    shifted = adjust_logits(outputs, targets, torch.ones(2), 1.0, 1.0)
    expected = torch.tensor([2.0, 3.0, 1.0, 1.0, 1.0]) / 8
    torch.testing.assert_close(shifted[1, 2].exp(), expected)
    left_out = adjust_logits(outputs, targets, torch.tensor([1.0, 0.0]), 1.0, 1.0)
    torch.testing.assert_close(left_out[0, 0].exp(), torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0]) / 6)


def test_evaluation_does_not_change():
    torch.manual_seed(0)
    net, examples = nn.Linear(FEATURES, CLASSES), as_examples(rows(11, [0, 3]))
    plain = Functional.of(net)
    adjusted = Functional(plain.module, cross_entropy, logit_adjustment=1.0)
    assert evaluate(adjusted, plain.weights(), {}, examples) == evaluate(plain, plain.weights(), {}, examples)


def test_digests_of_experiments_without_it_stay():
    assert "logit_adjustment" not in repr(tw.Local())
    plain, same, other = (
        digest(resolve("fedavg", "digits", changes))
        for changes in ({}, {"local.logit_adjustment": 0.0, "local.pseudo_count": 0.5}, {"local.logit_adjustment": 1.0})
    )
    assert plain == same != other


@pytest.mark.parametrize(
    "given", [{"logit_adjustment": -1.0}, {"logit_adjustment": float("nan")}, {"pseudo_count": 0.0}]
)
def test_bad_values_are_one_line(given):
    (name,) = given
    with pytest.raises(ConfigError, match=rf"^{name} must be [^\n]*; write for example"):
        tw.Local(**given)


def test_a_loss_without_class_labels_is_an_error():
    x = torch.randn(8, FEATURES)
    with pytest.raises(ConfigError, match=r"logit_adjustment needs class labels"):
        tw.simulate(nn.Linear(FEATURES, 1), [(x, x[:, 0])], rounds=1, loss="mse", local=tw.Local(logit_adjustment=1.0))
