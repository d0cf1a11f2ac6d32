"""Updates on their way from a GPU, and values that processes exchange.

What Ray sends is a few bytes of pickle and the arrays beside them, which it copies once. Pickled as it is, a tensor
takes its whole storage with it, also that of other tensors, and is copied several times. Here a tensor is an array of
its own values, and so is a message. Pickle is for processes that trust each other.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.parallel import PARALLEL_BYTES, to_host as copy_to_host
from thinwire.core.tree import Vector, bring
from thinwire.protocol.client import Update

MARGIN_BYTES = 64  # before and after the values of a client; enough for the header of a message with few blocks


def to_host(update: Update) -> Callable[[], Update]:
    """Begin to copy an update to the CPU; a call of the result waits until it is there.

    In between, a GPU can be given further work, which does not delay the transfer. Long codes get free memory around
    each row, where a message is written without a copy of its values (`wire.message`).
    """
    code, wide, events = update.code, None, list[torch.cuda.Event]()
    if isinstance(code, Vector) and code.data.is_cuda and code.data[0].nbytes >= PARALLEL_BYTES:
        margin, size = MARGIN_BYTES // code.data.element_size(), code.data.shape[1]
        wide, done = copy_to_host(code.data.clone(), aside=True, margin=margin)  # a clone: a recording may write to it
        events.append(done)
        code = Vector(wide[:, margin : margin + size], code.spec)
    trees = (code, update.schedule_report, update.unsent, update.moved, update.buffers, update.shared)
    sums = {"loss": update.loss, "total": update.total}
    on_host = bring([*trees, sums, *update.opt.values()], "cpu", events)

    def wait() -> Update:
        for event in events:
            event.synchronize()
        code, report, unsent, moved, buffers, shared, sums, *slots = on_host
        opt = dict(zip(update.opt, slots, strict=True))
        trees = (code, report, unsent, moved, buffers, shared, opt)
        return Update(*trees, sums["loss"], sums["total"], update.steps, update.samples, wide)

    return wait


class Packed(NamedTuple):
    """A value as it is sent."""

    head: bytes
    arrays: list[np.ndarray]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.head) + sum(array.nbytes for array in self.arrays)


def pack(value: Any) -> Packed:
    """A value whose tensors, of any device, and byte strings in views are arrays.

    >>> sent = pack({"loss": torch.zeros(1000)[:2], "message": memoryview(b"abc")})
    >>> [array.nbytes for array in sent.arrays]
    [8, 3]
    >>> unpack(sent)["loss"], bytes(unpack(sent)["message"])
    (tensor([0., 0.]), b'abc')
    """
    head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
    return Packed(head.getvalue(), [np.frombuffer(one.raw(), np.uint8) for one in buffers])


def unpack(sent: Packed) -> Any:
    """The value, with tensors on the CPU; its messages are views of the arrays."""
    return pickle.loads(sent.head, buffers=[array.data for array in sent.arrays])


class _Pickler(pickle.Pickler):
    """Pickles tensors and views by their values."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor:
            values, *kind = values_of(value)
            return _tensor, (_bytes(values), *kind)
        if type(value) is memoryview:
            return _view, (_bytes(np.frombuffer(value, np.uint8)),)
        return NotImplemented


def values_of(tensor: Tensor) -> tuple[np.ndarray, torch.dtype, torch.Size]:
    """A tensor as an array of its bytes, its type and its shape."""
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def shared(parts: tuple[np.ndarray, torch.dtype, torch.Size]) -> Tensor:
    """The tensor of such an array, whose memory it shares: not to be written to, if that is of several processes.

    >>> shared(values_of(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)))
    tensor([[1., 2.]], dtype=torch.bfloat16)
    """
    values, dtype, shape = parts
    return torch.from_numpy(values).view(dtype).view(shape)


def _bytes(array: np.ndarray) -> Any:
    """The values of an array, beside the pickle; nothing is left of an empty one, which has no buffer."""
    return pickle.PickleBuffer(array.data) if array.size else b""


def _tensor(values: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor with these bytes; a copy, because what Ray shares between processes is read-only."""
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape) if values else torch.empty(shape, dtype=dtype)


def _view(values: Any) -> memoryview:
    """A message, not copied."""
    return memoryview(values)
