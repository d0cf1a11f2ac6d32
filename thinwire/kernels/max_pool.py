"""Max pooling over adjacent windows, of many clients at once, with one Triton kernel per direction.

torch stores an index for each window, and its gradient for channels-last images takes several times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.conv_cpu import Pair
from thinwire.kernels.support import batch_dim_first, has_triton


def suits(x: Tensor) -> bool:
    """Whether the Triton kernels (`max_pool_triton.py`) support these images."""
    return x.dim() == 4 and x.dtype in (torch.float32, torch.bfloat16) and has_triton(x.device)


def max_pool(x: Tensor, window: Pair) -> Tensor:
    """The largest values of adjacent windows that cover the images (n, channels, height, width)."""
    return _MaxPool.apply(x, window)  # type: ignore[no-untyped-call, no-any-return]


def _kernels() -> Any:
    from thinwire.kernels import max_pool_triton

    return max_pool_triton


class _MaxPool(torch.autograd.Function):
    """The pooled images."""

    @staticmethod
    def forward(x: Tensor, window: Pair) -> Tensor:
        return _kernels().forward(x, window)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.window = inputs[1]
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        return _Gradient.apply(grad, *ctx.saved_tensors, ctx.window), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, window: Pair) -> tuple:
        return _kernels().forward(batch_dim_first(x, in_dims[0], info.batch_size), window), 0


class _Gradient(torch.autograd.Function):
    """The gradient with respect to the images."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, out: Tensor, window: Pair) -> Tensor:
        return _kernels().gradient(grad, x, out, window)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, x: Tensor, out: Tensor, window: Pair) -> tuple:
        blocks = zip((grad, x, out), in_dims, strict=False)
        return _kernels().gradient(*(batch_dim_first(block, dim, info.batch_size) for block, dim in blocks), window), 0
