"""Convolutions of images with few channels on a CPU: neighboring pixels are packed into channels.

Vector units compute 8 or 16 channels at a time, so with fewer channels most of their work is wasted. A convolution of
stride 1 that keeps the size of the images is also one over blocks of a x b pixels, which have a b times as many
channels; its kernel repeats the given one, with zeros between:

    out[block, (q, o)] = sum over m, p, i of kernel[o, i, a (m - R) + p - q + r] x[block + m, (p, i)]

for one axis: p and q are positions in a block, r = (size - 1) / 2 and R = ceil(r / a). The results differ from those of
`torch.conv2d` by rounding only. Both classes below are a convolution, a ReLU and average pooling of 2 x 2 pixels; they
keep what their gradient needs in memory that is used again in the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.conv_cpu import Pair

WASTE = 1.5  # the most products with zeros, relative to the convolution


@dataclass(frozen=True, eq=False)
class PackedKernel:
    """The kernel of a convolution over blocks of pixels.

    Args:
        shape: of the given kernel: outputs, inputs, height, width; the last two are odd.
        block: height and width of a block of pixels.
        columns: the memory order of the kernel over blocks: (m, p, i, q, o), or (q, o, m, p, i).

    >>> packed = PackedKernel((1, 1, 1, 3), (1, 2), columns=True)
    >>> packed.expand(torch.tensor([[[[1.0, 2.0, 3.0]]]]))[0].T.tolist()  # pixels -2 to 3, for the outputs 0 and 1
    [[0.0, 1.0, 2.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0, 3.0, 0.0]]
    """

    shape: tuple[int, int, int, int]
    block: Pair
    columns: bool

    @cached_property
    def reach(self) -> Pair:
        """R: how many blocks away from its own a block of outputs depends on."""
        down, right = (-(-(size // 2) // step) for size, step in zip(self.shape[2:], self.block, strict=True))
        return down, right

    @cached_property
    def window(self) -> Pair:
        """Blocks that a block of outputs depends on."""
        return 2 * self.reach[0] + 1, 2 * self.reach[1] + 1

    @cached_property
    def waste(self) -> float:
        """Products that are computed, relative to those of the convolution."""
        return prod(self.window) * prod(self.block) / prod(self.shape[2:])

    @cached_property
    def _places(self) -> Tensor:
        """(a b, values of the kernel): where each value stands in the packed kernel."""
        (o, i, kh, kw), (a, b), (mh, mw) = self.shape, self.block, self.window
        axes = np.ogrid[:a, :b, :o, :i, :kh, :kw]
        q1, q2, out, channel = axes[:4]
        down, right = axes[4] - kh // 2 + q1, axes[5] - kw // 2 + q2
        m1, p1, m2, p2 = down // a + self.reach[0], down % a, right // b + self.reach[1], right % b
        patch = (((m1 * mw + m2) * a + p1) * b + p2) * i + channel
        output = (q1 * b + q2) * o + out
        place = patch * (a * b * o) + output if self.columns else output * (mh * mw * a * b * i) + patch
        return torch.from_numpy(np.broadcast_to(place, (a, b, o, i, kh, kw)).reshape(a * b, -1).copy())

    @cached_property
    def _maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index of packed values in (kernel, bias, zero), its inverse (a b, kernel and bias), and the zero."""
        kernel, bias, times = prod(self.shape), self.shape[0], prod(self.block)
        size = prod(self.window) * times**2 * bias * self.shape[1]
        sources = torch.full((size + times * bias,), kernel + bias)
        sources[self._places] = torch.arange(kernel)
        sources[size:] = torch.arange(kernel, kernel + bias).repeat(times)
        places = torch.cat((self._places, torch.arange(size, size + times * bias).view(times, bias)), 1)
        return sources, places, torch.zeros(1)

    def expand(self, kernel: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The packed kernel, (patch, outputs) or (outputs, inputs, height, width) in channels last, and packed bias."""
        sources, _, zero = self._maps
        outputs, given = prod(self.block) * self.shape[0], zero.expand(self.shape[0]) if bias is None else bias
        flat = torch.cat((kernel.reshape(-1), given, zero)).index_select(0, sources)
        packed, twice = torch.split_with_sizes(flat, (len(sources) - outputs, outputs))
        if self.columns:
            return packed.view(-1, outputs), twice
        return packed.view(outputs, *self.window, -1).permute(0, 3, 1, 2), twice

    def reduce(self, by_kernel: Tensor, by_bias: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to kernel and bias from those with respect to the packed ones."""
        _, places, _ = self._maps
        flat = (by_kernel if self.columns else by_kernel.permute(0, 2, 3, 1)).reshape(-1)
        each = torch.cat((flat, by_bias)).index_select(0, places.view(-1)).view(places.shape)
        kernel, bias = torch.split_with_sizes(each.sum(0), (prod(self.shape), self.shape[0]))
        return kernel.view(self.shape), bias


class _ReluPool:
    """ReLU and average pooling of rows (n, 4 o), each with the four pixels of a window."""

    def __init__(self, outputs: int) -> None:
        self.mean, self.rows = torch.eye(outputs).repeat(4, 1) / 4, torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        """(n, 4 o) -> (n, o); overwrites its argument."""
        self.rows = rows.relu_()
        return self.rows @ self.mean

    def backward(self, grad: Tensor) -> Tensor:
        """(n, o) -> (n, 4 o)."""
        by_rows = grad @ self.mean.mT
        return torch.ops.aten.threshold_backward.grad_input(by_rows, self.rows, 0, grad_input=by_rows)  # type: ignore[no-any-return]


class PackedFirst:
    """Convolution, ReLU and pooling of input images, as one matrix product with patches of blocks of 2 x 2 pixels.

    Args:
        kernel: shape of the kernel.
        size: of the images, (n, channels, height, width); height and width are even.
        order: the pooled images have rows (n, height / a, width / b, a, b): packed for a next layer with blocks (a, b).
    """

    def __init__(self, kernel: tuple[int, int, int, int], size: tuple[int, int, int, int], order: Pair) -> None:
        self.kernel, self.pool = PackedKernel(kernel, (2, 2), columns=True), _ReluPool(kernel[0])
        (n, i, h, w), (a, b), (mh, mw) = size, order, self.kernel.window
        self.size, h, w, width = size, h // 2, w // 2, mw * 4 * i
        blocks = torch.zeros(n, h + mh - 1, w + mw - 1, 4 * i)  # with a border of zeros
        patches = torch.empty(n, h // a, w // b, a, b, mh, width)
        self.rows, self.patches = torch.empty(n * h * w, 4 * kernel[0]), patches.view(n * h * w, -1)
        image, line, place, _ = blocks.stride()
        down, right = self.kernel.reach
        self.pixels = [
            (
                y,
                x,
                blocks.as_strided((n, h, w, i), (image, line, place, 1), down * line + right * place + (2 * y + x) * i),
            )
            for y in range(2)
            for x in range(2)
        ]
        shape, strides = (n, h // a, w // b, width), (image, a * line, b * place, 1)
        self.copies = [
            (patches[:, :, :, y, x, m], blocks.as_strided(shape, strides, (y + m) * line + x * place))
            for y in range(a)
            for x in range(b)
            for m in range(mh)
        ]

    def forward(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """(n, i, h, w) -> (n, h / 2, w / 2, o) in the order of `order`."""
        n, i, h, w = self.size
        shape, strides = (n, h // 2, w // 2, i), (i * h * w, 2 * w, 2, h * w)
        images = images.contiguous()
        for y, x, target in self.pixels:
            target.copy_(images.as_strided(shape, strides, images.storage_offset() + y * w + x))
        for target, source in self.copies:
            target.copy_(source)
        packed, four = self.kernel.expand(kernel, bias)
        torch.addmm(four, self.patches, packed, out=self.rows)
        return self.pool.forward(self.rows).view(n, h // 2, w // 2, -1)

    def backward(self, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        """The gradients with respect to kernel and bias; none with respect to the images."""
        rows = self.pool.backward(grad.view(len(self.rows), -1))
        return None, *self.kernel.reduce(self.patches.mT @ rows, rows.sum(0))


class PackedNext:
    """Convolution, ReLU and pooling of images packed in blocks of 2 x 1 pixels, by oneDNN.

    Args:
        kernel: shape of the kernel.
    """

    def __init__(self, kernel: tuple[int, int, int, int]) -> None:
        self.kernel, self.pool = PackedKernel(kernel, (2, 1), columns=False), _ReluPool(kernel[0])
        self.images = self.packed = torch.empty(0)

    def forward(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """(n, h, w, i) with rows (n, h / 2, w, 2, 1) -> (n, h / 2, w / 2, o)."""
        n, h, w, _ = images.shape
        self.images = images.view(n, h // 2, w, -1).permute(0, 3, 1, 2)
        self.packed, twice = self.kernel.expand(kernel, bias)
        out = torch.conv2d(self.images, self.packed, twice, 1, self.kernel.reach)
        rows = out.permute(0, 2, 3, 1).reshape(n * (h // 2) * (w // 2), -1)
        return self.pool.forward(rows).view(n, h // 2, w // 2, -1)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients with respect to images, kernel and bias."""
        n, channels, h, w = self.images.shape
        rows = self.pool.backward(grad.view(-1, grad.shape[-1]))
        by_images, by_kernel, _ = torch.ops.aten.convolution_backward(
            *(rows.view(n, h, w, -1).permute(0, 3, 1, 2), self.images, self.packed, None),
            *((1, 1), self.kernel.reach, (1, 1), False, (0, 0), 1, (True, True, False)),
        )
        by_rows = rows.sum(0).view(2, -1).sum(0)  # of both columns of a window
        images = by_images.permute(0, 2, 3, 1).reshape(n, 2 * h, w, channels // 2)
        return images, *self.kernel.reduce(by_kernel, by_rows)
