"""Metrics of regression: outputs and targets of one shape, (n,) or (n, values)."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.metrics.base import SumMetric, ratio
from thinwire.metrics.labels import in_shape


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
    return torch.stack((values.sum(), torch.tensor(values.numel(), dtype=values.dtype, device=values.device)))
