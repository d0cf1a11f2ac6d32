"""Convolutions of one client on a CPU, with gradients that are a convolution and a product of matrices themselves:

    out = conv(x, kernel);    by x: conv(grad, kernel turned round);    by kernel: grad^T columns(x)

where `columns` has every patch of the pictures as a row. The numbers are torch's to rounding. Its forward kernels are
good; but its gradients, without oneDNN, lay out the patches of one picture after the other and add them up again, and
take up to five times as long as the convolution. `by_columns` makes a model's layers train this way wherever oneDNN is
left out; in all other cases they do what they always did.

>>> x, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5, requires_grad=True)
>>> grad, = torch.autograd.grad(convolve_alone(x, kernel, None, (1, 1), (2, 2)).square().sum(), kernel)
>>> plain, = torch.autograd.grad(torch.conv2d(x, kernel, None, 1, 2).square().sum(), kernel)
>>> torch.allclose(grad, plain, rtol=1e-3, atol=1e-2)
True
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

Pair: TypeAlias = tuple[int, int]
LAST = torch.channels_last  # the order in which products make pictures

FEW = 16  # with fewer channels a product with the columns takes no longer than torch's forward kernels do
SHORT = 16  # numbers that lie side by side in a patch: fewer are not worth copying as such
PIECE = 1 << 20  # numbers in columns that are laid out at a time: they stay in the cache
KEPT = 1 << 22  # numbers in columns that are kept from the forward pass, at most


def by_columns(module: nn.Module) -> bool:
    """Give the convolutions of a module, and its pooling, the gradients below; whether there are any."""
    found = False
    for layer in module.modules():
        if type(layer) is nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1):
            if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
                layer.__class__, found = Conv2d, True
        elif type(layer) in _POOLS:
            layer.__class__ = _POOLS[type(layer)]
    return found


def convolve_alone(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of pictures (n, channels, height, width) with a kernel (out, channels, height, width)."""
    return _Alone.apply(x, kernel, bias, stride, padding)  # type: ignore[no-untyped-call, no-any-return]


