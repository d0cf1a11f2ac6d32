"""Bytes of all tensors that are alive at the same time, followed while a program runs.

Every result of an operation is followed by its storage, so views and tensors that autograd keeps count once, from the
operation that makes them until nothing refers to them. Memory that a kernel takes inside an operation is not seen.

The program may run on tensors without values: `fake` makes tensors that have a shape, a type and a device, but no
memory. A step of a large model then takes no memory itself, and its bytes are those of real tensors.

>>> with LiveBytes() as live:
...     a = torch.zeros(1000)  # 4,000 bytes
...     b = a.view(10, 100) + 1  # as many again; the view has none of its own
...     del a
>>> live.peak, live.now
(8000, 4000)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of tensors that are made inside the context: those alive now, and the most at any time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to import torch's compiler, which takes seconds, to exclude this mode from it."""
        return False

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        """Start with nothing; the storages of `given` tensors, such as weights, are never counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._given = list(given)  # kept, so that their storages are not used again
        self._alive: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in self._given}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors, too, until they are freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            where = storage._cdata
            if where in self._alive:
                continue
            self._alive[where] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, where).atexit = False

    def _free(self, where: int) -> None:
        self.now -= self._alive.pop(where)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and follow its results; those in place or views of given tensors are known already."""
        out = func(*args, **(kwargs or {}))
        self.add(_tensors(out))
        return out


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors in a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


class Fake:
    """Makes tensors without values or memory. Integers stay as they are: programs look at them, as at lengths.

    >>> made = Fake().tensor(torch.zeros(3, 4))
    >>> (made @ made.T).shape, made.device.type
    (torch.Size([3, 3]), 'cpu')
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second

        self._mode: Any = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def tensor(self, given: Tensor) -> Tensor:
        """A tensor of the same shape, strides, type and device; the same one for the same tensor."""
        if not given.is_floating_point():
            return given
        if id(given) not in self._known:
            with self._mode:
                made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            self._known[id(given)] = given, made
        return self._known[id(given)][1]

    @property
    def made(self) -> list[Tensor]:
        """All tensors that were made."""
        return [made for _, made in self._known.values()]

    def tree(self, given: Any) -> Any:
        """Nested dictionaries of tensors."""
        if isinstance(given, Mapping):
            return {name: self.tree(one) for name, one in given.items()}
        return self.tensor(given) if isinstance(given, Tensor) else given

    def module(self, given: nn.Module) -> nn.Module:
        """A copy of a module with fake parameters and buffers; what else it has is copied."""
        memo: dict[int, Any] = {}
        for one in (*given.parameters(), *given.buffers()):
            if one.is_floating_point():
                made = self.tensor(one.detach())
                memo[id(one)] = nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made
        return copy.deepcopy(given, memo)
