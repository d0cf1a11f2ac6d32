"""Memory for long messages of a simulation.

New memory is cleared by the system page by page, which for many megabytes takes longer than to fill it. Memory that a
GPU may write to (pinned memory) is kept by torch when nobody uses it any more, and given out again. Elsewhere numpy
asks for large pages, of which there are few.
"""

from __future__ import annotations

import numpy as np
import torch

MOST = 1 << 30  # bytes of pinned memory for the messages of a round: it cannot be lent to anybody else


def room(size: int, *, pinned: bool) -> np.ndarray:
    """So many bytes of whatever they hold; pinned ones, for which there must be a GPU, were often used before."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() if pinned else np.empty(size, np.uint8)
