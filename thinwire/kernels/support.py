"""Whether Triton kernels can be compiled and run on a device.

Triton is part of the CUDA builds of torch. It is optional: all operations have an implementation without it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def has_triton(device: torch.device) -> bool:
    """Whether a minimal kernel runs on this device; checked once per process and device.

    >>> has_triton(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from thinwire.kernels.smoke_test import run_one

        with ThreadPoolExecutor(1) as pool:  # in another thread: the caller may be inside vmap, where values are traced
            return pool.submit(run_one, device).result()
    except Exception:  # triton, or the C compiler that it needs, is not installed
        return False
