"""Any nn.Module as a pure function of its weights.

The module itself is copied once and never changed: weights and buffers enter through `functional_call`, so the same
copy serves thousands of clients, alone or under vmap. Parameters with requires_grad=False stay as they are. A tied
weight is one weight.

Gradient checkpointing runs layers a second time during the backward pass. `Functional.gradient` therefore keeps the
weights in the module until that pass is done; torch.func cannot, and refuses such models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.core.key import Device
from thinwire.core.tree import Tree, tmap
from thinwire.errors import ConfigError
from thinwire.spaces.unmerged import split
from thinwire.kernels.conv import Products, by_products
from thinwire.kernels.low_rank import corrected
from thinwire.data.examples import Examples, Inputs

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


ROOM = {"cpu": 1 << 28, "gpu": 1 << 31}  # bytes that the largest tensor of a test may take
IGNORED = -100  # the label of what is not to be predicted, as in torch


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each example, for class numbers as targets: (n, classes), or (n, length, classes) for sequences.

        sum of -log softmax(output)[label] over the labels that are not -100 / how many these are;   0 if there is none

    >>> round(float(cross_entropy(torch.zeros(1, 10), torch.tensor([3]))), 4)
    2.3026
    >>> outputs = torch.tensor([[[0.0, 0.0], [9.0, 0.0]]])
    >>> [round(float(cross_entropy(outputs, torch.tensor([labels]))), 4) for labels in ([0, -100], [-100, -100])]
    [0.6931, 0.0]
    """
    targets = labels_for(outputs, targets)
    each = F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction="none")
    if targets.dim() == 1:
        return each
    return each.view(targets.shape).flatten(1).sum(1) / _counted(targets).clamp(min=1)


def labels_for(outputs: Tensor, targets: Tensor) -> Tensor:
    """The class numbers that belong to outputs (..., classes): (n, 1) becomes (n,); another shape is refused.

    >>> labels_for(torch.zeros(2, 10), torch.tensor([[3], [4]]))
    tensor([3, 4])
    """
    if outputs.dim() == 2 and targets.shape == (len(outputs), 1):
        return targets[:, 0]
    if outputs.dim() < 2 or outputs.shape[:-1] != targets.shape:
        wanted, given = list(outputs.shape[:-1]), list(targets.shape)
        raise ConfigError(
            f"labels of shape {given} do not fit outputs of shape {list(outputs.shape)}; give class numbers of {wanted}"
        )
    return targets


def _counted(targets: Tensor) -> Tensor:
    """How many labels of each example count, (n,) in float32; one where targets are not class numbers."""
    if targets.is_floating_point() or not targets.dtype.is_signed:
        return torch.ones(len(targets), device=targets.device)
    known = targets != IGNORED
    return (known.flatten(1).sum(1) if targets.dim() > 1 else known).to(torch.float32)


