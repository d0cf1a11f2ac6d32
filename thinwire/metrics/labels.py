"""Targets that fit outputs: class labels, labels that are ignored, values of one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import ConfigError

IGNORED = -100  # the label of a position that is not predicted, as in torch


def labels_for(outputs: Tensor, targets: Tensor) -> Tensor:
    """The class labels for outputs (..., classes): (n, 1) becomes (n,); another shape is an error.

    >>> labels_for(torch.zeros(2, 10), torch.tensor([[3], [4]]))
    tensor([3, 4])
    """
    if outputs.dim() == 2 and targets.shape == (len(outputs), 1):
        return targets[:, 0]
    if outputs.dim() < 2 or outputs.shape[:-1] != targets.shape:
        wanted, given = list(outputs.shape[:-1]), list(targets.shape)
        raise ConfigError(
            f"labels of shape {given} do not fit outputs of shape {list(outputs.shape)}; give class labels of {wanted}"
        )
    return targets


def label_counts(targets: Tensor) -> Tensor:
    """The number of labels of each example that are not -100, (n,) in float32; 1 where targets are not class labels.

    >>> label_counts(torch.tensor([[1, -100], [0, 2]]))
    tensor([1., 2.])
    """
    if targets.is_floating_point() or not targets.dtype.is_signed:
        return torch.ones(len(targets), device=targets.device)
    known = targets != IGNORED
    return (known.flatten(1).sum(1) if targets.dim() > 1 else known).to(torch.float32)


def predicted_classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The classes of the largest outputs and the class labels, both flat, without labels of -100.

    >>> predicted_classes(torch.eye(3), torch.tensor([0, 2, -100]))
    (tensor([0, 1]), tensor([0, 2]))
    """
    if targets.is_floating_point():
        raise ConfigError(f"targets of type {targets.dtype} are not class labels; give integers")
    labels = labels_for(outputs, targets).long()
    known = labels != IGNORED
    return outputs.argmax(-1)[known], labels[known]


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
