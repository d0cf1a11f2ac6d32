"""Loss functions by name: cross entropy, squared error, binary cross entropy.

A loss is a function of (outputs, targets) that returns one value for each example, one for each label, or their mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.errors import ConfigError, UnknownName
from thinwire.metrics.classification import IGNORED, in_shape, with_labels

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each example, for class labels; outputs may have several axes, as in `with_labels`.

        sum of -log softmax(output)[label] over the labels that are not -100 / number of these;   0 if there is none

    >>> round(float(cross_entropy(torch.zeros(1, 10), torch.tensor([3]))), 4)
    2.3026
    >>> outputs = torch.tensor([[[0.0, 0.0], [9.0, 0.0]]])
    >>> [round(float(cross_entropy(outputs, torch.tensor([labels]))), 4) for labels in ([0, -100], [-100, -100])]
    [0.6931, 0.0]
    """
    outputs, targets = with_labels(outputs, targets)
    each = F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="none")
    if targets.dim() == 1:
        return each
    return each.view(targets.shape).flatten(1).sum(1) / label_counts(targets).clamp(min=1)


def label_counts(targets: Tensor) -> Tensor:
    """The number of labels of each example that are not -100, (n,) in float32; 1 where targets are not class labels.

    >>> label_counts(torch.tensor([[1, -100], [0, 2]]))
    tensor([1., 2.])
    """
    if targets.is_floating_point() or not targets.dtype.is_signed:
        return torch.ones(len(targets), device=targets.device)
    known = targets != IGNORED
    return (known.flatten(1).sum(1) if targets.dim() > 1 else known).to(torch.float32)


def adjust_logits(outputs: Tensor, targets: Tensor, weights: Tensor, strength: float, pseudo_count: float) -> Tensor:
    """Outputs shifted by the logarithm of how often each class occurs in the batch, for training with few classes.

        output_c + strength * log((n_c + pseudo_count) / (n + classes * pseudo_count))

    n_c of the n labels of the batch are of class c; labels of -100 do not count. Cross entropy of the shifted outputs
    hardly lowers the outputs of classes that the batch does not have (logit adjustment, balanced softmax).

    Args:
        outputs: as in `with_labels`; the result has the classes on the last axis.
        targets: class labels.
        weights: (n,) the weight of each example in the counts; 0 for one that does not count in the loss.
        strength: factor of the shift.
        pseudo_count: is added to each count; the smaller, the lower is the shift of a class that does not occur.

    >>> shifted = adjust_logits(torch.zeros(2, 3), torch.tensor([0, 0]), torch.ones(2), 1.0, 0.5)
    >>> [round(value, 4) for value in shifted[0].exp().tolist()]
    [0.7143, 0.1429, 0.1429]
    """
    outputs, labels = with_labels(outputs, targets)
    each = weights.reshape(-1, *(1,) * (labels.dim() - 1)).expand(labels.shape).reshape(-1, 1)
    classes = torch.arange(outputs.shape[-1], device=labels.device)
    counts = ((labels.reshape(-1, 1) == classes) * each).sum(0) + pseudo_count  # -100 is no class
    return outputs + strength * (counts / counts.sum()).log()


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of each example, for regression: outputs and float targets (n,), (n, 1) or (n, values).

        sum of (output - target)^2 over the values of an example / number of these

    >>> mse(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    tensor([0., 4.])
    """
    if not targets.is_floating_point():
        raise ConfigError(f"loss 'mse' was given targets of type {targets.dtype}; give floats: targets.float()")
    outputs = in_shape(outputs, targets)
    # no less exact than float32: under autocast the outputs may be bfloat16
    exact = targets.to(torch.promote_types(outputs.dtype, torch.float32))
    return (outputs - exact).square().reshape(len(targets), -1).mean(1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy of each example, for multi-label classification: logits and labels of 0 or 1, (n, labels).

        sum of -log sigmoid(output if label = 1 else -output) / number of labels;   integer labels of -100 are ignored

    >>> each = bce(torch.tensor([[0.0, 0.0], [9.0, -9.0]]), torch.tensor([[1, 0], [1, 0]]))
    >>> [round(value, 4) for value in each.tolist()]
    [0.6931, 0.0001]
    """
    outputs = in_shape(outputs, targets)
    each = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    each = each.reshape(len(targets), -1)
    if targets.is_floating_point():
        return each.mean(1)
    known = (targets != IGNORED).reshape(len(targets), -1)
    return torch.where(known, each, 0).sum(1) / known.sum(1).clamp(min=1)


def is_regression(loss: Loss) -> bool:
    """Whether a loss is one of regression: ours, or torch's squared, absolute or Huber error.

    >>> is_regression(mse), is_regression(torch.nn.HuberLoss()), is_regression(cross_entropy)
    (True, True, False)
    """
    modules = nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss
    functions = (mse, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
    return function_of(loss) in functions or isinstance(loss, modules)


def is_classification(loss: Loss) -> bool:
    """Whether a loss takes class labels, or labels of 0 and 1: ours, or torch's cross entropy.

    >>> is_classification(bce), is_classification(torch.nn.CrossEntropyLoss()), is_classification(mse)
    (True, True, False)
    """
    return function_of(loss) in (cross_entropy, bce) or is_cross_entropy_of_torch(loss)


def is_cross_entropy_of_torch(loss: Loss) -> bool:
    """Whether a loss is torch's cross entropy, which has the classes on the second axis."""
    return function_of(loss) is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def function_of(loss: Loss) -> Loss:
    """The function of a `functools.partial`; another loss itself."""
    return loss.func if isinstance(loss, functools.partial) else loss


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "mse": mse, "bce": bce}


def loss_by_name(name: str) -> Loss:
    """The loss of that name.

    >>> loss_by_name("mse") is mse
    True
    """
    if name not in LOSSES:
        raise UnknownName("loss", name, LOSSES)
    return LOSSES[name]
