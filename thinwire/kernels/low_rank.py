"""Unmerged low-rank adapters: they are applied during the forward pass, so that W0 + B A is never built.

    linear(x, W0 + B A, bias)  =  linear(x, W0, bias) + (x A^T) B^T

Inside `corrected(...)`, a linear layer of an adapted weight adds the product of the adapter. All other functions
receive W0 + B A, so the result always equals that of the merged matrix, up to rounding. See `spaces/lora.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A, B, and whether the matrix is stored as inputs x outputs
Correction = tuple[Tensor, Tensor, bool]

# Attributes of a tensor that an adapter does not change.
_ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "layout")
)


class corrected(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """A context in which some weights have an unmerged adapter.

    Args:
        weights: the weights by name.
        corrections: the adapters of some of them by name: A, B, and whether the weight is stored as inputs x outputs.
            A and B may have a client axis; the rows of a layer's input are then those of the first client, of the
            second, and so on.
        dropout: the probability with which an input of A is left out.

    >>> w, a, b = torch.ones(2, 3), torch.ones(1, 3), torch.tensor([[0.0], [1.0]])
    >>> with corrected({"w": w}, {"w": (a, b, False)}):
    ...     F.linear(torch.ones(1, 3), w).tolist(), w.sum().item()
    ([[3.0, 6.0]], 9.0)
    """

    def __init__(
        self, weights: Mapping[str, Tensor], corrections: Mapping[str, Correction], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self._dropout = dropout
        self._of = {id(weights[name]): (weights[name], correction) for name, correction in corrections.items()}
        self._built: dict[int, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add the adapter in linear layers; merge it for all other functions."""
        kwargs = kwargs or {}
        layer: tuple = (None, None, None)
        if func is F.linear and len(args) > 1:
            layer = (args[2] if len(args) > 2 else kwargs.get("bias"), *args[:2])
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            layer = args
        bias, x, weight = layer
        if (found := self._of.get(id(weight))) and not self._adapted((x, bias)):
            a, b, transposed = found[1]
            if transposed == (func is torch.addmm):
                return _added(func(*args, **kwargs), x, a, b, self._dropout)
        if func not in _ATTRIBUTES and (self._adapted(args) or self._adapted(kwargs.values())):
            args = [self._merged(value) for value in args]
            kwargs = {name: self._merged(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _adapted(self, values: Any) -> bool:
        return any(
            id(value) in self._of or (isinstance(value, list | tuple) and any(id(one) in self._of for one in value))
            for value in values
        )

    def _merged(self, value: Any) -> Any:
        """The merged matrix of an adapted weight, also inside a list; other values unchanged."""
        if type(value) in (list, tuple):
            return type(value)(self._merged(one) for one in value)
        if id(value) not in self._of:
            return value
        if not _cacheable():
            return self._build(value)
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value)
        return self._built[id(value)]

    def _build(self, value: Tensor) -> Tensor:
        weight, (a, b, transposed) = self._of[id(value)]
        with torch.autocast(weight.device.type, enabled=False):
            change = b @ a
            whole = weight + (change.mT if transposed else change.reshape(weight.shape))
            return whole.to(weight.dtype)


def _added(out: Tensor, x: Tensor, a: Tensor, b: Tensor, dropout: float) -> Tensor:
    """out + (dropout(x) A^T) B^T in the dtype of the output; the adapter is computed in its own dtype, as in peft."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)
    if dropout:
        x = F.dropout(x, dropout)
    if a.dim() == 3:  # of each client, whose rows follow each other
        change = x.reshape(len(a), -1, x.shape[-1]) @ a.mT @ b.mT
        return (out + change.view(out.shape)).to(out.dtype)
    return (out + F.linear(F.linear(x, a), b)).to(out.dtype)


def _cacheable() -> bool:
    """Whether merged matrices can be cached: not under gradient checkpointing, which must recompute all tensors."""
    if torch._C._are_functorch_transforms_active():
        return True
    again = torch._C._current_graph_task_id() != -1  # in a backward pass
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return torch.is_grad_enabled() and not again and not hooked
