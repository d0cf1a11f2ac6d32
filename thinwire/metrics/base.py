"""The contract of a metric: a function of a model's outputs and the targets that returns one number.

There are three forms. All are exact for any batch size; none is a mean over batches.

    fn(outputs, targets) -> float     called once, on the whole evaluated set, concatenated on the CPU
    SumMetric(update, compute)        compute(sum over batches of update(outputs, targets)); keeps no outputs
    ModelMetric                       calls the model itself, for example to generate answers

A metric of scikit-learn takes the first form:

>>> from sklearn.metrics import f1_score
>>> def weighted_f1(outputs, targets):
...     return f1_score(targets, outputs.argmax(1), average="weighted")
>>> float(weighted_f1(torch.eye(3), torch.tensor([0, 1, 2])))
1.0
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import lookup
from thinwire.errors import ConfigError

Metric: TypeAlias = Callable[[Tensor, Tensor], float]
T = TypeVar("T")


@dataclass(frozen=True)
class SumMetric:
    """A metric computed from sums over examples.

        metric = compute(sum over batches of update(outputs, targets))

    Args:
        update: sums over a batch, a tensor of the same shape for every batch; added up in float64.
        compute: the metric from the sums of all batches, a float64 tensor on the CPU.
        higher_is_better: whether a higher value is a better one.

    >>> error_rate = SumMetric(
    ...     lambda outputs, targets: torch.stack(((outputs.argmax(1) != targets).sum(), torch.tensor(len(targets)))),
    ...     lambda sums: float(sums[0] / sums[1]),
    ... )
    >>> error_rate(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    0.25
    """

    update: Callable[[Tensor, Tensor], Tensor]
    compute: Callable[[Tensor], float]
    higher_is_better: bool = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """The metric of one batch, or of a whole set."""
        return self.compute(self.update(outputs, targets).double().cpu())


class ModelAccess(Protocol):
    """A model with its weights, as a `ModelMetric` uses it."""

    def outputs(self, inputs: Any) -> Tensor:
        """The outputs for a batch of inputs."""
        ...

    def run(self, function: Callable[[Any], T]) -> T:
        """The result of `function(module)`, called while the module has the weights that are evaluated."""
        ...

    def batches(self, examples: Any, index: Tensor) -> Iterable[Tensor]:
        """The indices of some examples, in batches that fit into memory, as indices on their device."""
        ...


class ModelMetric(ABC):
    """A metric that calls the model itself: it generates answers, or compares the likelihoods of several."""

    higher_is_better: bool = True

    @abstractmethod
    def measure(self, model: ModelAccess, examples: Any, index: Tensor) -> dict[str, float]:
        """The metric of some examples under "", and those of their groups under the names of these.

        Args:
            model: the model.
            examples: the evaluated dataset.
            index: the indices of the examples to evaluate, on the CPU.
        """

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Raise an error: outputs and targets are not enough."""
        raise ConfigError(f"{type(self).__name__} calls the model, so it cannot be computed of outputs and targets")


def ratio(sums: Tensor) -> float:
    """The first sum divided by the second: `compute` of metrics that are means.

    >>> ratio(torch.tensor([3.0, 4.0]))
    0.75
    """
    return float(sums[0] / sums[1])


def metrics_by_name(names: Iterable[str]) -> dict[str, Metric]:
    """The metrics of these names or references (`FILE.py:NAME`), by name.

    A registered class or function without required parameters is called and returns the metric. A registered function
    of `(outputs, targets)` is the metric itself.

    >>> metrics_by_name(["accuracy"])["accuracy"](torch.eye(2), torch.tensor([0, 0]))
    0.5
    """
    made = {entry.name: entry.make for entry in (lookup("metric", name) for name in names)}
    return {name: make if _needs_arguments(make) else make() for name, make in made.items()}


def _needs_arguments(make: Callable[..., Any]) -> bool:
    try:
        inspect.signature(make).bind()
    except TypeError:
        return True
    return False


class MetricAccumulator:
    """Computes metrics of both forms over a dataset that arrives in batches.

    Args:
        metrics: the metrics by name; those that call the model are left out.

    >>> accumulator = MetricAccumulator(metrics_by_name(["mse"]))
    >>> for outputs, targets in ((torch.zeros(2), torch.ones(2)), (torch.zeros(1), torch.zeros(1))):
    ...     accumulator.update(outputs, targets)
    >>> round(accumulator.compute()["mse"], 4)
    0.6667
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = {name: one for name, one in metrics.items() if not isinstance(one, ModelMetric)}
        self._sums: dict[str, Tensor] = {}
        self._batches: list[tuple[Tensor, Tensor]] = []  # filled only where a metric needs all outputs at once
        self._keep = any(not isinstance(metric, SumMetric) for metric in self.metrics.values())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        for name, metric in self.metrics.items():
            if isinstance(metric, SumMetric):
                found = _call(name, metric.update, outputs, targets)
                if not isinstance(found, Tensor):
                    raise ConfigError(
                        f"update of metric {name!r} must return a tensor of sums, not {type(found).__name__}"
                    )
                known = self._sums.get(name)
                if known is not None and known.shape != found.shape:
                    raise ConfigError(
                        f"update of metric {name!r} must return sums of one shape for all batches, not "
                        f"{list(known.shape)} and then {list(found.shape)}"
                    )
                self._sums[name] = found.double() if known is None else known + found.double()
        if self._keep:
            self._batches.append((outputs.cpu(), targets.cpu()))

    def compute(self) -> dict[str, float]:
        """The metrics of all batches; the values may be non-finite."""
        whole = [self._whole(parts) for parts in zip(*self._batches, strict=True)]
        out = {}
        for name, metric in self.metrics.items():
            sums = isinstance(metric, SumMetric)
            value = _call(name, metric.compute, self._sums[name].cpu()) if sums else _call(name, metric, *whole)  # type: ignore[attr-defined]
            if isinstance(value, Tensor | np.ndarray) and np.prod(value.shape) == 1:
                value = value.item()
            if not isinstance(value, Real):
                shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
                raise ConfigError(f"metric {name!r} must return one number, not {type(value).__name__}{shape}")
            out[name] = float(value)
        return out

    def _whole(self, parts: tuple[Tensor, ...]) -> Tensor:
        if len({part.shape[1:] for part in parts}) > 1:
            names = [name for name, metric in self.metrics.items() if not isinstance(metric, SumMetric)]
            raise ConfigError(f"metric {names[0]!r} needs outputs of one length, and rows differ; write a SumMetric")
        return torch.cat(parts)


def _call(name: str, function: Callable[..., Any], *args: Tensor) -> Any:
    """Call a function of a metric; an error in it becomes one line that names the metric."""
    try:
        return function(*args)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"metric {name!r} failed: {reason}") from error
