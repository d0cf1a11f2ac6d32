"""Convolutions of one client on a CPU without oneDNN, with faster gradients than torch's.

    out = conv(x, kernel);    by x: conv(grad, flipped kernel);    by kernel: grad^T columns(x)

`columns` has one row per patch of the images. The results differ from torch's by rounding only. torch's forward kernels
are fast (NNPACK's, with Fourier transforms); but without oneDNN its gradients unfold and fold one image at a time and
take up to five times as long as the convolution. The gradient by a large kernel is a convolution, too: of the images
with the gradient of the output, where images are channels and channels are images. In tiles it takes two thirds of the
time of the product. `by_columns` replaces the layers of a model; with oneDNN, and in all other cases, they behave as
before.

>>> x, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 5, 5, requires_grad=True)
>>> grad, = torch.autograd.grad(convolve_alone(x, kernel, None, (1, 1), (2, 2)).square().sum(), kernel)
>>> plain, = torch.autograd.grad(torch.conv2d(x, kernel, None, 1, 2).square().sum(), kernel)
>>> torch.allclose(grad, plain, rtol=1e-3, atol=1e-2)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

Pair: TypeAlias = tuple[int, int]
LAST = torch.channels_last  # the memory format of the results of matrix products

FEW = 16  # with fewer channels a product with the columns is as fast as torch's forward kernels
SHORT = 16  # contiguous values of a patch: shorter runs are slow to copy
PIECE = 1 << 20  # values of columns that are computed at a time: they stay in the cache
KEPT = 1 << 22  # the most values of columns that are saved for the backward pass
LARGE = 25  # values of a kernel: for smaller ones a product takes no more arithmetic than transforms
TILE = 16  # pixels on a side that NNPACK transforms at a time
TILED = 1 << 24  # values of images whose tiles are copied at a time
MANY = 4  # tiles of a batch: with fewer, transforming them takes longer than multiplying them


def pair(value: Any) -> Pair:
    """A setting of a layer for both axes of an image, from one number or one for each."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def window_of(
    shape: Sequence[int],
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Pair | None:
    """The window of an average pooling of images over adjacent windows that cover them; None for another pooling."""
    size = pair(kernel_size)
    adjacent = stride is None or stride == () or pair(stride) == size
    plain = pair(padding) == (0, 0) and not ceil_mode and divisor_override is None
    covers = len(shape) == 4 and shape[-2] % size[0] == 0 and shape[-1] % size[1] == 0
    return size if adjacent and plain and covers else None


def by_columns(module: nn.Module) -> None:
    """Replace the convolution and pooling layers of a module in place."""
    for layer in module.modules():
        if type(layer) is nn.Conv2d and layer.groups == 1 and layer.dilation == (1, 1):
            if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
                layer.__class__ = Conv2d
        elif type(layer) in _POOLS:
            layer.__class__ = _POOLS[type(layer)]


