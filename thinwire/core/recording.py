"""Whether a CUDA graph is being recorded: then nothing may be read back, and shapes must be those of every step."""

from __future__ import annotations

import torch
from torch import Tensor


def is_recorded(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are recorded for a CUDA graph.

    >>> is_recorded(torch.zeros(3))
    False
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
