"""Random initial weights with the same bits on all platforms.

Server and clients derive version 0 of a run from the seed; it is never sent. The generator of torch draws the same
integers on all platforms, but converts them to floating point by vectorized code that depends on the instruction set.
The initial weights would differ in their last bits, and messages would be refused as those of another model. Inside
`exact_init`, calls of `normal_`, `uniform_`, `randn` and `rand` draw from a `Key` instead, in the order of the calls:

    uniform_(a, b):  a + (b - a) u    normal_(m, s):  m + s z        u, z: exact draws of the key, sums in float64

>>> with exact_init(Key(1)):
...     one = torch.nn.Linear(3, 2)
>>> with exact_init(Key(1)):
...     two = torch.nn.Linear(3, 2)
>>> torch.equal(one.weight, two.weight), bool(one.weight.abs().max() <= 3**-0.5)
(True, True)

Other functions that transform random values (`trunc_normal_`, `orthogonal_`) still depend on the platform: use
`truncated_normal_`, or load the weights from a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.core.key import Key


class exact_init(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801 - reads as a function
    """A context in which random initialization is an exact function of a key and of the order of the calls.

    Args:
        key: the source of randomness.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to import torch's compiler, which takes seconds, to exclude this mode from it."""
        return False

    def __init__(self, key: Key) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.calls = key, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace random values of floating-point tensors that have storage; a generator that is given is used."""
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if func in _IN_PLACE and args[0].is_floating_point() and args[0].device.type != "meta":
            return self._fill(args[0], _IN_PLACE[func], *args[1:3])
        if func in _FACTORIES:
            return self._fill(func(*args, **kwargs), _FACTORIES[func])
        return func(*args, **kwargs)

    def _fill(self, tensor: Tensor, kind: str, first: float = 0.0, second: float = 1.0) -> Tensor:
        """Uniform values from `first` to `second`, or normal ones of this mean and standard deviation."""
        self.calls += 1
        key = self.key.fold("fill", self.calls)
        draw, factor = (key.uniform, second - first) if kind == "uniform" else (key.normal, second)
        return tensor.copy_(draw(*tensor.shape).double().mul_(factor).add_(first).to(tensor.dtype))


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """A context in which `exact_init` is active and torch's generator is seeded, for all other random functions.

    After it, torch's generator is as before.
    """
    with torch.random.fork_rng(devices=[]), exact_init(key):
        torch.manual_seed(key.value)
        yield


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor with normal values of mean 0, truncated at two standard deviations by rejection."""
    with torch.no_grad():
        tensor.normal_(0.0, std)
        while not tensor.is_meta and (far := tensor.abs() > 2 * std).any():
            tensor.copy_(torch.where(far, torch.empty_like(tensor).normal_(0.0, std), tensor))
    return tensor


_aten = torch.ops.aten
_IN_PLACE: dict[Any, str] = {_aten.uniform_.default: "uniform", _aten.normal_.default: "normal"}
_FACTORIES: dict[Any, str] = {_aten.rand.default: "uniform", _aten.randn.default: "normal"}
