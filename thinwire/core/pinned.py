"""Pinned memory, for long messages of a simulation and for transfers to a GPU.

The operating system clears new memory page by page, which for many megabytes takes longer than writing to it. torch
caches and reuses pinned memory. Without a GPU, numpy requests huge pages, which are few.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

MOST = 1 << 30  # bytes of pinned memory for the messages of a round: other processes cannot use pinned memory
LEAST = 1 << 20  # bytes: smaller tensors are not worth a request


def pinned_empty(size: int, *, pinned: bool) -> np.ndarray:
    """An uninitialized array of bytes; `pinned` needs a GPU and usually reuses cached memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() if pinned else np.empty(size, np.uint8)


def empty_long(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """An uninitialized vector on the CPU, in pinned memory if it is long and this process uses a GPU.

    >>> empty_long(3).shape
    torch.Size([3])
    """
    pinned = LEAST <= size * dtype.itemsize <= MOST and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.empty(size, dtype=dtype, pin_memory=pinned)


def to_host(values: Tensor, *, aside: bool) -> tuple[Tensor, torch.cuda.Event]:
    """Begin to copy a tensor from a GPU to pinned memory; returns the copy, and an event after which it is complete.

    Args:
        values: the tensor.
        aside: whether work that is submitted to the GPU from now on need not wait for the copy. Nothing may write to
            the tensor any more.
    """
    stream = now = torch.cuda.current_stream(values.device)
    if aside:
        stream = _copies(values.device)
        stream.wait_stream(now)
        values.record_stream(stream)
    with torch.cuda.stream(stream):
        copy = torch.empty_like(values, device="cpu", pin_memory=True)
        return copy.copy_(values, non_blocking=True), stream.record_event()


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies from a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, asynchronously to a GPU.

    >>> sent(np.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
