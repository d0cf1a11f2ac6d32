"""Built-in metrics against scikit-learn, for any batch size; errors that name the metric."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.datasets import load_digits

from thinwire.core.registry import _TABLE, entries, register
from thinwire.errors import ConfigError, UnknownName
from thinwire.metrics import ModelMetric, SumMetric, metrics_by_name
from thinwire.metrics.base import MetricAccumulator

N, CLASSES = 45, 6


def classes(seed=0):
    """Outputs and labels of one class after the other; class 5 is neither predicted nor labeled."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(N, CLASSES, generator=generator)
    outputs[:, 5] = -100.0
    return outputs, torch.randint(0, 4, (N,), generator=generator)


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 3, generator=generator), 5 + torch.randn(N, 3, generator=generator)


def labels(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, CLASSES, generator=generator), (torch.rand(N, CLASSES, generator=generator) < 0.3).float()


def tokens(seed=0):
    """Outputs of a language model; some next tokens are -100, among them all of one example."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(N, 4, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (N, 4), generator=generator)
    targets[torch.rand(N, 4, generator=generator) < 0.3] = -100
    targets[7] = -100
    return outputs, targets


def sk_perplexity(outputs, targets):
    known = targets != -100
    return math.exp(sk.log_loss(targets[known], outputs.double().softmax(-1)[known], labels=range(CLASSES)))


def sk_recall(outputs, targets):
    return sk.recall_score(targets, outputs.argmax(1), average="macro", labels=targets.unique())


def over_defined(score, without_negatives, columns):
    """The mean of a metric of scikit-learn over the columns for which it is defined."""
    fit = [(y, s) for y, s in columns if y.any() and (without_negatives or not y.all())]
    return np.mean([score(y, s) for y, s in fit])


def against_the_rest(outputs, targets):
    chances = outputs.double().softmax(1)
    return [((targets == i).numpy(), chances[:, i].numpy()) for i in range(CLASSES)]


CASES = {
    "auroc": (classes, lambda o, t: over_defined(sk.roc_auc_score, False, against_the_rest(o, t))),
    "average-precision": (classes, lambda o, t: over_defined(sk.average_precision_score, True, against_the_rest(o, t))),
    "accuracy": (classes, lambda o, t: sk.accuracy_score(t, o.argmax(1))),
    "f1": (classes, lambda o, t: sk.f1_score(t, o.argmax(1), average="macro")),
    "balanced-accuracy": (classes, sk_recall),
    "mse": (values, lambda o, t: sk.mean_squared_error(t.double(), o.double())),
    "mae": (values, lambda o, t: sk.mean_absolute_error(t.double(), o.double())),
    "r2": (values, lambda o, t: sk.r2_score(t.double(), o.double())),
    "multilabel-accuracy": (labels, lambda o, t: 1 - sk.hamming_loss(t, o > 0)),
    "multilabel-f1": (labels, lambda o, t: sk.f1_score(t, o > 0, average="micro")),
    "perplexity": (tokens, sk_perplexity),
}


def in_batches(metrics, outputs, targets, batch):
    accumulator = MetricAccumulator(metrics)
    for pair in zip(outputs.split(batch), targets.split(batch), strict=True):
        accumulator.update(*pair)
    return accumulator.compute()


@pytest.mark.parametrize("batch", [1, 7, N])
@pytest.mark.parametrize("name", CASES)
def test_metrics_equal_those_of_scikit_learn(name, batch):
    make, expected = CASES[name]
    for seed in range(3):
        outputs, targets = make(seed)
        found = in_batches(metrics_by_name([name]), outputs, targets, batch)
        assert found == {name: pytest.approx(float(expected(outputs, targets)), rel=1e-6)}


RANKED = {"auroc": sk.roc_auc_score, "average-precision": sk.average_precision_score}


@pytest.mark.parametrize("name", RANKED)
def test_ranking_metrics_equal_those_of_scikit_learn_on_digits_with_ties(name):
    """Scores of the nearest mean on real images, as they are and rounded, so that many are equal."""
    metric, expected = metrics_by_name([name])[name], RANKED[name]
    images, digits = map(torch.tensor, load_digits(return_X_y=True))
    means = torch.stack([images[:200][digits[:200] == i].mean(0) for i in range(10)])
    scores = ((images @ means.T - means.square().sum(1) / 2) / 400).float()
    for outputs in (scores, scores.mul(2).round()):
        chances, two = outputs.double().softmax(1), outputs[:, [3, 8]]
        ovr = [expected(digits == i, chances[:, i]) for i in range(10)]
        assert metric(outputs, digits) == pytest.approx(np.mean(ovr), rel=1e-12)
        assert metric(two, (digits == 8).long()) == pytest.approx(
            expected(digits == 8, two.double().softmax(1)[:, 1]), rel=1e-12
        )
        several = torch.stack((digits % 2 == 1, digits > 6, digits == 0), 1).float()
        assert metric(outputs[:, :3], several) == pytest.approx(expected(several, outputs[:, :3]), rel=1e-12)
        assert metric(outputs[:, 8], several[:, 1]) == metric(outputs[:, 8:9], several[:, 1])


@pytest.mark.parametrize("name", RANKED)
def test_labels_that_are_not_defined_are_left_out_and_not_counted_as_0(name):
    metric = metrics_by_name([name])[name]
    outputs, targets = labels()
    rare = targets.clone()
    rare[:, 0] = 0
    assert metric(outputs, rare) == pytest.approx(metric(outputs[:, 1:], targets[:, 1:]))
    assert math.isnan(metric(outputs, torch.zeros_like(targets)))
    none_negative = metric(outputs[:, 0], torch.ones(N))
    assert math.isnan(none_negative) if name == "auroc" else none_negative == 1


def test_every_built_in_metric_is_compared_with_scikit_learn():
    made = metrics_by_name(entries("metric"))
    assert {name for name, metric in made.items() if not isinstance(metric, ModelMetric)} == set(CASES)


def test_balanced_accuracy_is_that_of_scikit_learn_where_only_labeled_classes_are_predicted():
    outputs, targets = classes()
    outputs[:, 4] = -100.0
    expected = sk.balanced_accuracy_score(targets, outputs.argmax(1))
    assert metrics_by_name(["balanced-accuracy"])["balanced-accuracy"](outputs, targets) == pytest.approx(expected)


@pytest.mark.parametrize("batch", [1, 7, N])
def test_a_plain_function_is_called_once_on_the_whole_set(batch):
    calls = []

    def area(outputs, targets):
        calls.append(len(outputs))
        return sk.roc_auc_score(
            targets, outputs.softmax(1)[:, :4] / outputs.softmax(1)[:, :4].sum(1, True), multi_class="ovr"
        )

    outputs, targets = classes()
    assert in_batches({"area": area}, outputs, targets, batch)["area"] == pytest.approx(float(area(outputs, targets)))
    assert calls == [N, N]


def test_ignored_labels_do_not_change_metrics_of_classes():
    outputs, targets = classes()
    more = torch.cat((outputs, outputs)), torch.cat((targets, torch.full_like(targets, -100)))
    for metric in metrics_by_name(["accuracy", "f1", "balanced-accuracy", *RANKED]).values():
        assert metric(*more) == metric(outputs, targets)


def test_ignored_labels_do_not_change_metrics_of_many_labels():
    outputs, targets = labels()
    more = torch.cat((outputs, outputs)), torch.cat((targets, torch.full_like(targets, -100))).long()
    for metric in metrics_by_name(["multilabel-accuracy", "multilabel-f1", *RANKED]).values():
        assert metric(*more) == metric(outputs, targets)


def test_a_column_of_outputs_is_not_broadcast_against_targets():
    outputs, targets = torch.randn(5, 1), torch.randn(5)
    for metric in metrics_by_name(["mse", "mae", "r2"]).values():
        assert metric(outputs, targets) == metric(outputs[:, 0], targets) == metric(outputs[:, 0], targets[:, None])


def test_r2_of_large_targets_with_a_small_variance_is_exact():
    targets = torch.arange(100).double() / 100 + 1e8
    outputs = targets + 0.001
    expected = sk.r2_score(targets, outputs)
    assert metrics_by_name(["r2"])["r2"](outputs, targets) == pytest.approx(expected, rel=1e-9)


def test_non_finite_values_are_kept():
    metrics = {"nan": lambda outputs, targets: math.nan, "inf": lambda outputs, targets: math.inf}
    found = in_batches({**metrics, **metrics_by_name(["r2"])}, torch.zeros(3), torch.ones(3), 2)
    assert math.isnan(found["nan"])
    assert found["inf"] == math.inf
    assert found["r2"] == -math.inf


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), torch.tensor(1), torch.ones(1, 1), np.ones(1)])
def test_one_number_of_any_type_is_a_value(value):
    found = in_batches({"one": lambda outputs, targets: value}, *values(), 9)
    assert found == {"one": 1.0}
    assert type(found["one"]) is float


@pytest.mark.parametrize("value", [None, "1", [1.0], torch.ones(2), np.ones((2, 2)), 1j])
def test_a_metric_that_returns_no_number_is_an_error_in_one_line(value):
    with pytest.raises(ConfigError, match=r"^metric 'mine' must return one number, not \w+( of shape \[2.*\])?$"):
        in_batches({"mine": lambda outputs, targets: value}, *values(), 9)


def test_a_metric_that_raises_is_an_error_in_one_line():
    def mine(outputs, targets):
        raise ValueError("two\nlines")

    for metric in (mine, SumMetric(mine, float), SumMetric(lambda o, t: o.sum(), lambda sums: mine(sums, None))):
        with pytest.raises(ConfigError, match=r"^metric 'mine' failed: two lines$"):
            in_batches({"mine": metric}, *values(), 9)


@pytest.mark.parametrize(
    ("name", "make"), [("accuracy", values), ("f1", values), ("mse", classes), ("perplexity", labels)]
)
def test_a_metric_of_another_task_is_an_error_that_names_it(name, make):
    with pytest.raises(ConfigError, match=f"^metric '{name}' failed: "):
        in_batches(metrics_by_name([name]), *make(), 9)


def test_sums_must_be_tensors_of_one_shape():
    with pytest.raises(ConfigError, match="update of metric 'mine' must return a tensor of sums, not float"):
        in_batches({"mine": SumMetric(lambda o, t: 1.0, float)}, *values(), 9)
    with pytest.raises(ConfigError, match=r"sums of one shape for all batches, not \[9\] and then \[7\]"):
        in_batches({"mine": SumMetric(lambda o, t: o[:, 0], float)}, *(x[:16] for x in values()), 9)


def test_an_unknown_metric_is_an_error_that_names_the_nearest():
    with pytest.raises(UnknownName, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        metrics_by_name(["acuracy"])


def test_a_registered_function_of_outputs_and_targets_is_the_metric():
    @register("metric", "test-largest", doc="Largest output.")
    def largest(outputs, targets):
        return outputs.max()

    try:
        assert metrics_by_name(["test-largest"]) == {"test-largest": largest}
    finally:
        del _TABLE["metric"]["test-largest"]
