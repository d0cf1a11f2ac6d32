"""Group norm of many clients at once, with one Triton kernel per direction (`group_norm_triton.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.support import derivative, for_many, for_one, has_triton


def suits(x: Tensor, groups: int) -> bool:
    """Whether the Triton kernels support this norm: images, powers of two of channels and groups."""
    channels = x.shape[1] if x.dim() > 2 else 0
    powers = channels & (channels - 1) == groups & (groups - 1) == 0 < channels
    dtypes = x.dtype in (torch.float32, torch.bfloat16)
    return powers and dtypes and has_triton(x.device)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Group norm of images (n, channels, ...); sums in float32, the result in the dtype of the input."""
    return _GroupNorm.apply(x, groups, weight, bias, eps)[0]  # type: ignore[no-untyped-call]


def _kernels() -> Any:
    from thinwire.kernels import group_norm_triton

    return group_norm_triton


class _GroupNorm(torch.autograd.Function):
    """The norm. Mean and scale of each group are further outputs, saved for the gradient."""

    @staticmethod
    def forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return for_one(_kernels().forward, x, groups, weight, bias, eps)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, ctx.groups, weight, _, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for them
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:  # type: ignore[override]
        x, weight, means, scales = ctx.saved_tensors
        by_x, by_weight, by_bias = _gradients(grad, x, ctx.groups, weight, means, scales)
        return by_x, None, by_weight, by_bias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return for_many(_kernels().forward, info, in_dims, args)


@derivative
def _gradients(*args: Any) -> tuple:
    """The gradients with respect to input, weight and bias."""
    return _kernels().gradients(*args)  # type: ignore[no-any-return]
