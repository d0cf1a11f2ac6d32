"""Evaluation of a model on a dataset: loss, accuracy and metrics.

The dataset is evaluated in batches that fit into memory. Losses, correct labels and metrics are summed over labels or
examples and divided once, so results do not depend on the batch size but for rounding.

>>> from thinwire.data.examples import Arrays
>>> from thinwire.training.functional import Functional
>>> from thinwire.metrics import metrics_by_name
>>> model = Functional.of(torch.nn.Linear(4, 4, bias=False))
>>> test = Arrays(torch.eye(4), torch.tensor([0, 1, 2, 0]))
>>> result = evaluate(model, {"weight": torch.eye(4)}, {}, test, metrics=metrics_by_name(["f1"]))
>>> result.accuracy, round(result.metrics["f1"], 4), result.examples
(0.75, 0.6667, 4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from thinwire.core.parallel import PARALLEL_BYTES, cores, each
from thinwire.core.tree import Tree
from thinwire.data.examples import Examples, Inputs
from thinwire.data.losses import Loss, bce
from thinwire.errors import ConfigError
from thinwire.metrics.base import Metric, MetricAccumulator, ModelMetric
from thinwire.metrics.classification import IGNORED, correct_binary_labels, correct_labels, fitted
from thinwire.training.functional import Functional
from thinwire.training.inputs import UnsupportedModel
from thinwire.training.step import no_randomness

T = TypeVar("T")

PART = 100  # examples of a batch that one core evaluates
MAX_TENSOR_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31}  # of the largest tensor of an evaluation


class Evaluation(NamedTuple):
    """Results of a model on a dataset."""

    loss: float  # mean over all labels but -100
    accuracy: float | None  # share of correct labels; None where targets are not class labels, as in regression
    metrics: dict[str, float]
    examples: int  # number of evaluated examples


@torch.no_grad()
def evaluate(
    model: Functional,
    weights: Tree,
    buffers: Tree,
    examples: Examples,
    index: np.ndarray | None = None,
    metrics: Mapping[str, Metric] | None = None,
    *,
    batch: int = 0,
    batches: Sequence[Tensor] | None = None,
) -> Evaluation:
    """Evaluate a model on a dataset.

    Args:
        model: the model and its loss.
        weights: the weights.
        buffers: the buffers.
        examples: the dataset, on the device of the weights.
        index: the indices of the examples to evaluate; all by default.
        metrics: metrics by name; a plain function needs memory for all outputs, a `SumMetric` does not. A `ModelMetric`
            calls the model itself.
        batch: examples in a batch; 0 for 1,000 (more small ones on a GPU), or as many as fit into memory.
        batches: the result of `all_batches` for this model and these examples; by default they are made here.
    """
    indices = torch.arange(len(examples)) if index is None else torch.from_numpy(index)
    model.module.eval()
    access = _Access(model, weights, buffers, batch)
    # loss, labels that count; correct labels, labels that have an accuracy
    sums = torch.zeros(4, dtype=torch.float64, device=access.device)
    accumulator = MetricAccumulator(metrics or {})
    batches = batches or access.batches(examples, indices.to(access.device))
    for outputs, targets in access.all_outputs(examples, batches):
        sums += torch.stack((*model.loss_sum(outputs, targets), *correct_and_labels(model.criterion, outputs, targets)))
        accumulator.update(outputs, targets)
    loss, labels, correct, answers = sums.tolist()
    if not labels:
        raise ConfigError(f"all labels of the {len(indices):,} examples to evaluate are {IGNORED}, which are ignored")
    found = accumulator.compute()
    for name, metric in (metrics or {}).items():
        if isinstance(metric, ModelMetric):  # `NAME`, and `NAME/GROUP` of its groups
            values = metric.measure(access, examples, indices)
            found |= {f"{name}/{group}" if group else name: value for group, value in values.items()}
    return Evaluation(loss / labels, correct / answers if answers else None, found, len(indices))


@torch.no_grad()
def all_batches(model: Functional, weights: Tree, buffers: Tree, examples: Examples) -> tuple[Tensor, ...]:
    """The indices of all examples, in the batches of an evaluation."""
    model.module.eval()
    access = _Access(model, weights, buffers)
    return access.batches(examples, torch.arange(len(examples), device=access.device))


def correct_and_labels(criterion: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of correct labels and of labels; both 0 where targets are not labels."""
    if criterion is bce:
        return correct_binary_labels(outputs, targets).double().unbind()  # type: ignore[return-value]
    found = None if targets.is_floating_point() else fitted(outputs, targets)
    if found is None or found[0].shape[-1] == 1:
        return torch.zeros(2, dtype=torch.float64, device=outputs.device).unbind()  # type: ignore[return-value]
    return correct_labels(outputs, targets).double().unbind()  # type: ignore[return-value]


