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
import ctypes
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Heap:
    """What the C library takes from the system for tensors of these sizes, which are allocated and never written.

    Free pieces between tensors are too small for others, and the library keeps them. How much that is depends on the
    order of all sizes, so the same sizes are allocated. Memory that is never written takes no pages. It needs
    glibc 2.33 or newer; with other C libraries `peak` is 0.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._libc = libc if hasattr(libc, "mallinfo2") else None
        if self._libc:
            self._libc.mallinfo2.restype = _MallInfo
            self._libc.free.argtypes = [ctypes.c_void_p]
            self._libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self._first = self._taken()
        self._calls = self.peak = 0
        self._order: list[tuple[int, int]] = []  # number of an allocation, its size or 0 where it is given back
        self._at: dict[int, int | None] = {}

    def allocate(self, size: int) -> int:
        """Allocate so many bytes, aligned as those of torch; the number of the allocation."""
        number = len(self._order)
        self._order.append((number, max(1, size)))
        self._at[number] = self._memory(size)
        return number

    def free(self, number: int) -> None:
        """Give an allocation back."""
        self._order.append((number, 0))
        self._give_back(self._at.pop(number))

    def again(self, times: int) -> None:
        """Repeat all allocations so far; what was not given back is, after the next time, as values of a step are."""
        for _ in range(times):
            before, self._at = self._at, {}
            for number, size in self._order:
                if size:
                    self._at[number] = self._memory(size)
                else:
                    self._give_back(self._at.pop(number))
            for address in before.values():
                self._give_back(address)

    def close(self) -> None:
        """Give everything back."""
        for address in self._at.values():
            self._give_back(address)
        self._at, self._libc = {}, None

    def _memory(self, size: int) -> int | None:
        address = ctypes.c_void_p()
        if not self._libc or self._libc.posix_memalign(ctypes.byref(address), ALIGNMENT, size):
            return None
        self._calls += 1
        if self._calls % EVERY == 0:
            self.peak = max(self.peak, self._taken() - self._first)
        return address.value

    def _give_back(self, address: int | None) -> None:
        if self._libc and address:
            self._libc.free(address)

    def _taken(self) -> int:
        """The bytes of the heap and of large pieces outside it."""
        if not self._libc:
            return 0
        info = self._libc.mallinfo2()
        return int(info.arena + info.hblkhd)


ALIGNMENT = 64  # of tensors on a CPU
EVERY = 8  # allocations after which the C library is asked


class _MallInfo(ctypes.Structure):
    """The result of mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of tensors that are made inside the context: those alive now, and the most at any time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to import torch's compiler, which takes seconds, to exclude this mode from it."""
        return False

    def __init__(self, given: Iterable[Tensor] = (), heap: Heap | None = None) -> None:
        """Start with nothing.

        Args:
            given: tensors whose storages are never counted, such as weights.
            heap: allocates as much as each tensor, where these have no memory of their own.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._heap, self.closed = heap, False
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
            number = self._heap.allocate(storage.nbytes()) if self._heap else 0
            weakref.finalize(storage, self._free, where, number).atexit = False

    def _free(self, where: int, number: int) -> None:
        self.now -= self._alive.pop(where)
        if self._heap and not self.closed:
            self._heap.free(number)

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
