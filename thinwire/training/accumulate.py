"""Gradient accumulation: the gradient of a batch from that of its parts, one part in memory at a time.

    g = sum_p (n_p / n) g_p        n_p: labels of part p that are not -100, n: those of the batch

This is the gradient of the mean over all labels of the batch, not the mean of the means of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.tree import Tree, tmap
from thinwire.errors import ConfigError
from thinwire.metrics.labels import label_counts

Gradients = tuple[Tree, Tree, tuple[Tensor, Tree]]  # by coordinates, by weights; loss and buffers


def accumulated(gradients: Callable[..., Gradients], parts: int) -> Callable[..., Gradients]:
    """A function like `gradients` that divides each batch into so many parts and adds up their gradients.

    Args:
        gradients: `gradients(model, expand, coords, (buffers, inputs, targets, mask), every)`.
        parts: number of parts; a batch with fewer examples has parts of one example.

    >>> def mean(model, expand, coords, batch, every):
    ...     return {"w": batch[2].float().mean()}, {}, (batch[2].float().mean(), {})
    >>> y = torch.tensor([1, 2, 6])
    >>> accumulated(mean, 2)(None, None, {}, ({}, y, y, None), False)[0]["w"].item()
    3.0
    """
    if parts == 1:
        return gradients

    def call(model: Any, expand: Any, coords: Tree, batch: tuple, every: bool) -> Gradients:
        buffers, inputs, targets, mask = batch
        counts = label_counts(targets) if mask is None else label_counts(targets) * mask
        total, length = counts.sum().clamp(min=1), -(-len(targets) // parts)
        sums: list[Tree] = []
        for first in range(0, len(targets), length):
            rows = slice(first, first + length)
            part = (buffers, _rows(inputs, rows), targets[rows], None if mask is None else mask[rows])
            by_coords, by_weights, (loss, buffers) = gradients(model, expand, coords, part, every)
            share = counts[rows].sum() / total
            # a part without labels has share 0, and a gradient that some losses make NaN
            found = [
                tmap(lambda g, s=share: torch.where(s > 0, g * s.to(g.dtype), 0), tree)
                for tree in (by_coords, by_weights, {"": loss})
            ]
            sums = [tmap(torch.add, old, new) for old, new in zip(sums, found, strict=True)] if sums else found
        return sums[0], sums[1], (sums[2][""], buffers)

    return call


def check_accumulates(module: nn.Module, logit_adjustment: float) -> None:
    """Raise ConfigError for a model or a loss whose gradient of a batch is not the sum of those of its parts.

    >>> check_accumulates(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 0.0)
    Traceback (most recent call last):
    thinwire.errors.ConfigError: local.accumulate is above 1, but layer '1' (BatchNorm1d) computes statistics of ...
    """
    for name, layer in module.named_modules():
        whole = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if whole or (isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats):
            raise ConfigError(
                f"local.accumulate is above 1, but layer {name!r} ({type(layer).__name__}) computes statistics of the "
                "whole batch; write accumulate = 1, or use a model without them, for example with group norm"
            )
    if logit_adjustment:
        raise ConfigError(
            "local.accumulate is above 1, but local.logit_adjustment counts the classes of the whole batch; write "
            "accumulate = 1, or logit_adjustment = 0"
        )


def _rows(inputs: Any, rows: slice) -> Any:
    """Some examples of a batch."""
    return {name: block[rows] for name, block in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
