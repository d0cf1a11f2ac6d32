"""Precision of matrix products in Triton kernels."""

from __future__ import annotations

import torch

# float32 on tensor cores: each factor is split into two of 11 bits, and three of the four products are computed. This
# is as accurate as float32 up to the last two bits, and several times faster than without tensor cores.
EXACT = "tf32x3"


def dot_precision(kind: torch.dtype) -> str:
    """The `input_precision` of `tl.dot` for factors of this type, by torch's setting for float32.

    >>> dot_precision(torch.bfloat16)
    'tf32'
    """
    allowed = torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    return "tf32" if allowed == "tf32" or kind == torch.bfloat16 else EXACT
