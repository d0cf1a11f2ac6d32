"""Checks of a task before its first round: bad data is named by client and row, and never reaches training.

    values     finite inputs and targets; class labels that the model has outputs for
    model      one forward pass of a few examples
    loss       one value for each example or their mean; finite and differentiable

>>> from thinwire.data.task import Task, pool_clients
>>> inputs, labels = torch.zeros(3, 2), torch.tensor([0, 1, 7])
>>> pool, clients = pool_clients([(inputs[:1], labels[:1]), (inputs[1:], labels[1:])])
>>> model = nn.Linear(2, 5)
>>> check_task(Task(model, pool, clients), model)
Traceback (most recent call last):
thinwire.errors.DataError: client 1, row 1: label 7, but the model has 5 outputs (labels 0 to 4); give the ...
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from thinwire.data.examples import Examples, Inputs, arguments, named
from thinwire.data.losses import Loss, bce, cross_entropy, is_cross_entropy_of_torch, label_counts, mse
from thinwire.data.partition import Assignment
from thinwire.errors import ConfigError, DataError, ThinwireError
from thinwire.metrics.classification import IGNORED, with_labels

if TYPE_CHECKING:
    from thinwire.data.task import Task

Forward = Callable[[Inputs], Tensor]

LARGE_RMS = 30.0  # root mean square of inputs, or of targets of a regression, that are not standardized
LARGE_OUTPUT_RMS = 3.0  # the same of the outputs of an initial model, where such inputs matter
TRIED = 5  # examples that model and loss are tried on
SAMPLE_ROWS = 4096  # rows that it is computed of
CHUNK_VALUES = 1 << 22  # values that are read together


def check_task(task: Task, outputs: Forward, *, batch: int = 0) -> None:
    """Raise a DataError or a ConfigError of one line if a task cannot be trained as it is.

    Args:
        task: the task.
        outputs: the outputs of the initial model for inputs on the CPU, in evaluation mode.
        batch: examples in a training step (`Local.batch`); 0 for all of a client.
    """
    sizes = task.clients.sizes()
    uneven = len(set(sizes.tolist())) > 1 or bool(batch and sizes[0] > batch and sizes[0] % batch)
    parts = [Part(task.train, task.clients)]
    if task.test is not None:
        every = Assignment(np.arange(len(task.test)), np.array([0, len(task.test)]))
        parts.append(Part(task.test, every, is_test=True))
    for part in parts:
        part.check_finite()
        inputs, targets = part.batch()
        out = _try_model(task.model, outputs, inputs, len(targets), part.name())
        _check_targets(part, task.loss, out, targets)
        _try_loss(task.loss, out, targets, part.name(), uneven)
        if not part.is_test:
            _warn_of_scale(task, out)
    _try_batch_norm(task)


def _attempt(call: Callable[[], Any], words: str, hint: str = "") -> Any:
    """The result of code of the user; an error in it becomes one line of these words, its message and a hint."""
    try:
        return call()
    except ThinwireError:
        raise
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        line = text if len(text) > 20 else f"{type(error).__name__}: {text}".rstrip(": ")  # the message says little
        raise ConfigError(f"{words}: {line}{hint}") from error


@torch.no_grad()
def _try_model(model: nn.Module, forward: Forward, inputs: Inputs, rows: int, name: str) -> Tensor:
    """The outputs for a batch; an error of the model becomes one line."""
    given = ", ".join(f"{key} of shape {list(one.shape)} ({one.dtype})" for key, one in named(inputs, "inputs").items())
    signature, (args, keywords) = inspect.signature(model.forward), arguments(model.forward, inputs)
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        known = signature.parameters
        needed = ", ".join(key for key, one in known.items() if one.default is one.empty)
        raise ConfigError(
            f"forward({', '.join(known)}) of the model cannot be called with {given} of {name}: {error}; write a "
            f"client as (({needed}), targets), or its inputs as a dictionary with these names"
        ) from error
    out = _attempt(lambda: forward(inputs), f"model and data do not fit: {given} of {name}")
    if not isinstance(out, Tensor) or not out.is_floating_point():
        kind = out.dtype if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f"the model returns {kind}; it must return a tensor of floats")
    if out.dim() < 1 or len(out) != rows:
        raise ConfigError(
            f"the model returns outputs of shape {list(out.shape)} for {rows} examples ({given}); the first axis must "
            "be the examples"
        )
    if not torch.isfinite(out).all():
        for weight, values in model.named_parameters():
            if not torch.isfinite(values).all():
                raise ConfigError(f"weight {weight!r} of the initial model is not finite; initialize it")
        raise ConfigError(f"the initial model returns values that are not finite for {name}; standardize the inputs")
    return out.detach()


def _check_targets(part: Part, loss: Loss, out: Tensor, targets: Tensor) -> None:
    """Check labels by what the loss takes; of a loss that is not known nothing is assumed."""
    torchs = is_cross_entropy_of_torch(loss)
    if loss is bce:
        part.check_binary()
    if (loss is cross_entropy or torchs) and is_integer(targets) and out.dim() > 1:
        options = loss.keywords if isinstance(loss, functools.partial) else {}
        ignored = options.get("ignore_index", getattr(loss, "ignore_index", IGNORED))
        scores, labels = with_labels(out, targets)
        if torchs:
            scores = out.movedim(1, -1)
        part.check_labels(scores.shape[-1], ignored)
        if part.is_test:
            return
        if out.dim() > 2 and out.shape[:-1] == out[:, 0].shape == labels.shape:
            _warn(
                f"outputs of shape {list(out.shape)} may have the classes of labels {list(labels.shape)} on axis 1 or "
                "on the last one; accuracy, metrics and loss='cross-entropy' read the last: let forward return "
                "outputs.movedim(1, -1) if they are on axis 1"
            )
        sums, takes_logs = scores.sum(-1), isinstance(loss, nn.NLLLoss)
        if not takes_logs and bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            _warn(
                "the model ends with softmax, and cross-entropy expects the scores before it: remove the softmax, with "
                "which training is slow"
            )


def _try_loss(loss: Loss, out: Tensor, targets: Tensor, name: str, uneven: bool) -> None:
    """Compute the loss of a batch: its shape, its value, its gradient."""
    fit = f"outputs of shape {list(out.shape)} and targets of shape {list(targets.shape)}"
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        words = f"the loss failed on {fit} ({targets.dtype}) of {name}"
        value = _attempt(lambda: loss(out.clone().requires_grad_(), targets), words)
    if any("broadcasting" in str(one.message) for one in caught):
        raise ConfigError(f"the loss broadcasts {fit} against each other; write loss='mse', or give both one shape")
    if not isinstance(value, Tensor):
        raise ConfigError(f"the loss must return a tensor, not {type(value).__name__}")
    if value.dim() and value.shape[0] != len(targets):
        raise ConfigError(
            f"the loss returns values of shape {list(value.shape)} for {len(targets)} examples; "
            f"return one value for each, [{len(targets)}], or their mean"
        )
    if not value.requires_grad:
        raise ConfigError("the loss has no gradient: argmax, comparisons, .item() and .detach() are not differentiable")
    value, counts = value.detach(), label_counts(targets)
    if not counts.sum():
        return
    each = (value.reshape(len(counts), -1)[counts > 0] if value.dim() else value).flatten()
    if not (finite := torch.isfinite(each)).all():
        raise ConfigError(
            f"the loss of the initial model is {float(each[~finite][0])} on finite {fit} of {name}; check the loss"
        )
    if value.dim() or not uneven:
        return
    # a mean: batches that are not full are trained by the losses of single examples
    hint = "return one value for each example, as reduction='none' does"
    words = "the loss cannot be computed for one example at a time"
    singles = _attempt(lambda: vmap(lambda o, t: loss(o[None], t[None]))(out, targets), words, f"; {hint}")
    mean, single = float(value), float((torch.where(counts > 0, singles, 0) * counts).sum() / counts.sum())
    if not np.isfinite(single):
        raise ConfigError(f"the loss of one example alone is {single}, and not all batches are full; {hint}")
    if not np.isclose(single, mean, rtol=1e-3, atol=1e-5):
        _warn(
            f"the loss of a batch ({mean:.4g}) is not the mean over its examples ({single:.4g}), by which batches that "
            f"are not full are trained; {hint}"
        )


def _warn_of_scale(task: Task, out: Tensor) -> None:
    """Warn about inputs, and targets of a regression, that are far from standardized."""
    size, inputs = _rms(out), getattr(task.train, "inputs", None)
    found = _rms(inputs) if isinstance(inputs, Tensor) and inputs.is_floating_point() else 0.0
    if found > LARGE_RMS and size > LARGE_OUTPUT_RMS:
        which, hint = f"inputs have a root mean square of {found:,.0f}", ""
    elif task.loss is mse and (found := _rms(task.train.targets)) > LARGE_RMS:
        which, hint = f"targets have a root mean square of {found:,.0f}", ", and scale predictions back"
    else:
        return
    _warn(f"{which}: training may be slow or diverge; subtract the mean and divide by the standard deviation{hint}")


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _rms(values: Tensor) -> float:
    step = max(1, len(values) // SAMPLE_ROWS)
    return float(values[::step].double().square().mean().sqrt())


@torch.no_grad()
def _try_batch_norm(task: Task) -> None:
    """Refuse a client with one example if batch norm cannot be trained on it."""
    single = np.flatnonzero(task.clients.sizes() == 1)
    norms = [name for name, part in task.model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if not len(single) or not norms:
        return
    client, own = int(single[0]), copy.deepcopy(task.model).cpu().train()
    inputs, _ = task.train.gather(torch.from_numpy(task.clients.client(client)))
    words = f"client {client} has one example, and batch norm ({norms[0]!r}) needs two"
    hint = "; leave such clients out, or use LayerNorm or GroupNorm"
    args, keywords = arguments(own.forward, inputs)
    with torch.random.fork_rng(devices=[]):
        _attempt(lambda: own(*args, **keywords), words, hint)


# -- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """The training examples of all clients, or the test examples as those of one client."""

    examples: Examples
    clients: Assignment
    is_test: bool = False

    def name(self, client: int = 0) -> str:
        """How messages call a client."""
        return "the test set" if self.is_test else f"client {client}"

    def batch(self) -> tuple[Inputs, Tensor]:
        """The first examples, and those with the lowest and the highest class label; repeated if there are fewer."""
        order, targets = self.clients.order, self.examples.targets
        chosen = order[np.arange(TRIED) % len(order)]
        if targets.dim() == 1 and is_integer(targets):
            own = targets[torch.from_numpy(order)]
            chosen = np.concatenate((chosen, order[[int(own.argmin()), int(own.argmax())]]))
        return self.examples.gather(torch.from_numpy(chosen))

    def refuse(self, values: Tensor, is_bad: Callable[[Tensor], Tensor], words: str) -> None:
        """Raise a DataError about the first bad value; all values are read once, in chunks.

        Args:
            values: inputs or targets.
            is_bad: whether each of some values is bad.
            words: what to say about it; {value} and {at} stand for the value and its position in its row.
        """
        step = max(1, CHUNK_VALUES // max(1, math.prod(values.shape[1:])))
        bad = torch.cat([is_bad(chunk).reshape(len(chunk), -1).any(1) for chunk in torch.split(values, step)])
        order, offsets = self.clients.order, self.clients.offsets
        if not len(at := np.flatnonzero(bad.cpu().numpy()[order])):
            return
        client = int(np.searchsorted(offsets, at[0], side="right")) - 1
        more = f" (and {len(at) - 1:,} more)" if len(at) > 1 else ""
        own = values[int(order[at[0]])]
        position = is_bad(own).nonzero()[0].tolist()
        place = f" at position {position}" if position else ""
        what = words.format(value=own[tuple(position)].item(), at=place)
        raise DataError(f"{self.name(client)}, row {at[0] - offsets[client]}{more}: {what}; rows count from 0")

    def check_finite(self) -> None:
        """Raise a DataError for an input or a target that is not finite; images stored as bytes are not read."""
        inputs = getattr(self.examples, "inputs", None)
        parts = named(inputs, "input") if isinstance(inputs, Tensor | tuple | dict) else {}
        for name, values in {**parts, "target": self.examples.targets}.items():
            if isinstance(values, Tensor) and values.is_floating_point():
                words = f"the {name} is {{value}}{{at}}; remove or replace values that are not finite"
                self.refuse(values, lambda one: ~torch.isfinite(one), words)

    def check_labels(self, classes: int, ignored: int = IGNORED) -> None:
        """Raise a DataError for a class label out of range, and for a client without any label."""
        labels = self.examples.targets
        words = f"label {{value}}, but the model has {classes} outputs (labels 0 to {classes - 1})"
        ignore = f"a label to ignore is {ignored}"
        self.refuse(labels, lambda y: (y != ignored) & (y < 0), f"{words}; {ignore}")
        fix = "write loss='bce' for labels of 0 and 1" if classes == 1 else f"count classes from 0, and {ignore}"
        words += f"; give the last layer an output for each class, or {fix}"
        self.refuse(labels, lambda y: (y != ignored) & (y >= classes), words)
        known = (labels != ignored).reshape(len(labels), -1).any(1).cpu().numpy()[self.clients.order]
        counts = np.add.reduceat(known.astype(np.int64), self.clients.offsets[:-1])
        if not counts.all():
            name = self.name(int(counts.argmin()))
            raise DataError(f"all labels of {name} are {ignored}, which is ignored; give it labels or leave it out")

    def check_binary(self) -> None:
        """Raise a DataError for a target of `bce` that is not from 0 to 1, or -100 among integers."""
        targets = self.examples.targets
        ignored = math.nan if targets.is_floating_point() else IGNORED
        if targets.dtype != torch.bool:
            self.refuse(
                targets,
                lambda y: (y != ignored) & ((y < 0) | (y > 1)),
                "target {value:g}, but loss 'bce' takes 0 or 1",
            )


def is_integer(values: Tensor) -> bool:
    """Whether a tensor holds integers; booleans are none."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
