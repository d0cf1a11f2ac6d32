"""Low-rank corrections applied while a model computes, so that the corrected matrices are never built.

    linear(x, W0 + B A, bias)  =  linear(x, W0, bias) + (x A^T) B^T

The weights come with their corrections beside them (`spaces.beside`). Inside `corrected(...)` a product with such a
weight adds the correction's own; any other function that meets it is given W0 + B A, so the outcome is always that of
the built matrix, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Correction = tuple[Tensor, Tensor, bool]  # A, B, and whether the matrix is stored as inputs x outputs

# Facts about a tensor that a correction does not change.
_FACTS = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "layout")
)


class corrected(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """A context in which some weights count as corrected.

    Args:
        weights: the weights, by name.
        corrections: by name, the corrections of some of them.

    >>> w, a, b = torch.ones(2, 3), torch.ones(1, 3), torch.tensor([[0.0], [1.0]])
    >>> with corrected({"w": w}, {"w": (a, b, False)}):
    ...     F.linear(torch.ones(1, 3), w).tolist(), w.sum().item()
    ([[3.0, 6.0]], 9.0)
    """

    def __init__(self, weights: Mapping[str, Tensor], corrections: Mapping[str, Correction]) -> None:
        super().__init__()
        self._of = {id(weights[name]): (weights[name], correction) for name, correction in corrections.items()}
        self._built: dict[int, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function inside the context."""
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and not self._met(args[:1]) and (found := self._of.get(id(args[1]))):
            a, b, turned = found[1]
            if not turned:
                return _added(func(*args, **kwargs), args[0], a, b)
        if func is torch.addmm and len(args) == 3 and not kwargs and (found := self._of.get(id(args[2]))):
            a, b, turned = found[1]
            if turned and not self._met(args[:2]):
                return _added(func(*args), args[1], a, b)
        if func not in _FACTS and (self._met(args) or self._met(kwargs.values())):
            args = [self._whole(value) for value in args]
            kwargs = {name: self._whole(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _met(self, values: Any) -> bool:
        return any(
            id(value) in self._of or (isinstance(value, list | tuple) and any(id(one) in self._of for one in value))
            for value in values
        )

    def _whole(self, value: Any) -> Any:
        """The built matrix for a corrected weight, also in a list; anything else as it is."""
        if type(value) in (list, tuple):
            return type(value)(self._whole(one) for one in value)
        if id(value) not in self._of:
            return value
        if not _runs_once():
            return self._build(value)
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value)
        return self._built[id(value)]

    def _build(self, value: Tensor) -> Tensor:
        weight, (a, b, turned) = self._of[id(value)]
        with torch.autocast(weight.device.type, enabled=False):
            change = b @ a
            return (weight + (change.mT if turned else change.reshape(weight.shape))).to(weight.dtype)


def _added(out: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out + (x A^T) B^T in the type of the output; the correction is computed in its own type, as peft does."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(a.dtype)
    return (out + F.linear(F.linear(x, a), b)).to(out.dtype)


def _runs_once() -> bool:
    """Whether this is no layer under gradient checkpointing, which must build the same tensors when it runs again."""
    if torch._C._are_functorch_transforms_active():
        return True
    again = torch._C._current_graph_task_id() != -1  # in a backward pass
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return torch.is_grad_enabled() and not again and not hooked
