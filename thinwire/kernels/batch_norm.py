"""Batch norm of many clients at once in training, with Triton kernels (`batch_norm_triton.py`).

On a GPU torch's vmap supports batch norm neither in 16 bits nor for channels-last images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.batch_dim import batch_dim_first
from thinwire.kernels.support import has_triton


def suits(x: Tensor) -> bool:
    """Whether the Triton kernels support this norm: images, a power of two of channels."""
    channels = x.shape[1] if x.dim() > 2 else 0
    power = 0 < channels <= 1 << 10 and channels & (channels - 1) == 0
    dtypes = x.dtype in (torch.float32, torch.bfloat16)
    return power and dtypes and has_triton(x.device)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm of images (n, channels, ...), and mean and variance of each channel.

    Sums are in float32, the result is in the dtype of the input. The variance is the biased one.
    """
    return _BatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call, no-any-return]


def update(running: Tensor, value: Tensor, momentum: float) -> None:
    """Move running statistics towards a value, in place."""
    running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)


def _kernels() -> Any:
    from thinwire.kernels import batch_norm_triton

    return batch_norm_triton


class _BatchNorm(torch.autograd.Function):
    """The norm. Mean and variance of each channel are further outputs, saved for the gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, means, variances = _kernels().forward(x[None], weight[None], bias[None], eps)
        return out[0], means[0], variances[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for them
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:  # type: ignore[override]
        x, weight, means, variances = ctx.saved_tensors
        return (*_Gradients.apply(grad, x, weight, means, variances, ctx.eps), None)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple:
        blocks = zip((x, weight, bias), in_dims, strict=False)
        return _kernels().forward(*(batch_dim_first(b, dim, info.batch_size) for b, dim in blocks), eps), (0, 0, 0)


class _Gradients(torch.autograd.Function):
    """The gradients with respect to input, weight and bias."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, variances: Tensor, eps: float) -> tuple:
        inputs = (block[None] for block in (grad, x, weight, means, variances))
        return tuple(block[0] for block in _kernels().gradients(*inputs, eps))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, variances: Tensor, eps: float
    ) -> tuple:
        blocks = zip((grad, x, weight, means, variances), in_dims, strict=False)
        return _kernels().gradients(*(batch_dim_first(b, dim, info.batch_size) for b, dim in blocks), eps), (0, 0, 0)