class _Access(NamedTuple):
    """A model with its weights, for metrics that call it."""

    model: Functional
    weights: Tree
    buffers: Tree
    batch: int = 0

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self.weights.values())).device

    def outputs(self, inputs: Inputs) -> Tensor:
        """The outputs for a batch, on the device of the weights."""
        own = tree_map(lambda block: block.to(self.device), inputs)
        return self.model.outputs(self.weights, dict(self.buffers), own)

    def run(self, function: Callable[[Any], T]) -> T:
        """The result of `function(module)` with these weights."""
        return self.model.run(self.weights, self.buffers, function)

    def all_outputs(self, examples: Examples, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs and targets of all batches, in order; without oneDNN each core of a CPU computes a part.

        Without oneDNN convolutions are NNPACK's, whose threads are as many as those of the first caller, for the whole
        process: one, if clients were trained on one core each.
        """
        size = PART * max(self.model.example_bytes.values(), default=0)
        if self.device.type != "cpu" or torch.backends.mkldnn.enabled or size < PARALLEL_BYTES:
            for chosen in batches:
                inputs, targets = examples.gather(chosen)
                yield self.outputs(inputs), targets
            return
        models = self._copies(examples, batches)
        for chosen in batches:
            parts = [examples.gather(part) for part in torch.split(chosen, PART)]
            for at in range(0, len(parts), len(models)):
                some = [(model, *part) for model, part in zip(models, parts[at:], strict=False)]
                yield from zip(each(self._part, some, size), (part[-1] for part in some), strict=True)

    def _copies(self, examples: Examples, batches: Sequence[Tensor]) -> list[Functional]:
        """A model for each part that is computed at a time, since `functional_call` replaces the weights of a module.

        One for a model that draws random numbers: the order in which several threads draw them is not defined.
        """
        try:
            with no_randomness(torch.device("cpu")):
                self.outputs(examples.gather(batches[0][:1])[0])
        except UnsupportedModel:
            return [self.model]
        parts = -(-max(map(len, batches)) // PART)
        return [self.model, *(self.model.sharing_weights() for _ in range(min(cores(), parts) - 1))]

    @torch.no_grad()  # of this thread
    def _part(self, part: tuple[Functional, Inputs, Tensor]) -> Tensor:
        return part[0].outputs(self.weights, dict(self.buffers), part[1])

    def batches(self, examples: Examples, index: Tensor) -> tuple[Tensor, ...]:
        """The indices in batches that fit into memory; longest examples first, where lengths differ."""
        if examples.sizes is not None:
            index = index[examples.sizes[index].argsort(descending=True, stable=True)]
        return torch.split(index, self.batch or self._batch_size(examples, index))

    def _batch_size(self, examples: Examples, index: Tensor) -> int:
        """The number of examples to evaluate at once, from the largest tensor that one example needs.

        The bytes of that tensor are cached in `model.example_bytes`, by the shapes of an example.
        """
        if not len(index):
            return 1
        some = examples.widest(index)
        inputs, targets = examples.gather(some)
        key = (*(block.shape for block in tree_leaves((inputs, targets))), self.device)
        if key not in self.model.example_bytes:
            seen = []
            for times in (1, 2):  # a tensor of the same size for two examples as for one is made of weights
                inputs, targets = examples.gather(some.repeat(times))
                with _TensorBytes() as tensors:
                    self.model.criterion(self.outputs(inputs), targets.to(self.device))
                seen.append(tensors.found)
            most = max((b - a for a, b in zip(*seen, strict=False)), default=0)
            self.model.example_bytes[key] = -(-most // len(some))
        return _at_once(examples.gather(some[:1])[0], self.model.example_bytes[key], self.device)


def _at_once(inputs: Inputs, largest: int, device: torch.device) -> int:
    """The number of examples to evaluate at once, where each adds `largest` bytes to the largest tensor.

    1,000; more small ones on a GPU, which is idle until the host launches the next batch; fewer where the largest
    tensor, such as the outputs of a language model, would take more than `MAX_TENSOR_BYTES`.

    >>> tokens = torch.zeros(1, 256, dtype=torch.int64)
    >>> [_at_once(tokens, 256 * classes * 4, torch.device("cpu")) for classes in (100, 50_257)]
    [1000, 5]
    """
    most = 1000
    if device.type != "cpu" and isinstance(inputs, Tensor):
        small = max(10_000, min(40_000, (1 << 28) // max(1, largest)))
        most = max(1000, min(small, (1 << 23) // max(1, inputs.numel())))
    return max(1, min(most, MAX_TENSOR_BYTES["cpu" if device.type == "cpu" else "gpu"] // max(1, largest)))


class _TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size in bytes of every tensor that an operation inside the context returns, in order."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to import torch's compiler, which takes seconds, to exclude this mode from it."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the sizes of its results."""
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                self.found.append(made.numel() * made.element_size())
        return out
