"""Metrics of classification: outputs and integer class labels (n, ...), labels of -100 ignored.

`with_labels` alone decides which axis of outputs has the classes: for losses, metrics and checks alike.

    outputs (n, classes)                 labels (n,)
    outputs (n, length, classes)         labels (n, length)               classes last, wherever shapes allow it
    outputs (n, classes, height, width)  labels (n, height, width)        else on axis 1, as in torch's cross entropy

Metrics of multi-label classification: outputs (n, labels) are logits, targets (n, labels) are 0 or 1.

A label is predicted where its output is above 0, that is, its probability above 1/2. Targets of -100 are ignored.

Metrics of regression: outputs and targets of one shape, (n,) or (n, values).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.metrics.base import SumMetric, ratio


@register("metric", "accuracy")
def accuracy() -> SumMetric:
    """Accuracy, the share of labels that have the largest output.

        correct labels / labels

    >>> accuracy()(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    0.75
    """
    return SumMetric(correct_labels, ratio)


@register("metric", "f1")
def f1() -> SumMetric:
    """Macro F1, the unweighted mean of the F1 scores of the classes.

        F1 of class c = 2 hits(c) / (predictions of c + labels of c);   mean over classes that are predicted or labeled

    >>> round(f1()(torch.eye(3), torch.tensor([0, 1, 1])), 4)
    0.5556
    """
    return SumMetric(_class_sums, _macro_f1)


@register("metric", "balanced-accuracy")
def balanced_accuracy() -> SumMetric:
    """Balanced accuracy, the unweighted mean of the recalls of the classes.

        recall of class c = hits(c) / labels of c;   mean over classes that are labeled

    >>> balanced_accuracy()(torch.eye(3), torch.tensor([0, 1, 1]))
    0.75
    """
    return SumMetric(_class_sums, _mean_recall)


def correct_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """The numbers of correct labels and of labels, (2,)."""
    scores, labels = with_labels(outputs, targets)
    return torch.stack(((scores.argmax(-1) == labels).sum(), (labels != IGNORED).sum()))


def _class_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    """The numbers of hits, predictions and labels of each class, (3, classes)."""
    predicted, labels = predicted_classes(outputs, targets)
    groups = (labels[predicted == labels], predicted, labels)
    classes = with_labels(outputs, targets)[0].shape[-1]
    return torch.stack([torch.bincount(group, minlength=classes) for group in groups])


def _macro_f1(sums: Tensor) -> float:
    hits, predictions, labels = sums
    seen = predictions + labels > 0
    return float((2 * hits[seen] / (predictions + labels)[seen]).mean())


def _mean_recall(sums: Tensor) -> float:
    hits, _, labels = sums
    seen = labels > 0
    return float((hits[seen] / labels[seen]).mean())


IGNORED = -100  # the label of a position that is not predicted, as in torch


def fitted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Outputs with the classes on the last axis, and their labels; None where the shapes are of no classification.

    Labels may have an axis of one where torch has the classes: (n, 1), or (n, 1, height, width) of masks.

    >>> [one.shape for one in fitted(torch.zeros(2, 9, 5, 4), torch.zeros(2, 1, 5, 4))]
    [torch.Size([2, 5, 4, 9]), torch.Size([2, 5, 4])]
    """
    if outputs.dim() == targets.dim() and targets.shape[1:2] == (1,):
        targets = targets[:, 0]
    if outputs.dim() > 1:
        for scores in (outputs, outputs.movedim(1, -1)):
            if scores.shape[:-1] == targets.shape:
                return scores, targets
    return None


def with_labels(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As `fitted`, with labels as int64; targets that are no class labels for these outputs are an error.

    >>> with_labels(torch.zeros(2, 10), torch.tensor([[3], [4]]))[1]
    tensor([3, 4])
    """
    found = fitted(outputs, targets)
    if found is None or targets.is_floating_point():
        shape = list(outputs.shape)
        wanted = f"{shape[:-1]} or {shape[:1] + shape[2:]}" if len(shape) > 2 else shape[:1]
        how = "targets.argmax(1) if one-hot" if targets.shape == outputs.shape else "targets.long()"
        raise ConfigError(
            f"targets of shape {list(targets.shape)} ({targets.dtype}) are no class labels for outputs of shape "
            f"{shape}: give integers of shape {wanted}, {how}, or write loss='bce' for labels of 0 and 1, loss='mse' "
            "for numbers"
        )
    return found[0], found[1].long()


def predicted_classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The classes of the largest outputs and the class labels, both flat, without labels of -100.

    >>> predicted_classes(torch.eye(3), torch.tensor([0, 2, -100]))
    (tensor([0, 1]), tensor([0, 2]))
    """
    scores, labels = with_labels(outputs, targets)
    known = labels != IGNORED
    return scores.argmax(-1)[known], labels[known]


def in_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs in the shape of the targets, which may differ by a last axis of one value; else an error.

    Arithmetic on shapes (n, 1) and (n,) would broadcast to (n, n).

    >>> in_shape(torch.zeros(3, 1), torch.zeros(3)).shape
    torch.Size([3])
    """
    if outputs.shape == targets.shape:
        return outputs
    if outputs.shape == (*targets.shape, 1):
        return outputs[..., 0]
    if (*outputs.shape, 1) == targets.shape:
        return outputs[..., None]
    given = list(targets.shape)
    raise ConfigError(
        f"targets of shape {given} do not fit outputs of shape {list(outputs.shape)}; give one target for each output"
    )


@register("metric", "multilabel-accuracy")
def multilabel_accuracy() -> SumMetric:
    """Share of correct labels (1 - Hamming loss).

        labels with (output > 0) == target / labels

    >>> multilabel_accuracy()(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
    0.75
    """
    return SumMetric(correct_binary_labels, ratio)


@register("metric", "multilabel-f1")
def multilabel_f1() -> SumMetric:
    """Micro F1 over all labels.

        2 hits / (predicted labels + labels of 1)

    >>> multilabel_f1()(torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
    0.8
    """
    return SumMetric(_hits, ratio)


def correct_binary_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """The numbers of correct labels and of labels, (2,)."""
    predicted, positive, known = _binary(outputs, targets)
    return _sums((predicted == positive)[known])


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    predicted, positive, known = _binary(outputs, targets)
    predicted = predicted & known
    return torch.stack((2 * (predicted & positive).sum(), predicted.sum() + positive.sum()))


def _binary(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each label is predicted, whether it is 1, whether it counts."""
    values = targets.to(torch.float32)
    return in_shape(outputs, targets) > 0, values > 0.5, values != IGNORED


@register("metric", "auroc")
def auroc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve, the unweighted mean over labels, or over classes against the rest.

        pairs of a positive and a negative in which the positive has the higher score / pairs;   ties count half

    Scores are the outputs where targets are 0 or 1, else the probabilities of classes; of two classes only the second
    counts. Labels without positives or without negatives are left out of the mean; it is NaN if none is left.

    >>> auroc(torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0, 1, 1]))
    0.625
    """
    return _mean_over_labels(
        lambda hits, misses: (misses * (hits.cumsum(0) - hits / 2)).sum() / hits.sum() / misses.sum(), outputs, targets
    )


@register("metric", "average-precision")
def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Average precision, the unweighted mean over labels, or over classes against the rest.

        sum over scores of the share of positives with this score * precision at it: positives / all, as high or higher

    Scores are those of `auroc`. Labels without positives are left out of the mean; it is NaN if none is left.

    >>> round(average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0])), 4)
    0.8333
    """
    return _mean_over_labels(
        lambda hits, misses: (hits * hits.cumsum(0) / (hits + misses).cumsum(0)).sum() / hits.sum(), outputs, targets
    )


def _mean_over_labels(area: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> float:
    """The mean of the areas that are defined.

    Args:
        area: the area from the numbers of positives and of negatives with each score, the highest score first.
        outputs: of the model.
        targets: class labels, or labels of 0 and 1.
    """
    if outputs.numel() != targets.numel():  # class labels
        scores, labels = with_labels(outputs, targets)
        known = labels != IGNORED
        outputs, labels = scores[known].double().softmax(-1), labels[known]
        first = int(outputs.shape[1] == 2)
        outputs, targets = outputs[:, first:], F.one_hot(labels, outputs.shape[1])[:, first:]
    _, positive, known = _binary(outputs, targets)
    found = []
    for scores, hit, kept in zip(*(one.reshape(len(one), -1).T for one in (outputs, positive, known)), strict=True):
        place = scores[kept].unique(return_inverse=True)[1]
        found.append(area(*(torch.bincount(place, one[kept].double()).flip(0) for one in (hit, ~hit))))
    return float(torch.stack(found).nanmean())


@register("metric", "mse")
def mse() -> SumMetric:
    """Mean squared error over all values.

        sum of (output - target)^2 / values

    >>> mse()(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    2.0
    """
    return SumMetric(lambda outputs, targets: _sums(_errors(outputs, targets).square()), ratio, False)


@register("metric", "mae")
def mae() -> SumMetric:
    """Mean absolute error over all values.

        sum of |output - target| / values

    >>> mae()(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    1.0
    """
    return SumMetric(lambda outputs, targets: _sums(_errors(outputs, targets).abs()), ratio, False)


@register("metric", "r2")
def r2(outputs: Tensor, targets: Tensor) -> float:
    """Coefficient of determination, the unweighted mean over the values of an example.

        1 - sum of (output - target)^2 / sum of (target - mean target)^2;   non-finite where all targets are equal

    Computed from the whole set: sums of squares of large targets with a small variance would lose all digits.

    >>> r2(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    values = targets.double().reshape(len(targets), -1)
    errors = _errors(outputs, targets).reshape(len(targets), -1)
    return float((1 - errors.square().sum(0) / (values - values.mean(0)).square().sum(0)).mean())


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return in_shape(outputs, targets).double() - targets.double()


def _sums(values: Tensor) -> Tensor:
    """The sum and the number of values, (2,)."""
    return torch.stack((values.sum(), torch.ones_like(values).sum()))
