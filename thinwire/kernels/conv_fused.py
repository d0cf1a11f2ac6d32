"""Batched convolution in Triton (`conv_triton.py`), with gradients under autograd and vmap.

Unlike im2col, the patches are never stored: each gradient loads them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.conv_cpu import Pair
from thinwire.kernels.support import batch_dim_first, derivative, for_many, for_one, has_triton, split_clients


def triton_kernels(x: Tensor) -> Any:
    """The module of Triton kernels, or None where they cannot run."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not has_triton(x.device):
        return None
    from thinwire.kernels import conv_triton as kernels

    return kernels


def convolve_fused(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of images (n, channels, height, width), by the Triton kernels, in the type of the images.

    Kernel and bias may have another type: their gradients have it, without rounding to that of the images.
    """
    return _Fused.apply(x, kernel, bias, stride, padding)[0]  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    """The convolution. The kernel as the products read it is a further output, saved for the gradient."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        return for_one(_of_many, x, kernel, bias, stride, padding)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, kernel, bias, ctx.stride, ctx.padding = inputs
        own = output[1]
        ctx.bias, ctx.kind = bias is not None, kernel.dtype
        ctx.size, ctx.kernel_size = tuple(x.shape[-2:]), tuple(kernel.shape[-2:])
        ctx.mark_non_differentiable(own)
        ctx.set_materialize_grads(False)  # no zeros for them
        ctx.save_for_backward(x, own if own.numel() else kernel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple:  # type: ignore[override]
        x, kernel = ctx.saved_tensors
        need_x, need_kernel, need_bias = ctx.needs_input_grad[:3]
        by_x = by_kernel = by_bias = None
        if need_x:
            by_x = _FusedInputGradient.apply(grad, kernel, ctx.size, ctx.stride, ctx.padding)  # type: ignore[no-untyped-call]
        if need_kernel or need_bias:
            by_kernel, by_bias = _kernel_gradient(grad, x, ctx.kernel_size, ctx.stride, ctx.padding, ctx.bias, ctx.kind)
        return by_x, by_kernel, by_bias if ctx.bias else None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *others: Any) -> tuple:
        if in_dims[1] is None and in_dims[2] is None:  # all clients share one kernel: one long product
            c = info.batch_size
            out, own = _Fused.forward(batch_dim_first(x, in_dims[0], c).flatten(0, 1), *others)
            return (split_clients(out, c), own), (0, None)
        return for_many(_of_many, info, in_dims, (x, *others))


def _of_many(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """The convolutions of all clients, and the copy of the kernels that they read; empty if it is no copy."""
    kernels = triton_kernels(x)
    own = kernels.channels_last(kernel, x.dtype)
    out = kernels.forward(x, own, bias, stride, padding)
    return out, own.new_empty(len(own), 0) if own is kernel else own


@derivative
def _kernel_gradient(grad: Tensor, x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """The gradients with respect to the kernel and the bias, in their type; the second is empty without a bias."""
    return triton_kernels(x).kernel_gradient(grad, x, *settings)  # type: ignore[no-any-return]


class _FusedInputGradient(torch.autograd.Function):
    """The gradient with respect to the images."""

    @staticmethod
    def forward(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return for_one(triton_kernels(grad).input_gradient, grad, kernel, size, stride, padding)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        return

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, *others: Any) -> tuple:
        if in_dims[1] is None:
            c = info.batch_size
            long = batch_dim_first(grad, in_dims[0], c).flatten(0, 1)
            return split_clients(_FusedInputGradient.forward(long, *others), c), 0
        return for_many(triton_kernels(grad).input_gradient, info, in_dims, (grad, *others))
