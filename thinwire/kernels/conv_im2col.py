"""Batched convolution as im2col and a matrix product, with gradients under autograd and vmap.

    columns[client] = all patches of its images, one per row;    output[client] = columns[client] kernel[client]

Shapes, with a leading client axis: x (c, n, i, h, w), kernel (c, o, i, kh, kw), columns (c, n oh ow, kh kw i).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.batch_dim import batch_dim_first, split_clients
from thinwire.kernels.conv_cpu import Pair, patches

_SPLIT = 1 << 10  # rows of patches per part of a kernel gradient: long sums are computed as parallel partial sums


def forward(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    """The convolution (c, n, o, oh, ow), and the columns for the gradient."""
    c, n = x.shape[:2]
    kh, kw = kernel.shape[-2:]
    view = patches(x, (kh, kw), stride, padding)
    oh, ow = view.shape[2:4]
    columns = view.reshape(c, n * oh * ow, -1)
    out = torch.bmm(columns, _flat(kernel).mT)
    return out.view(c, n, oh, ow, -1).permute(0, 1, 4, 2, 3), columns


def kernel_gradient(grad: Tensor, columns: Tensor, size: Pair) -> Tensor:
    """The gradient with respect to a kernel of this size, from the gradient of the output."""
    c, n, o, oh, ow = grad.shape
    rows = n * oh * ow
    # split at whole images, so that all parts are equal
    parts = next((p for p in range(max(1, rows // _SPLIT), 0, -1) if n % p == 0), 1)
    g = grad.permute(0, 1, 3, 4, 2).reshape(c * parts, rows // parts, o)
    total = torch.bmm(g.mT, columns.reshape(c * parts, rows // parts, -1))
    total = total.view(c, parts, o, *size, -1).sum(1) if parts > 1 else total.view(c, o, *size, -1)
    return total.permute(0, 1, 4, 2, 3)


def input_gradient(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient with respect to images of this size, from the gradient of the output."""
    c, n, o, oh, ow = grad.shape
    i, kh, kw = kernel.shape[-3:]
    h, w = size[0] + 2 * padding[0], size[1] + 2 * padding[1]
    g = grad.permute(0, 1, 3, 4, 2).reshape(c, n * oh * ow, o)
    patches = torch.bmm(g, _flat(kernel)).view(c, n, oh, ow, kh, kw, i).permute(0, 1, 2, 3, 6, 4, 5)
    rows: Tensor = torch.ops.aten.unfold_backward(patches, (c, n, oh, w, i, kh), 3, kw, stride[1])
    x: Tensor = torch.ops.aten.unfold_backward(rows, (c, n, h, w, i), 2, kh, stride[0])
    x = x[:, :, padding[0] : h - padding[0], padding[1] : w - padding[1]]
    return x.permute(0, 1, 4, 2, 3)


def _flat(kernel: Tensor) -> Tensor:
    """(c, o, i, kh, kw) -> (c, o, kh kw i)."""
    return kernel.permute(0, 1, 3, 4, 2).flatten(2)


def convolve_im2col(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of images (n, channels, height, width), without a client axis."""
    return _Convolve.apply(x, kernel, stride, padding)[0]  # type: ignore[no-untyped-call, no-any-return]


class _Convolve(torch.autograd.Function):
    """The convolution. The columns are a second output, saved for the gradient."""

    @staticmethod
    def forward(x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        out, columns = forward(x[None], kernel[None], stride, padding)
        return out[0], columns[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, kernel, ctx.stride, ctx.padding = inputs
        ctx.size, ctx.kernel_size = tuple(x.shape[-2:]), tuple(kernel.shape[-2:])
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(kernel, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:  # type: ignore[override]
        kernel, columns = ctx.saved_tensors
        need_x, need_kernel = ctx.needs_input_grad[:2]
        x = _InputGradient.apply(grad, kernel, ctx.size, ctx.stride, ctx.padding) if need_x else None  # type: ignore[no-untyped-call]
        k = _KernelGradient.apply(grad, columns, ctx.kernel_size) if need_kernel else None  # type: ignore[no-untyped-call]
        return x, k, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> tuple:
        c = info.batch_size
        x = batch_dim_first(x, in_dims[0], c)
        if in_dims[1] is None:  # all clients share one kernel: one long product
            out, columns = forward(x.flatten(0, 1)[None], kernel[None], stride, padding)
            return (split_clients(out[0], c), split_clients(columns[0], c)), (0, 0)
        return forward(x, batch_dim_first(kernel, in_dims[1], c), stride, padding), (0, 0)


class _KernelGradient(torch.autograd.Function):
    """The gradient with respect to the kernel."""

    @staticmethod
    def forward(grad: Tensor, columns: Tensor, size: Pair) -> Tensor:
        return kernel_gradient(grad[None], columns[None], size)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, columns: Tensor, size: Pair) -> tuple:
        c = info.batch_size
        return kernel_gradient(batch_dim_first(grad, in_dims[0], c), batch_dim_first(columns, in_dims[1], c), size), 0


class _InputGradient(torch.autograd.Function):
    """The gradient with respect to the images."""

    @staticmethod
    def forward(grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
        return input_gradient(grad[None], kernel[None], size, stride, padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, grad: Tensor, kernel: Tensor, size: Pair, stride: Pair, padding: Pair) -> tuple:
        c = info.batch_size
        grad = batch_dim_first(grad, in_dims[0], c)
        if in_dims[1] is None:
            by_x = input_gradient(grad.flatten(0, 1)[None], kernel[None], size, stride, padding)
            return split_clients(by_x[0], c), 0
        return input_gradient(grad, batch_dim_first(kernel, in_dims[1], c), size, stride, padding), 0