def convolve_alone(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of images (n, channels, height, width) with a kernel (out, channels, height, width)."""
    return _ConvolveAlone.apply(x, kernel, bias, stride, padding)  # type: ignore[no-untyped-call]


def patches(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """A view of all patches of images (..., channels, height, width): (..., rows, columns, *size, channels)."""
    x = x.movedim(-3, -1)  # channels last: long contiguous runs in each patch
    if any(padding):
        x = torch.constant_pad_nd(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    *batch, h, w, i = x.shape
    *steps, down, right, channel = x.stride()
    grid = ((h - size[0]) // stride[0] + 1, (w - size[1]) // stride[1] + 1)
    # one view instead of two calls of unfold: for small models each call counts
    return x.as_strided(
        (*batch, *grid, *size, i),
        (*steps, down * stride[0], right * stride[1], down, right, channel),
        x.storage_offset(),
    )


def columns(x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """A matrix with all patches of images (n, channels, height, width) as rows, in the faster memory order."""
    view = patches(x, size, stride, padding)
    width = size[0] * size[1] * x.shape[1]
    if size[1] * x.shape[1] >= SHORT:
        return view.reshape(-1, width)
    return view.permute(3, 4, 5, 0, 1, 2).reshape(width, -1).mT


def _rows(grad: Tensor) -> Tensor:
    """(n, o, oh, ow) -> (n oh ow, o), in the order of the rows of `columns`."""
    return grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])


def _convolution(x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution of torch."""
    return torch.convolution(x, kernel, bias, stride, padding, (1, 1), False, (0, 0), 1)


def _suited(x: Tensor) -> bool:
    """Whether one client is trained in full precision on a CPU without oneDNN."""
    if x.device.type != "cpu" or x.dim() != 4 or not torch.is_grad_enabled() or torch.backends.mkldnn.enabled:
        return False
    if x.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return False
    # vmap needs batching rules, and function modes (such as `corrected`) need to see the functions of torch
    return not torch._C._are_functorch_transforms_active() and not has_torch_function_unary(x)


class Conv2d(nn.Conv2d):
    """nn.Conv2d with gradients by columns."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve the images."""
        if not _suited(x):
            return super().forward(x)
        return convolve_alone(x, self.weight, self.bias, self.stride, self.padding)  # type: ignore[arg-type]


class AvgPool2d(nn.AvgPool2d):
    """nn.AvgPool2d whose gradient has the memory format of its output."""

    def forward(self, x: Tensor) -> Tensor:
        """Average over windows."""
        return _matched(super().forward(x))


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d whose gradient has the memory format of its output."""

    def forward(self, x: Tensor) -> Any:
        """Maximum over windows."""
        out = super().forward(x)
        return out if self.return_indices else _matched(out)


_POOLS: dict[type[nn.Module], type[nn.Module]] = {nn.AvgPool2d: AvgPool2d, nn.MaxPool2d: MaxPool2d}


def _matched(out: Tensor) -> Tensor:
    """The same images; their gradient gets the same memory format, because mixed formats are slow in torch."""
    if _suited(out) and out.requires_grad and out.is_contiguous(memory_format=LAST):
        out.register_hook(_channels_last)  # type: ignore[no-untyped-call]
    return out


def _channels_last(grad: Tensor) -> Tensor:
    return grad.contiguous(memory_format=LAST)


class _ConvolveAlone(torch.autograd.Function):
    """The convolution. If it is computed as a product, the columns are saved for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
        ctx.stride, ctx.padding = stride, padding
        out, saved = forward(x, kernel, bias, stride, padding)
        ctx.save_for_backward(x, kernel, saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # type: ignore[override]
        x, kernel, saved = ctx.saved_tensors
        need_x, need_kernel, need_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a second derivative needs the graph from x
            saved = None
        where = ctx.stride, ctx.padding
        by_x, by_kernel = backward(grad, x, kernel, saved, *where, need_x=need_x, need_kernel=need_kernel)
        return by_x, by_kernel, grad.sum((0, 2, 3)) if need_bias else None, None, None


def forward(
    x: Tensor, kernel: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
) -> tuple[Tensor, Tensor | None]:
    """The convolution, and the columns if it was computed as a product with them."""
    o, i, kh, kw = kernel.shape
    height, width = (
        (side + 2 * pad - length) // step + 1
        for side, pad, length, step in zip(x.shape[2:], padding, (kh, kw), stride, strict=True)
    )
    if i >= FEW or len(x) * height * width * kh * kw * i > KEPT:
        return _convolution(x, kernel, bias, stride, padding).contiguous(memory_format=LAST), None
    saved = columns(x, (kh, kw), stride, padding)
    flat = kernel.permute(2, 3, 1, 0).reshape(-1, o)
    rows = saved @ flat if bias is None else torch.addmm(bias, saved, flat)
    return rows.view(len(x), height, width, o).permute(0, 3, 1, 2), saved


def backward(
    grad: Tensor,
    x: Tensor,
    kernel: Tensor,
    saved: Tensor | None,
    stride: Pair,
    padding: Pair,
    *,
    need_x: bool,
    need_kernel: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients with respect to the images and the kernel; `saved` are the columns of `forward`."""
    o, i, kh, kw = kernel.shape
    by_kernel = None
    if need_kernel:
        if saved is None and _transforms_pay(grad, x, (kh, kw), stride):
            images = max(1, TILED // max(grad[0].numel(), x[0].numel()))
            parts = zip(torch.split(grad, images), torch.split(x, images), strict=True)
            by_kernel = reduce(torch.add, (_kernel_gradient_by_tiles(*part, (kh, kw), padding) for part in parts))
        else:
            flat = _kernel_gradient(grad, x, (kh, kw), stride, padding) if saved is None else _rows(grad).mT @ saved
            by_kernel = flat.view(o, kh, kw, i).permute(0, 3, 1, 2)
    return _input_gradient(grad, x, kernel, stride, padding) if need_x else None, by_kernel


def _kernel_gradient(grad: Tensor, x: Tensor, size: Pair, stride: Pair, padding: Pair) -> Tensor:
    """The gradient with respect to the kernel, (o, kh kw i), a few images at a time."""
    width = size[0] * size[1] * x.shape[1]
    images = max(1, PIECE // (grad.shape[2] * grad.shape[3] * width))
    total = grad.new_zeros(grad.shape[1], width)
    for g, part in zip(torch.split(grad, images), torch.split(x, images), strict=True):
        total = torch.addmm(total, _rows(g).mT, columns(part, size, stride, padding))
    return total


def _transforms_pay(grad: Tensor, x: Tensor, size: Pair, stride: Pair) -> bool:
    """Whether the gradient by the kernel is faster as a convolution, which NNPACK then computes."""
    if stride != (1, 1) or size[0] * size[1] < LARGE or max(size) > TILE // 2 or x.dtype != torch.float32:
        return False
    tiles = len(grad) * grad.shape[2] * grad.shape[3] // TILE**2
    return x.shape[1] >= FEW and tiles >= MANY and bool(torch.backends.nnpack.is_available())  # type: ignore[no-untyped-call]


def _kernel_gradient_by_tiles(grad: Tensor, x: Tensor, size: Pair, padding: Pair) -> Tensor:
    """The gradient with respect to the kernel, (o, i, kh, kw), as a convolution for stride 1.

    The gradient of the output is cut into tiles so short that a tile with the pixels around it is transformed at once.
    """
    n, o, height, width = grad.shape
    (rows, h), (columns, w) = _tiles(height, size[0]), _tiles(width, size[1])
    down, right = rows * h - height, columns * w - width
    grad = torch.constant_pad_nd(grad, (0, right, 0, down)) if down or right else grad
    x = torch.constant_pad_nd(x, (padding[1], padding[1] + right, padding[0], padding[0] + down))
    tiles = grad.reshape(n, o, rows, h, columns, w).permute(1, 2, 4, 0, 3, 5).reshape(o, -1, h, w)
    high, wide = h + size[0] - 1, w + size[1] - 1
    around = x.unfold(2, high, h).unfold(3, wide, w).permute(1, 2, 3, 0, 4, 5).reshape(x.shape[1], -1, high, wide)
    return _convolution(around, tiles, None, (1, 1), (0, 0)).transpose(0, 1)


def _tiles(side: int, length: int) -> tuple[int, int]:
    """How many tiles a side is cut into, and their size; with a kernel of this length around one it is `TILE` or less.

    >>> _tiles(16, 5), _tiles(8, 5), _tiles(31, 5)
    ((2, 8), (1, 8), (3, 11))
    """
    count = -(-side // (TILE + 1 - length))
    return count, -(-side // count)


def _input_gradient(grad: Tensor, x: Tensor, kernel: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The gradient with respect to the images: for stride 1, a convolution with the flipped kernel."""
    ph, pw = (size - 1 - pad for size, pad in zip(kernel.shape[2:], padding, strict=True))
    if stride == (1, 1) and min(ph, pw) >= 0:
        by_x = _convolution(grad, kernel.flip(2, 3).transpose(0, 1), None, stride, (ph, pw))
        return by_x.contiguous(memory_format=LAST) if x.stride(1) == 1 else by_x
    no, only_x = ((1, 1), False, (0, 0), 1), (True, False, False)
    gradients = torch.ops.aten.convolution_backward(grad, x, kernel, None, stride, padding, *no, only_x)
    return gradients[0]