def patches(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """All patches of pictures (..., channels, height, width): (..., rows, columns, *size, channels), not laid out."""
    x = x.movedim(-3, -1)  # channels last: the patches then consist of long runs
    if any(padding):
        x = torch.constant_pad_nd(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    *batch_dim_first, h, w, i = x.shape
    *steps, down, right, channel = x.stride()
    grid = ((h - size[0]) // stride[0] + 1, (w - size[1]) // stride[1] + 1)
    # one view in the place of two calls of unfold: with small models every call counts
    return x.as_strided(
        (*batch_dim_first, *grid, *size, i),
        (*steps, down * stride[0], right * stride[1], down, right, channel),
        x.storage_offset(),
    )


def columns(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """All patches of pictures (n, channels, height, width) as the rows of a matrix, laid out the faster way."""
    view = patches(x, size, stride, padding)
    width = size[0] * size[1] * x.shape[1]
    if size[1] * x.shape[1] >= SHORT:
        return view.reshape(-1, width)
    return view.permute(3, 4, 5, 0, 1, 2).reshape(width, -1).mT


def _rows(grad: Tensor) -> Tensor:
    """(n, o, oh, ow) -> (n oh ow, o), as columns have their rows."""
    return grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])


def _convolution(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """torch's own."""
    return torch.convolution(x, kernel, bias, stride, padding, (1, 1), False, (0, 0), 1)


def _suited(x: Tensor) -> bool:
    """Whether this is training of one client, in full precision, on a CPU without oneDNN."""
    if x.device.type != "cpu" or x.dim() != 4 or not torch.is_grad_enabled() or torch.backends.mkldnn.enabled:
        return False
    if x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return False
    # vmap has rules of its own, and modes (such as `correct`) want to see torch's functions
    return not torch._C._are_functorch_transforms_active() and not has_torch_function_unary(x)


class Conv2d(nn.Conv2d):
    """As its parent, with gradients by columns."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution."""
        if not _suited(x):
            return super().forward(x)
        return convolve_alone(x, self.weight, self.bias, self.stride, self.padding)  # type: ignore[arg-type]


class AvgPool2d(nn.AvgPool2d):
    """As its parent; the gradient comes in the order of the pictures."""

    def forward(self, x: Tensor) -> Tensor:
        """Means."""
        return _in_order(super().forward(x))


class MaxPool2d(nn.MaxPool2d):
    """As its parent; the gradient comes in the order of the pictures."""

    def forward(self, x: Tensor) -> Any:
        """Maxima."""
        out = super().forward(x)
        return out if self.return_indices else _in_order(out)


_POOLS: dict[type[nn.Module], type[nn.Module]] = {nn.AvgPool2d: AvgPool2d, nn.MaxPool2d: MaxPool2d}


def _in_order(out: Tensor) -> Tensor:
    """The same pictures; if they are channels last, so will their gradient be, for where orders meet torch is slow."""
    if _suited(out) and out.requires_grad and out.is_contiguous(memory_format=LAST):
        out.register_hook(_channels_last)  # type: ignore[no-untyped-call]
    return out


def _channels_last(grad: Tensor) -> Tensor:
    return grad.contiguous(memory_format=LAST)


class _Alone(torch.autograd.Function):
    """The convolution; where it is a product, the columns are kept for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        o, i, kh, kw = kernel.shape
        ctx.stride, ctx.padding, laid = stride, padding, None
        height, width = (
            (side + 2 * pad - length) // step + 1
            for side, pad, length, step in zip(x.shape[2:], padding, (kh, kw), stride, strict=True)
        )
        if i >= FEW or len(x) * height * width * kh * kw * i > KEPT:
            out = _convolution(x, kernel, bias, stride, padding).contiguous(memory_format=LAST)
        else:
            laid = columns(x, (kh, kw), stride, padding)
            flat = kernel.permute(2, 3, 1, 0).reshape(-1, o)
            rows = laid @ flat if bias is None else torch.addmm(bias, laid, flat)
            out = rows.view(len(x), height, width, o).permute(0, 3, 1, 2)
        ctx.save_for_backward(x, kernel, laid)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, kernel, laid = ctx.saved_tensors
        o, i, kh, kw = kernel.shape
        where = ctx.stride, ctx.padding
        need_x, need_kernel, need_bias = ctx.needs_input_grad[:3]
        by_kernel = None
        if need_kernel:
            if laid is None or torch.is_grad_enabled():  # a gradient of the gradient must find its way to x
                by_kernel = _kernel_gradient(grad, x, (kh, kw), *where)
            else:
                by_kernel = _rows(grad).mT @ laid
            by_kernel = by_kernel.view(o, kh, kw, i).permute(0, 3, 1, 2)
        by_x = _input_gradient(grad, x, kernel, *where) if need_x else None
        return by_x, by_kernel, grad.sum((0, 2, 3)) if need_bias else None, None, None


def _kernel_gradient(grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """(o, kh kw i), from as many pictures at a time as fit."""
    width = size[0] * size[1] * x.shape[1]
    pictures = max(1, PIECE // (grad.shape[2] * grad.shape[3] * width))
    total = grad.new_zeros(grad.shape[1], width)
    for g, part in zip(torch.split(grad, pictures), torch.split(x, pictures), strict=True):
        total = torch.addmm(total, _rows(g).mT, columns(part, size, stride, padding))
    return total


def _input_gradient(grad: Tensor, x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The gradient by the pictures: for steps of one pixel a convolution with the kernel turned round."""
    ph, pw = (size - 1 - pad for size, pad in zip(kernel.shape[2:], padding, strict=True))
    if stride == (1, 1) and min(ph, pw) >= 0:
        by_x = _convolution(grad, kernel.flip(2, 3).transpose(0, 1), None, stride, (ph, pw))
        return by_x.contiguous(memory_format=LAST) if x.stride(1) == 1 else by_x
    no, only_x = ((1, 1), False, (0, 0), 1), (True, False, False)
    made = torch.ops.aten.convolution_backward(grad, x, kernel, None, stride, padding, *no, only_x)
    return made[0]  # type: ignore[no-any-return]
