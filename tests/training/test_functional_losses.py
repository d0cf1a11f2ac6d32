"""Losses of regression and of multi-label classification: training and evaluation against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thinwire as tw
from thinwire.data.losses import LOSSES, bce, cross_entropy, loss_by_name, mse
from thinwire.data.task import as_examples, pool_clients
from thinwire.errors import ConfigError, UnknownName
from thinwire.federation.sampler import Sampler
from thinwire.metrics import metrics_by_name
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

FEATURES, VALUES = 3, 4


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, FEATURES, generator=generator), torch.randn(n, VALUES, generator=generator)


def regression(n, seed=0):
    return rows(n, seed)


def one_value(n, seed=0):
    x, y = rows(n, seed)
    return x, y[:, 0]


def float_labels(n, seed=0):
    x, y = rows(n, seed)
    return x, (y > 0).float()


def integer_labels(n, seed=0):
    x, y = rows(n, seed)
    return x, (y > 0).long()


def torch_mse(outputs, targets):
    return F.mse_loss(outputs.reshape(targets.shape), targets)


def torch_bce(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs.reshape(targets.shape), targets.float())


CASES = {
    "mse": (mse, torch_mse, regression, VALUES),
    "mse of one value": (mse, torch_mse, one_value, 1),
    "bce, float labels": (bce, torch_bce, float_labels, VALUES),
    "bce, integer labels": (bce, torch_bce, integer_labels, VALUES),
}
FORMS = pytest.mark.parametrize(("loss", "by_torch", "make", "outputs"), CASES.values(), ids=CASES.keys())


def trained_by_torch(net, clients, local, by_torch):
    """The weighted mean of the weights that each client reaches with plain torch on the same batches."""
    pool, assignment = pool_clients(clients)
    ids, count = tuple(range(len(clients))), len(clients)
    work = Sampler(tw.Key(0), ids, count, local, pool, assignment, torch.device("cpu")).workload(0, ids)
    mean = [torch.zeros_like(p) for p in net.parameters()]
    for i, (x, _) in enumerate(clients):
        own = nn.Linear(FEATURES, net.out_features)
        own.load_state_dict(net.state_dict())
        optimizer = torch.optim.SGD(own.parameters(), 0.5)
        for step, counted in enumerate(work.rows[i].tolist()):
            if counted:
                inputs, targets = pool.gather(work.index[i, step, :counted])
                optimizer.zero_grad()
                by_torch(own(inputs), targets).backward()
                optimizer.step()
        mean = [m + len(x) / len(pool) * p.detach() for m, p in zip(mean, own.parameters(), strict=True)]
    return mean


@pytest.mark.parametrize("backend", ["vmap", "loop", "threads"])
@FORMS
def test_training_steps_equal_those_of_torch(loss, by_torch, make, outputs, backend):
    """Clients of 7 and 4 examples in batches of 3: the last batches are short and masked."""
    torch.manual_seed(0)
    net, local = nn.Linear(FEATURES, outputs), tw.Local(epochs=3, batch=3)
    clients = [make(7), make(4, seed=1)]
    method = tw.Method(client_opt=tw.optimizers.SGD(0.5))
    given = {"local": local, "loss": loss, "backend": backend, "test": make(5, seed=2), "recipe": "paper"}
    run = tw.simulate(net, clients, method, rounds=1, **given)
    expected = trained_by_torch(net, clients, local, by_torch)
    for block, right in zip(run.weights.values(), expected, strict=True):
        torch.testing.assert_close(block, right, rtol=1e-5, atol=1e-6)
    assert (run.history[-1].accuracy is None) == (loss is mse)


@FORMS
def test_the_mask_leaves_out_examples(loss, by_torch, make, outputs):
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(FEATURES, outputs), make(6)
    model, mask = Functional.of(net, loss), torch.tensor([1.0, 1, 0, 1, 0, 0])
    weights = {name: w.requires_grad_() for name, w in model.weights().items()}
    grads, (value, _) = model.gradient(weights, {}, x, y, mask)
    expected = by_torch(net(x[mask > 0]), y[mask > 0])
    torch.testing.assert_close(value, expected.detach())
    for grad, right in zip(grads.values(), torch.autograd.grad(expected, list(net.parameters())), strict=True):
        torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("batch", [1, 4, 11])
@FORMS
def test_evaluation_equals_torch_on_the_whole_set(loss, by_torch, make, outputs, batch):
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(FEATURES, outputs), make(11)
    model = Functional.of(net, loss)
    found = evaluate(model, model.weights(), {}, as_examples((x, y)), batch=batch)
    predicted = net(x).detach()
    assert found.loss == pytest.approx(float(by_torch(predicted, y)), rel=1e-6)
    if loss is mse:
        assert found.accuracy is None
    else:
        assert found.accuracy == pytest.approx(float(((predicted > 0) == (y > 0.5)).double().mean()))


def test_integer_labels_of_minus_100_are_ignored_by_bce():
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(FEATURES, VALUES), integer_labels(9)
    y[torch.rand(9, VALUES) < 0.4] = -100
    y[3] = -100
    known = y != -100
    model = Functional.of(net, bce)
    found = evaluate(model, model.weights(), {}, as_examples((x, y)), batch=2)
    predicted = net(x).detach()
    assert found.loss == pytest.approx(float(torch_bce(predicted[known], y[known])), rel=1e-6)
    assert found.accuracy == pytest.approx(float(((predicted > 0) == (y > 0))[known].double().mean()))
    each = bce(predicted, y)
    assert each[3] == 0
    assert each[0] == pytest.approx(float(torch_bce(predicted[0][known[0]], y[0][known[0]])), rel=1e-6)


def test_squared_errors_of_bfloat16_outputs_are_float32():
    targets = torch.tensor([1.001])
    assert mse(torch.ones(1, dtype=torch.bfloat16), targets) == (targets - 1).square()
    assert mse(torch.ones(1), targets.double()).dtype == torch.float32


def test_targets_that_do_not_fit_are_an_error_in_one_line():
    with pytest.raises(ConfigError, match=r"^loss 'mse' was given targets of type torch.int64; give floats"):
        mse(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    for loss in (mse, bce):
        with pytest.raises(
            ConfigError, match=r"^targets of shape \[3\] do not fit outputs of shape \[3, 2\]; give one"
        ):
            loss(torch.zeros(3, 2), torch.zeros(3))


def test_losses_have_names():
    assert {"cross-entropy": cross_entropy, "mse": mse, "bce": bce} == LOSSES
    with pytest.raises(UnknownName, match="unknown loss 'ms'"):
        loss_by_name("ms")


@pytest.mark.parametrize("batch", [1, 7, 0])
def test_evaluation_gives_the_metrics_of_the_chosen_examples(batch):
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(FEATURES, VALUES), regression(20)
    model, index = Functional.of(net, mse), torch.tensor([3, 1, 4, 15, 9, 2, 6, 5])
    metrics = {**metrics_by_name(["mae", "r2"]), "largest": lambda outputs, targets: float(outputs.max())}
    found = evaluate(model, model.weights(), {}, as_examples((x, y)), index.numpy(), metrics, batch=batch)
    predicted = net(x[index]).detach()
    assert found.examples == 8
    assert list(found.metrics) == ["mae", "r2", "largest"]
    assert found.metrics["mae"] == pytest.approx(float((predicted - y[index]).abs().mean()), rel=1e-6)
    assert found.metrics["largest"] == pytest.approx(float(predicted.max()), rel=1e-6)


def test_metrics_do_not_change_loss_and_accuracy():
    torch.manual_seed(0)
    model, x = Functional.of(nn.Linear(FEATURES, VALUES)), torch.randn(50, FEATURES)
    examples = as_examples((x, torch.arange(50) % VALUES))
    plain = evaluate(model, model.weights(), {}, examples, batch=7)[:2]
    with_metrics = evaluate(
        model, model.weights(), {}, examples, metrics=metrics_by_name(["accuracy", "f1", "perplexity"]), batch=7
    )
    assert with_metrics[:2] == plain
    assert with_metrics.metrics["accuracy"] == plain[1]
    assert with_metrics.metrics["perplexity"] == pytest.approx(torch.tensor(plain[0]).exp().item(), rel=1e-6)
