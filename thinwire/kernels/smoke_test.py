"""A minimal Triton kernel, run once to check that Triton works. Imported by `support.py` only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_one(x):
    tl.store(x, 1.0)


def run_one(device: torch.device) -> bool:
    """Whether the kernel writes a one."""
    x = torch.zeros(1, device=device)
    with torch.cuda.device(device):
        _write_one[(1,)](x)
    return float(x) == 1
