"""Metrics of classification: outputs (n, ..., classes), integer class labels (n, ...), labels of -100 ignored."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.metrics.base import SumMetric, ratio
from thinwire.metrics.labels import predicted_classes


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
    predicted, labels = predicted_classes(outputs, targets)
    return torch.stack(((predicted == labels).sum(), torch.tensor(len(labels), device=labels.device)))


def _class_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    """The numbers of hits, predictions and labels of each class, (3, classes)."""
    predicted, labels = predicted_classes(outputs, targets)
    groups = (labels[predicted == labels], predicted, labels)
    return torch.stack([torch.bincount(group, minlength=outputs.shape[-1]) for group in groups])


def _macro_f1(sums: Tensor) -> float:
    hits, predictions, labels = sums
    seen = predictions + labels > 0
    return float((2 * hits[seen] / (predictions + labels)[seen]).mean())


def _mean_recall(sums: Tensor) -> float:
    hits, _, labels = sums
    seen = labels > 0
    return float((hits[seen] / labels[seen]).mean())
