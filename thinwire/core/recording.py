"""Whether a CUDA graph is being recorded: then nothing may be read back, and shapes must be those of every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_REHEARSED: ContextVar[bool] = ContextVar("rehearsed", default=False)


def is_recorded(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are recorded for a CUDA graph, or rehearsed for a recording.

    >>> is_recorded(torch.zeros(3))
    False
    """
    return tensor.is_cuda and (_REHEARSED.get() or torch.cuda.is_current_stream_capturing())


@contextmanager
def rehearsed() -> Iterator[None]:
    """A context of steps before a recording: they have its shapes, so libraries choose the kernels of the recording."""
    token = _REHEARSED.set(True)
    try:
        yield
    finally:
        _REHEARSED.reset(token)