@dataclass(frozen=True, eq=False)
class Functional:
    """A module and its loss as pure functions.

    Args:
        module: a private copy of the user's module, on the device where it computes.
        criterion: `criterion(outputs, targets)`, either one number an example (or a label), or their mean. Examples
            count by the number of their labels that are not -100.
        products: how training does convolutions as products of matrices, see `convolve`; None leaves them to torch.
        half: whether training computes in bfloat16; weights and their changes stay as they are.
        sizes: by the shapes of an example, how many bytes it adds to the largest tensor of a test; kept as found.

    >>> model = Functional.of(nn.Linear(2, 3))
    >>> list(model.weights()), model.buffers()
    (['weight', 'bias'], {})
    """

    module: nn.Module
    criterion: Loss
    products: Products | None = None
    half: bool = False
    sizes: dict[tuple, int] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, criterion: Loss = cross_entropy, device: Device = None) -> Functional:
        """Take a copy of the module; the original is never touched."""
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model must be an nn.Module, not {type(module).__name__}")
        try:
            mine = copy.deepcopy(module).to(device or "cpu")
        except Exception as error:
            raise ConfigError(f"the model cannot be copied ({error}); modules must support copy.deepcopy") from error
        for name, parameter in mine.named_parameters():
            if not parameter.is_floating_point():
                raise ConfigError(f"parameter {name!r} is of type {parameter.dtype}; only real numbers can be trained")
        return cls(mine.train(), criterion)

    def weights(self) -> Tree:
        """The trainable weights, in order of registration."""
        named = self.module.named_parameters()  # a tied weight appears once, under its first name
        return {name: p.detach().clone() for name, p in named if p.requires_grad}

    def buffers(self) -> Tree:
        """The floating-point buffers that are part of the model's saved state (running statistics, mostly)."""
        saved = self.module.state_dict(keep_vars=True).keys()
        named = self.module.named_buffers()
        return {name: b.detach().clone() for name, b in named if b.is_floating_point() and name in saved}

    def parameters(self) -> int:
        """How many numbers the model has, trainable or not."""
        return sum(p.numel() for p in self.module.parameters())

    def outputs(self, weights: Tree, buffers: Tree, inputs: Inputs) -> Tensor:
        """The module's output for these weights; writes its new running statistics into `buffers`."""
        weights, corrections = split(weights)
        args, kwargs = _arguments(inputs)
        with corrected(weights, corrections) if corrections else nullcontext():
            out = functional_call(self.module, {**self._counters(), **buffers, **weights}, args, kwargs)
        return _logits(out)

    def loss(
        self, weights: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the examples that the mask counts, and the next buffers."""
        self._train_mode()
        buffers = tmap(torch.clone, buffers)
        with self._arithmetic(targets.device):
            outputs = self.outputs(weights, buffers, inputs)
            return self._mean(outputs, targets, mask), buffers

    def gradient(
        self, weights: Tree, buffers: Tree, inputs: Inputs, targets: Tensor, mask: Tensor | None
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """The gradient of `loss` by the weights that require one, then the loss and the next buffers; not for vmap.

        >>> model = Functional.of(nn.Linear(2, 3))
        >>> weights = {name: w.requires_grad_() for name, w in model.weights().items()}
        >>> grads, (loss, _) = model.gradient(weights, {}, torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), None)
        >>> {name: tuple(block.shape) for name, block in grads.items()}
        {'weight': (3, 2), 'bias': (3,)}
        """
        self._train_mode()
        leaves = {name: w.detach().requires_grad_(w.requires_grad) for name, w in weights.items()}
        buffers = tmap(torch.clone, buffers)
        plain, corrections = split(leaves)
        args, kwargs = _arguments(inputs)

        def descend() -> tuple[Tensor, Tree]:
            with torch.enable_grad(), self._arithmetic(targets.device):
                value = self._mean(_logits(self.module(*args, **kwargs)), targets, mask)
            after = {name: b.detach().clone() for name, b in buffers.items()}  # what runs again writes them again
            if value.requires_grad:
                _backward(value)
            return value.detach(), after

        lent = {f"inner.{name}": t for name, t in {**self._counters(), **buffers, **plain}.items()}
        with corrected(plain, corrections) if corrections else nullcontext():
            out: tuple[Tensor, Tree] = functional_call(_Lent(self.module), lent, (descend,))
        asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in asked.items()}, out

    def _counters(self) -> Tree:
        """Copies of the whole-number buffers, so that training leaves no trace in the module."""
        return {name: b.clone() for name, b in self.module.named_buffers() if not b.is_floating_point()}

    def _train_mode(self) -> None:
        if not self.module.training:  # it has no other users, so its parts are as it is
            self.module.train()

    def _mean(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """The mean loss over the examples that the mask counts, each by the number of its labels."""
        value, weights = self.criterion(outputs, targets), _counted(targets)
        if mask is None and value.dim() == 0:
            return torch.where(weights.sum() > 0, value, 0)  # torch's mean over no labels is not a number
        each = self._each(value, outputs, targets)
        weights = weights if mask is None else weights * mask
        return (torch.where(weights > 0, each, 0) * weights).sum() / weights.sum().clamp(min=1)

    def _each(self, value: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example, (n,), from what the criterion returned."""
        if value.dim() == 0:  # a criterion that averages: ask it about one example at a time
            value = vmap(lambda o, t: self.criterion(o[None], t[None]))(outputs, targets)
        if value.dim() == 1:
            return value
        if value.shape != targets.shape or targets.is_floating_point():
            return value.flatten(1).mean(1)
        value = torch.where(targets == IGNORED, 0, value)
        return value.flatten(1).sum(1) / _counted(targets).clamp(min=1)

    @contextmanager
    def _arithmetic(self, device: torch.device) -> Iterator[None]:
        """How training computes."""
        with ExitStack() as stack:
            if self.half:
                stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
            if self.products:
                stack.enter_context(by_products(self.products))
            yield

    @torch.no_grad()
    def evaluate(
        self, weights: Tree, buffers: Tree, examples: Examples, which: np.ndarray | None = None, batch: int = 0
    ) -> tuple[float, float | None]:
        """Mean loss and share of right answers, over all labels but -100; no share where targets are not class numbers.

        Args:
            weights: the weights.
            buffers: the buffers.
            examples: the examples, on the weights' device.
            which: the numbers of those to take; all by default.
            batch: how many at a time; 0 for 1,000 (more small ones on a GPU), or as many as memory has room for.
        """
        numbers = torch.arange(len(examples)) if which is None else torch.from_numpy(which)
        device = next(iter(weights.values())).device
        self.module.eval()
        # loss, labels that count; right answers, answers
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        batch = batch or self._batch(weights, buffers, examples, numbers[:1].to(device))
        for index in torch.split(numbers.to(device), batch):
            inputs, targets = examples.gather(index)
            outputs = self.outputs(weights, dict(buffers), inputs)
            sums += torch.stack((*self._sum(outputs, targets), *_answers(outputs, targets)))
        loss, labels, right, answers = sums.tolist()
        if not labels:
            raise ConfigError(f"all labels of the {len(numbers):,} examples to be tested are {IGNORED}: none counts")
        return loss / labels, right / answers if answers else None

    def _batch(self, weights: Tree, buffers: Tree, examples: Examples, one: Tensor) -> int:
        """How many examples to test at once, from the largest tensor that one of them needs."""
        if not len(one):
            return 1
        inputs, targets = examples.gather(one)
        shapes = [block.shape for block in (*(inputs.values() if isinstance(inputs, dict) else (inputs,)), targets)]
        key = (tuple(shapes), one.device)
        if key not in self.sizes:
            seen = []
            for times in (1, 2):  # what is as large for two examples as for one is made of weights
                inputs, targets = examples.gather(one.repeat(times))
                with _Sizes() as sizes:
                    self.criterion(self.outputs(weights, dict(buffers), inputs), targets)
                seen.append(sizes.found)
            self.sizes[key] = max((b - a for a, b in zip(*seen, strict=False)), default=0)
        return _at_a_time(examples.gather(one)[0], self.sizes[key], one.device)

    def _sum(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all labels that count, and how many these are."""
        value, weights = self.criterion(outputs, targets), _counted(targets).double()
        if value.dim() == 0:
            return torch.where(weights.sum() > 0, value, 0).double() * weights.sum(), weights.sum()
        each = self._each(value, outputs, targets).double()
        return (torch.where(weights > 0, each, 0) * weights).sum(), weights.sum()


def _answers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How many labels are the largest of their outputs, and how many labels there are; none if they are no classes."""
    if outputs.dim() == 2 and targets.shape == (len(outputs), 1):
        targets = targets[:, 0]
    if targets.is_floating_point() or outputs.shape[:-1] != targets.shape or outputs.shape[-1] == 1:
        return torch.zeros(2, dtype=torch.float64, device=outputs.device).unbind()  # type: ignore[return-value]
    return (outputs.argmax(-1) == targets).sum().double(), _counted(targets).sum().double()


def _backward(loss: Tensor) -> None:
    """Gradients into the leaves. `Tensor.backward` would leave modes such as `corrected` for as long as it runs."""
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    one = torch.ones_like(loss)
    engine.run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Lent(nn.Module):
    """A module around another: `functional_call` on it lends the inner one its weights for as long as `do` runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, do: Callable[[], Any]) -> Any:
        """What `do` returns."""
        return do()


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the module is called."""
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def _logits(out: Any) -> Tensor:
    out = getattr(out, "logits", out)  # Hugging Face models return a record
    if not isinstance(out, Tensor):
        raise ConfigError(f"the model must return a tensor or a record with `logits`, not {type(out).__name__}")
    return out


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the size in bytes of every tensor that operations inside make, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation inside the context."""
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                self.found.append(made.numel() * made.element_size())
        return out


def _at_a_time(inputs: Inputs, largest: int, device: torch.device) -> int:
    """How many examples are tested at once, where each adds `largest` bytes to the largest tensor.

    1,000, or more small pictures on a GPU, which is idle while the host asks for the next; fewer where their largest
    tensor, such as the outputs of a language model, would take more memory than `ROOM`.

    >>> tokens = torch.zeros(1, 256, dtype=torch.int64)
    >>> [_at_a_time(tokens, 256 * classes * 4, torch.device("cpu")) for classes in (100, 50_257)]
    [1000, 5]
    """
    most = 1000
    if device.type != "cpu" and isinstance(inputs, Tensor) and inputs.is_floating_point():
        most = max(1000, min(10_000, (1 << 23) // max(1, inputs.numel())))
    return max(1, min(most, ROOM["cpu" if device.type == "cpu" else "gpu"] // max(1, largest)))
