"""Loss, accuracy and metrics of each kind of learning: those of torch and scikit-learn, for batches of any size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from sklearn import metrics as sk
from sklearn.datasets import load_diabetes
from torch import nn

import thinwire as tw
from thinwire.data.losses import LOSSES, bce, cross_entropy, mse
from thinwire.data.task import Task, as_examples, pool_clients
from thinwire.federation.job import Job
from thinwire.metrics import metrics_by_name
from thinwire.training.evaluation import evaluate
from thinwire.training.functional import Functional

BATCHES = st.integers(1, 30)
NAMES = {
    cross_entropy: ("accuracy", "f1", "balanced-accuracy", "perplexity"),
    mse: ("mse", "mae", "r2"),
    bce: ("multilabel-accuracy", "multilabel-f1"),
}


def evaluated(outputs, targets, loss, batch, names=()):
    """An evaluation of a model that returns its inputs."""
    model = Functional.of(nn.Linear(1, 1), loss)
    model = type(model)(nn.Identity(), loss)
    weights = {"none": torch.zeros(1)}
    examples = as_examples((outputs, targets))
    object.__setattr__(model, "outputs", lambda weights, buffers, inputs: inputs)
    return evaluate(model, weights, {}, examples, metrics=metrics_by_name(names), batch=batch)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), length=st.integers(0, 4), ignored=st.floats(0, 0.9), batch=BATCHES)
def test_with_ignored_labels_loss_and_accuracy_are_those_of_torch_and_scikit_learn(seed, length, ignored, batch):
    generator = torch.Generator().manual_seed(seed)
    shape = (17, length) if length else (17,)
    outputs = 3 * torch.randn(*shape, 5, generator=generator)
    targets = torch.randint(0, 5, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < ignored] = -100
    targets[0] = 1  # at least one label counts
    own = evaluated(outputs, targets, cross_entropy, batch)
    torchs = evaluated(outputs.movedim(-1, 1), targets, F.cross_entropy, batch)
    known = targets != -100
    assert own.loss == pytest.approx(float(F.cross_entropy(outputs[known], targets[known])), rel=1e-5)
    assert torchs.loss == pytest.approx(own.loss, rel=1e-5)
    assert own.accuracy == pytest.approx(sk.accuracy_score(targets[known], outputs.argmax(-1)[known]))


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(sorted(LOSSES)), batch=BATCHES)
def test_metrics_of_batches_of_any_size_are_those_of_the_whole(seed, kind, batch):
    generator = torch.Generator().manual_seed(seed)
    outputs, loss = torch.randn(23, 4, generator=generator), LOSSES[kind]
    targets = torch.randn(23, 4, generator=generator)
    if loss is cross_entropy:
        targets = targets.argmax(1)
        targets[::5] = -100
    elif loss is bce:
        targets = (targets > 0).long()
        targets[::5, 1] = -100
    whole = evaluated(outputs, targets, loss, 23, NAMES[loss])
    parts = evaluated(outputs, targets, loss, batch, NAMES[loss])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.accuracy == whole.accuracy
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-9)


def job_of(model, inputs, targets, loss, **options) -> Job:
    train, clients = pool_clients([(inputs, targets), (inputs, targets)])
    return Job(Task(model, train, clients, as_examples((inputs, targets)), loss=loss), cohort=2, **options)


def grades(outputs, targets):
    """A loss of ranking: documents of one query with a higher grade must have a higher output."""
    wrong = F.softplus(outputs[:, None, :] - outputs[:, :, None])
    higher = (targets[:, :, None] > targets[:, None, :]).float()
    return (wrong * higher).sum((1, 2)) / higher.sum((1, 2)).clamp(min=1)


def counts(outputs, targets):
    """Poisson loss of counts."""
    return F.poisson_nll_loss(outputs[:, 0], targets.float(), reduction="none")


def own_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 3
KINDS = {
    "classification": (nn.Linear(6, 3), LABELS, cross_entropy, "accuracy"),
    "classification by an own loss": (nn.Linear(6, 3), LABELS, own_cross_entropy, "accuracy"),
    "multi-label": (nn.Linear(6, 3), F.one_hot(LABELS, 3), bce, "accuracy"),
    "multi-label of floats": (nn.Linear(6, 3), F.one_hot(LABELS, 3).float(), bce, "accuracy"),
    "regression": (nn.Linear(6, 1), X[:, 0], mse, "r2"),
    "regression by torch's loss": (nn.Linear(6, 1), X[:, :1], nn.HuberLoss(), "r2"),
    "ranking": (nn.Linear(6, 4), LABELS[:, None] + torch.arange(4), grades, "loss"),
    "ranking of floats": (nn.Linear(6, 4), (LABELS[:, None] + torch.arange(4)).float(), grades, "loss"),
    "counts": (nn.Linear(6, 1), LABELS, counts, "loss"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_fits_the_kind_and_every_evaluation_has_it(kind):
    model, targets, loss, wanted = KINDS[kind]
    objective = job_of(model, X, targets, loss).ranked_by
    assert objective.name == wanted
    run = tw.simulate(model, [(X, targets), (X, targets)], "fedavg", rounds=1, test=(X, targets), loss=loss)
    assert objective.value(run.history[-1]._asdict()) is not None
    assert run.status == "finished"


def test_a_regression_has_r2_and_mae_in_every_record_and_own_metrics_win():
    run = tw.simulate(nn.Linear(6, 1), [(X, X[:, 0])], rounds=1, test=(X, X[:, 0]), loss="mse", metrics=["mse"])
    assert set(run.history[-1].metrics) == {"mse", "mae", "r2"}
    assert run.history[-1].metrics["mse"] == pytest.approx(run.history[-1].test_loss)
    own = {"r2": lambda outputs, targets: 7.0}
    assert job_of(nn.Linear(6, 1), X, X[:, 0], mse, metrics=own).all_metrics["r2"] is own["r2"]


def diabetes(scale: float = 1.0) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """Eight unequal clients and a test set of 110 patients; targets are standardized."""
    x, y = load_diabetes(return_X_y=True)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    inputs = torch.tensor(scale * (x / x.std(0))[order], dtype=torch.float32)
    targets = torch.tensor(((y - y.mean()) / y.std())[order], dtype=torch.float32)
    cuts = [0, 20, 45, 60, 110, 150, 190, 280, 332]
    return [(inputs[a:b], targets[a:b]) for a, b in pairwise(cuts)], (inputs[332:], targets[332:])


def perceptron() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


@pytest.fixture(scope="module")
def fedavg_r2() -> float:
    clients, test = diabetes()
    return best_r2(tw.simulate(perceptron(), clients, "fedavg", rounds=12, test=test, loss="mse", backend="vmap"))


def best_r2(run) -> float:
    return max(record.metrics["r2"] for record in run.history)


@pytest.mark.parametrize("method", ["mapo", "thin", "fedpara", "flasc"])
def test_untouched_presets_learn_a_regression(method, fedavg_r2):
    clients, test = diabetes()
    run = tw.simulate(perceptron(), clients, method, rounds=12, test=test, loss="mse", backend="vmap")
    assert run.status == "finished"
    assert all(np.isfinite(record.loss) for record in run.history)
    assert fedavg_r2 > 0.3
    assert best_r2(run) > fedavg_r2 - 0.06


def test_a_regression_that_never_beats_the_mean_is_at_chance():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 6, generator=generator), torch.randn(400, generator=generator)
    clients, test = [(noise[0][:200], noise[1][:200])], (noise[0][200:], noise[1][200:])
    with pytest.warns(RuntimeWarning, match="r2 -.* is not above 0, that of predicting the mean"):
        run = tw.simulate(nn.Linear(6, 1), clients, "fedavg", rounds=10, test=test, loss="mse", backend="vmap")
    assert run.status == "at chance"
    assert "r2 -" in run.status_reason


def test_inputs_that_are_not_standardized_get_one_line():
    clients, test = diabetes(scale=1000.0)
    with pytest.warns(RuntimeWarning) as caught:
        run = tw.simulate(perceptron(), clients, "fedavg", rounds=2, test=test, loss="mse", backend="vmap")
    lines = [str(one.message) for one in caught if "root mean square" in str(one.message)]
    assert lines == [
        "inputs have a root mean square of 1,006: training may be slow or diverge; subtract the mean and divide by the "
        "standard deviation"
    ]
    assert np.isfinite(run.history[-1].loss)
    normed = nn.Sequential(nn.BatchNorm1d(10), perceptron())  # such inputs do not matter here
    normed[0].running_var.fill_(1e6)
    tw.simulate(normed, clients, "fedavg", rounds=1, test=test, loss="mse", backend="vmap")
