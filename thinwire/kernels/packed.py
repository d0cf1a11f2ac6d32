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
        joined: whether the packed kernel is a matrix (outputs, patch and bias), for patches that end with a one, or
            four-dimensional with a bias beside it, as `torch.conv2d` takes them.

    >>> packed = PackedKernel((1, 1, 1, 3), (1, 2), joined=True)
    >>> packed.expand(torch.tensor([[[[1.0, 2.0, 3.0]]]]))[0].tolist()  # pixels -2 to 3 and bias, for the outputs 0, 1
    [[0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0]]
    """

    shape: tuple[int, int, int, int]
    block: Pair
    joined: bool

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
    def patch(self) -> int:
        """Values that a block of outputs depends on."""
        return prod(self.window) * prod(self.block) * self.shape[1]

    @cached_property
    def _maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index of packed values in (kernel, bias, zero), its inverse (a b, kernel and bias), and the zero."""
        (o, i, kh, kw), (a, b), mw = self.shape, self.block, self.window[1]
        axes = np.ogrid[:a, :b, :o, :i, :kh, :kw]
        q1, q2, out, channel = axes[:4]
        down, right = axes[4] - kh // 2 + q1, axes[5] - kw // 2 + q2
        m1, p1, m2, p2 = down // a + self.reach[0], down % a, right // b + self.reach[1], right % b
        patch = (((m1 * mw + m2) * a + p1) * b + p2) * i + channel
        output = (q1 * b + q2) * o + out
        width, values = self.patch + self.joined, prod(self.shape) + o  # of kernel and bias
        outputs = np.arange(a * b * o).reshape(a * b, o)
        places = (
            np.broadcast_to(output * width + patch, (a, b, o, i, kh, kw)).reshape(a * b, -1),
            outputs * width + self.patch if self.joined else outputs + outputs.size * width,
        )
        found = torch.from_numpy(np.concatenate(places, 1))
        sources = torch.full((outputs.size * (self.patch + 1),), values)
        sources[found] = torch.arange(values)
        return sources, found, torch.zeros(1)

    def expand(self, kernel: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The packed kernel and bias: a matrix and nothing, or (outputs, inputs, height, width) in channels last."""
        sources, _, zero = self._maps
        outputs, given = prod(self.block) * self.shape[0], zero.expand(self.shape[0]) if bias is None else bias
        flat = torch.cat((kernel.reshape(-1), given, zero)).index_select(0, sources)
        if self.joined:
            return flat.view(outputs, -1), flat[:0]
        packed, several = torch.split_with_sizes(flat, (len(sources) - outputs, outputs))
        return packed.view(outputs, *self.window, -1).permute(0, 3, 1, 2), several

    def reduce(self, by_kernel: Tensor, by_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradients with respect to kernel and bias from those with respect to the packed ones."""
        _, places, _ = self._maps
        flat = by_kernel.reshape(-1) if self.joined else by_kernel.permute(0, 2, 3, 1).reshape(-1)
        flat = flat if by_bias is None else torch.cat((flat, by_bias))
        each = flat.index_select(0, places.view(-1)).view(places.shape)
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
        return torch.ops.aten.threshold_backward.grad_input(by_rows, self.rows, 0, grad_input=by_rows)


class PackedFirst:
    """Convolution, ReLU and pooling of input images, as one matrix product with patches of blocks of 2 x 2 pixels.

    The patches have the examples of a batch as their last axis, so that one call copies all of them, in whole rows.

    Args:
        kernel: shape of the kernel.
        size: of the images, (n, channels, height, width); height and width are even.
        order: the pooled images have rows (n, height / a, width / b, a, b): packed for a next layer with blocks (a, b).
    """

    def __init__(self, kernel: tuple[int, int, int, int], size: tuple[int, int, int, int], order: Pair) -> None:
        self.kernel, self.pool = PackedKernel(kernel, (2, 2), joined=True), _ReluPool(kernel[0])
        self.size, (n, i, h, w) = size, size
        self.pixels = torch.zeros(i * h * w + 2, n)  # with a row of zeros and one of ones
        self.pixels[-1] = 1
        self.index = torch.from_numpy(self._sources(order).reshape(-1))
        self.patches = torch.empty(len(self.index), n)
        self.rows = torch.empty(h // 2 * (w // 2) * n, 4 * kernel[0])

    def _sources(self, order: Pair) -> np.ndarray:
        """(patch and bias, pooled pixels): rows of `pixels`."""
        (_, i, h, w), (a, b), (mh, mw) = self.size, order, self.kernel.window
        axes = np.ogrid[:mh, :mw, :2, :2, :i, : h // 2 // a, : w // 2 // b, :a, :b]
        m1, m2, p1, p2, channel, high, wide, q1, q2 = axes
        y = 2 * (high * a + q1 + m1 - self.kernel.reach[0]) + p1
        x = 2 * (wide * b + q2 + m2 - self.kernel.reach[1]) + p2
        inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
        rows = np.where(inside, (channel * h + y) * w + x, i * h * w).reshape(self.kernel.patch, -1)
        return np.concatenate((rows, np.full((1, rows.shape[1]), i * h * w + 1)))

    def forward(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """(n, i, h, w) -> (n, h / 2, w / 2, o) in the order of `order`."""
        n, _, h, w = self.size
        self.pixels[:-2].copy_(images.reshape(n, -1).mT)
        torch.index_select(self.pixels, 0, self.index, out=self.patches)
        packed, _ = self.kernel.expand(kernel, bias)
        torch.mm(self.patches.view(packed.shape[1], -1).mT, packed.mT, out=self.rows)
        pooled = self.pool.forward(self.rows).view(-1, n, len(kernel))
        return pooled.transpose(0, 1).contiguous().view(n, h // 2, w // 2, -1)

    def backward(self, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        """The gradients with respect to kernel and bias; none with respect to the images."""
        n, outputs = self.size[0], grad.shape[-1]
        turned = grad.reshape(n, -1, outputs).transpose(0, 1).reshape(-1, outputs)
        rows = self.pool.backward(turned)
        return None, *self.kernel.reduce((self.patches.view(-1, len(rows)) @ rows).mT)


class PackedNext:
    """Convolution, ReLU and pooling of images packed in blocks of 2 x 1 pixels, by oneDNN.

    Args:
        kernel: shape of the kernel.
    """

    def __init__(self, kernel: tuple[int, int, int, int]) -> None:
        self.kernel, self.pool = PackedKernel(kernel, (2, 1), joined=False), _ReluPool(kernel[0])
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
