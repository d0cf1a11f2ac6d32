"""Any nn.Module as a pure function of its weights.

The module is copied once and never changed: weights and buffers are passed in, as in `functional_call`. One copy is
enough for thousands of clients, with or without vmap. Parameters with requires_grad=False are constants. A tied weight
is one weight.

Gradient checkpointing runs layers a second time during the backward pass. `Functional.gradient` therefore keeps the
weights in the module until that pass is done. torch.func cannot do this and raises an error for such models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map

from thinwire.core.key import Device
from thinwire.core.tree import Tree
from thinwire.data.examples import Inputs, arguments
from thinwire.data.losses import Loss, adjust_logits, cross_entropy, label_counts
from thinwire.errors import ConfigError
from thinwire.kernels.conv import Products, by_products
from thinwire.kernels.low_rank import corrected
from thinwire.metrics.classification import IGNORED
from thinwire.spaces.lora import split

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Functional:
    """A module and its loss as pure functions.

    Args:
        module: a private copy of the user's module, on the device where it computes.
        criterion: the loss, `criterion(outputs, targets)`: one value for each example (or label), or their mean.
            Examples are weighted by the number of their labels that are not -100.
        products: how training computes convolutions as matrix products, see `convolve`; None for torch's convolutions.
        half: whether training computes in bfloat16; weights and their updates keep their type.
        logit_adjustment, pseudo_count: of the outputs in training, see `Local`.
        adapter_dropout: the probability with which an input of an adapter is left out in training.
        example_bytes: by the shapes of an example, the bytes that it adds to the largest tensor of an evaluation.

    >>> model = Functional.of(nn.Linear(2, 3))
    >>> list(model.weights()), model.buffers()
    (['weight', 'bias'], {})
    """

    explicit: ClassVar[bool] = False
    module: nn.Module
    criterion: Loss
    products: Products | None = None
    half: bool = False
    logit_adjustment: float = 0.0
    pseudo_count: float = 0.5
    adapter_dropout: float = 0.0
    example_bytes: dict[tuple, int] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, criterion: Loss = cross_entropy, device: Device = None) -> Functional:
        """Copy the module; the original is never changed."""
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"model must be an nn.Module, not {type(module).__name__}")
        try:
            own = copy.deepcopy(module).to(device or "cpu")
        except Exception as error:
            raise ConfigError(f"the model cannot be copied ({error}); modules must support copy.deepcopy") from error
        for layer in own.modules():
            if isinstance(layer, nn.RNNBase):  # weights are given in each call; this would move them, and fails in vmap
                layer.flatten_parameters = _nothing  # type: ignore[method-assign]
        for name, parameter in own.named_parameters():
            if not parameter.is_floating_point():
                raise ConfigError(f"parameter {name!r} is of type {parameter.dtype}; only floats can be trained")
        return cls(own.train(), criterion)

    def sharing_weights(self) -> Functional:
        """A copy for another thread, with the same parameters in memory."""
        known = {id(parameter): parameter for parameter in self.module.parameters()}
        return replace(self, module=copy.deepcopy(self.module, known))

    def weights(self) -> Tree:
        """The trainable weights, in order of registration; they share the memory of the module, which never changes."""
        named = self.module.named_parameters()  # a tied weight appears once, under its first name
        return {name: p.detach() for name, p in named if p.requires_grad}

    def buffers(self) -> Tree:
        """The floating-point buffers that are part of the model's saved state (running statistics, mostly)."""
        saved = self.module.state_dict(keep_vars=True).keys()
        named = self.module.named_buffers()
        return {name: b.detach().clone() for name, b in named if b.is_floating_point() and name in saved}

    def parameters(self) -> int:
        """The number of parameters, trainable or not."""
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def _names(self) -> frozenset[str]:
        """The names of the parameters; weights of other names are adapters."""
        return frozenset(name for name, _ in self.module.named_parameters())

    @cached_property
    def _counters(self) -> Tree:
        """The integer buffers: training counts in copies of them, so that it does not change the module."""
        return {name: b for name, b in self.module.named_buffers() if not b.is_floating_point()}

    def outputs(self, weights: Tree, buffers: Tree, inputs: Inputs) -> Tensor:
        """The module's output for these weights; writes its new running statistics into `buffers`."""
        with self._holding(weights, buffers):
            return self._call(inputs)

    def _call(self, inputs: Inputs) -> Tensor:
        """The output of the module as it is."""
        args, named = arguments(self.module.forward, inputs)
        out = self.module(*args, **named)
        if isinstance(out, dict):
            out = out.get("logits", out)
        out = getattr(out, "logits", out)  # Hugging Face models return a record
        if isinstance(out, tuple | list) and out:
            out = out[0]
        if not isinstance(out, Tensor):
            raise ConfigError(
                "the model must return a tensor, a dictionary or record with `logits`, or a tuple whose first element "
                f"is the output, not {type(out).__name__}"
            )
        return out

    @torch.no_grad()
    def run(self, weights: Tree, buffers: Tree, function: Callable[[Any], T]) -> T:
        """The result of `function(module)` while the module has these weights, in evaluation mode.

        >>> model = Functional.of(nn.Linear(2, 3))
        >>> model.run({"weight": torch.ones(3, 2)}, {}, lambda module: float(module.weight.sum()))
        6.0
        """
        self.module.eval()
        with self._holding(weights, buffers):
            return function(self.module)

    @contextmanager
    def _holding(self, weights: Tree, buffers: Tree) -> Iterator[None]:
        """A context in which the module has these weights and buffers, as in `torch.func.functional_call`."""
        adapters: dict[str, Any] = {}
        if not weights.keys() <= self._names:
            weights, adapters = split(weights)
        tensors = {**{name: b.clone() for name, b in self._counters.items()}, **buffers, **weights}
        adapted = corrected(weights, adapters, self.adapter_dropout) if adapters else nullcontext()
        with adapted, _reparametrize_module(self.module, tensors, tie_weights=True):
            yield

    @torch.no_grad()
    def predictions(self, inputs: Inputs) -> Tensor:
        """The outputs of the module as it was given, in evaluation mode.

        >>> Functional.of(nn.Linear(2, 3)).predictions(torch.ones(4, 2)).shape
        torch.Size([4, 3])
        """
        self.module.eval()
        return self.outputs(self.weights(), self.buffers(), inputs)

    def loss(
        self, weights: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the examples whose mask is 1 (all without a mask), and the next buffers."""
        buffers = {name: b.clone() for name, b in buffers.items()}
        with self._training(targets.device):
            outputs = self.outputs(weights, buffers, inputs)
            return self._mean(outputs, targets, mask), buffers

    def losses(self, weights: Tree, inputs: Inputs, targets: Tensor, mask: Tensor | None) -> Tensor:
        """(clients,) the loss of each client; inputs, targets, mask and the adapters among the weights have that axis.

        All examples are one batch of the module, whose rows must not influence each other.
        """
        with self._training(targets.device):
            outputs = self.outputs(weights, {}, tree_map(lambda block: block.flatten(0, 1), inputs))
            outputs = outputs.view(len(targets), -1, *outputs.shape[1:])
            return vmap(self._mean, in_dims=(0, 0, None if mask is None else 0))(outputs, targets, mask)

    def gradient(
        self, weights: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """The gradient of `loss` with respect to weights that require one; the loss and the next buffers. Not for vmap.

        >>> model = Functional.of(nn.Linear(2, 3))
        >>> weights = {name: w.requires_grad_() for name, w in model.weights().items()}
        >>> grads, (loss, _) = model.gradient(weights, {}, torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), None)
        >>> {name: tuple(block.shape) for name, block in grads.items()}
        {'weight': (3, 2), 'bias': (3,)}
        """
        leaves = {name: w.detach().requires_grad_(w.requires_grad) for name, w in weights.items()}
        buffers = {name: b.clone() for name, b in buffers.items()}
        with self._holding(leaves, buffers):
            with torch.enable_grad(), self._training(targets.device):
                value = self._mean(self._call(inputs), targets, mask)
            after = {name: b.detach().clone() for name, b in buffers.items()}  # layers that run again update them again
            if value.requires_grad:
                _backward(value)
        required = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        grads = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in required.items()}
        return grads, (value.detach(), after)

    def _mean(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """The mean loss over the examples whose mask is 1, weighted by their numbers of labels."""
        weights = label_counts(targets)
        if self.logit_adjustment:
            counted = torch.ones_like(weights) if mask is None else mask.to(weights.dtype)
            outputs = adjust_logits(outputs, targets, counted, self.logit_adjustment, self.pseudo_count)
        value = self.criterion(outputs, targets)
        if mask is None and value.dim() == 0:
            return torch.where(weights.sum() > 0, value, 0)  # torch's mean over no labels is NaN
        each = value if value.dim() == 1 else self._each(value, outputs, targets)
        weights = weights if mask is None else weights * mask
        return (torch.where(weights > 0, each, 0) * weights).sum() / weights.sum().clamp(min=1)

    def _each(self, value: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, (n,), from the value of the criterion."""
        if value.dim() == 0:  # the criterion averages: call it for one example at a time
            value = vmap(lambda o, t: self.criterion(o[None], t[None]))(outputs, targets)
        if value.dim() == 1:
            return value
        if value.shape != targets.shape or targets.is_floating_point():
            return value.flatten(1).mean(1)
        value = torch.where(targets == IGNORED, 0, value)
        return value.flatten(1).sum(1) / label_counts(targets).clamp(min=1)

    @contextmanager
    def _training(self, device: torch.device) -> Iterator[None]:
        """Training mode, with its precision and convolutions."""
        if not self.module.training:  # submodules are in the same mode: the copy is private
            self.module.train()
        half = torch.autocast(device.type, torch.bfloat16, cache_enabled=False) if self.half else nullcontext()
        with half, by_products() if self.products else nullcontext():
            yield

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all labels but -100, and the number of these labels, in float64."""
        value, weights = self.criterion(outputs, targets), label_counts(targets).double()
        if value.dim() == 0:
            return torch.where(weights.sum() > 0, value, 0).double() * weights.sum(), weights.sum()
        each = self._each(value, outputs, targets).double()
        return (torch.where(weights > 0, each, 0) * weights).sum(), weights.sum()


def _nothing() -> None:
    pass


def _backward(loss: Tensor) -> None:
    """Write gradients into the leaves. `Tensor.backward` would disable modes such as `corrected` while it runs."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    one = torch.ones_like(loss)
    engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
