"""Whether kernels of our own can be compiled and run on a device.

They are written in Triton, which comes with torch's packages for CUDA; nothing needs it, everything has a way without.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def has_triton(device: torch.device) -> bool:
    """Whether a small kernel does what it should there; asked once a process and device.

    >>> has_triton(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from thinwire.kernels.smoke_test import run_one

        with ThreadPoolExecutor(1) as apart:  # whoever asks may be inside vmap, where numbers are not what they seem
            return apart.submit(run_one, device).result()
    except Exception:  # triton, or the C compiler that it needs, is not there
        return False
