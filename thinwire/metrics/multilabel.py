"""Metrics of multi-label classification: outputs (n, labels) are logits, targets (n, labels) are 0 or 1.

A label is predicted where its output is above 0, that is, its probability above 1/2. Targets of -100 are ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.metrics.base import SumMetric, ratio
from thinwire.metrics.labels import IGNORED, in_shape


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
    return torch.stack((((predicted == positive) & known).sum(), known.sum()))


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    predicted, positive, known = _binary(outputs, targets)
    predicted = predicted & known
    return torch.stack((2 * (predicted & positive).sum(), predicted.sum() + positive.sum()))


def _binary(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each label is predicted, whether it is 1, whether it counts."""
    values = targets.to(torch.float32)
    return in_shape(outputs, targets) > 0, values > 0.5, values != IGNORED
