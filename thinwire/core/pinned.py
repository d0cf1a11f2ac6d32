"""Memory that a GPU can reach by itself: for long messages of a simulation, and for numbers on their way to it.

New memory is cleared by the system page by page, which for many megabytes takes longer than to fill it. Memory that a
GPU may write to (pinned memory) is kept by torch when nobody uses it any more, and given out again. Elsewhere numpy
asks for large pages, of which there are few.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MOST = 1 << 30  # bytes of pinned memory for the messages of a round: it cannot be lent to anybody else


def pinned_empty(size: int, *, pinned: bool) -> np.ndarray:
    """So many bytes of whatever they hold; pinned ones, for which there must be a GPU, were often used before."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() if pinned else np.empty(size, np.uint8)


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on a device; a GPU takes them when it comes to it, and nobody waits.

    >>> sent(np.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    here = torch.from_numpy(numbers)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
