"""Random initial weights with the same bits on every machine.

Version 0 of a run is derived from the seed by server and clients, and never sent. torch's own generator draws the same
integers everywhere, but turns them into floats by vector code that depends on the instruction set: a network that is
built on two kinds of machine differs in its last bits, and its messages are refused as those of another model. Within
`exact_init`, what modules fill by `normal_`, `uniform_`, `randn` or `rand` comes from a `Key` instead, in the order of
the calls:

    uniform_(a, b):  a + (b - a) u    normal_(m, s):  m + s z        u, z: exact draws of the key, sums in float64

>>> with exact_init(Key(1)):
...     one = torch.nn.Linear(3, 2)
>>> with exact_init(Key(1)):
...     two = torch.nn.Linear(3, 2)
>>> torch.equal(one.weight, two.weight), bool(one.weight.abs().max() <= 3**-0.5)
(True, True)

What is computed from draws by other functions (`trunc_normal_`, `orthogonal_`) still depends on the machine: fill such
weights with `truncated_normal_`, or load them from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.core.key import Key

Draw: TypeAlias = Callable[[Key, Tensor, float, float], Tensor]


class exact_init(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - reads as a function
    """A context in which random fills are exact functions of a key and of the order of the calls."""

    def __init__(self, key: Key) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.calls = key, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The drawn values in the place of torch's, for float tensors that have storage."""
        kwargs = kwargs or {}
        if func in _FILLED and args[0].is_floating_point() and args[0].device.type != "meta":
            return self._fill(args[0], _FILLED[func], *args[1:3])
        if func in _MADE:
            return self._fill(func(*args, **kwargs), _MADE[func])
        return func(*args, **kwargs)

    def _fill(self, tensor: Tensor, draw: Draw, first: float = 0.0, second: float = 1.0) -> Tensor:
        self.calls += 1
        return tensor.copy_(draw(self.key.fold("fill", self.calls), tensor, first, second))


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor with normal values of mean 0 that lie within two deviations; others are drawn again."""
    with torch.no_grad():
        tensor.normal_(0.0, std)
        while not tensor.is_meta and (far := tensor.abs() > 2 * std).any():
            tensor.copy_(torch.where(far, torch.empty_like(tensor).normal_(0.0, std), tensor))
    return tensor


def _uniform(key: Key, like: Tensor, low: float, high: float) -> Tensor:
    return key.uniform(*like.shape).double().mul_(high - low).add_(low).to(like.dtype)


def _normal(key: Key, like: Tensor, mean: float, std: float) -> Tensor:
    return key.normal(*like.shape).double().mul_(std).add_(mean).to(like.dtype)


_aten = torch.ops.aten
_FILLED: dict[Any, Draw] = {_aten.uniform_.default: _uniform, _aten.normal_.default: _normal}
_MADE: dict[Any, Draw] = {_aten.rand.default: _uniform, _aten.randn.default: _normal}
