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
    >>> packed.expand(torch.tensor([[[[1.0, 2.0, 3.0]]]])).T.tolist()  # pixels -2 to 3, for the outputs 0 and 1
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
    def _sources(self) -> Tensor:
        """For each place of the packed kernel the value of the kernel; the one after the last is zero."""
        count = prod(self.shape)
        index = torch.full((prod(self.window) * prod(self.block) ** 2 * self.shape[0] * self.shape[1],), count)
        index[self._places] = torch.arange(count)
        return index

    def expand(self, kernel: Tensor) -> Tensor:
        """The packed kernel: (patch, outputs) for columns, else (outputs, inputs, height, width), channels last."""
        flat = torch.cat((kernel.reshape(-1), kernel.new_zeros(1))).index_select(0, self._sources)
        outputs = prod(self.block) * self.shape[0]
        if self.columns:
            return flat.view(-1, outputs)
        return flat.view(outputs, *self.window, -1).permute(0, 3, 1, 2)

    def reduce(self, grad: Tensor) -> Tensor:
        """The gradient with respect to the given kernel from that with respect to the packed one."""
        flat = (grad if self.columns else grad.permute(0, 2, 3, 1)).reshape(-1)
        each = flat.index_select(0, self._places.view(-1)).view(self._places.shape)
        return each.sum(0).view(self.shape)


class _ReluPool:
    """ReLU and average pooling of rows (n, 4 o), each with the four pixels of a window."""

    def __init__(self, outputs: int) -> None:
        self.mean = torch.eye(outputs).repeat(4, 1) / 4
        self.rows = torch.empty(0)

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
        shape: of the kernel.
        order: the pooled images have rows (n, height / a, width / b, a, b): packed for a next layer with blocks (a, b).
    """

    def __init__(self, shape: tuple[int, int, int, int], order: Pair) -> None:
        self.kernel, self.order, self.pool = PackedKernel(shape, (2, 2), columns=True), order, _ReluPool(shape[0])
        self.size: tuple[int, ...] = ()
        self.blocks = self.patches = self.rows = torch.empty(0)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def _allocate(self, size: tuple[int, ...]) -> None:
        """Memory for images of this size, and views of it."""
        (n, i, h, w), (a, b), (down, right) = size, self.order, self.kernel.reach
        self.size, h, w = size, h // 2, w // 2
        self.blocks = torch.zeros(n, h + 2 * down, w + 2 * right, 4 * i)
        mh, mw = self.kernel.window
        self.patches = torch.empty(n, h // a, w // b, a, b, mh, mw * 4 * i)
        self.rows = torch.empty(n * h * w, 4 * self.kernel.shape[0])
        image, line, place, _ = self.blocks.stride()
        self.copies = [
            (
                self.patches[:, :, :, y, x, m],
                self.blocks.as_strided(
                    (n, h // a, w // b, mw * 4 * i), (image, a * line, b * place, 1), (y + m) * line + x * place
                ),
            )
            for y in range(a)
            for x in range(b)
            for m in range(mh)
        ]

    def forward(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """(n, i, h, w) -> (n, h / 2, w / 2, o) in the order of `order`."""
        if self.size != images.shape:
            self._allocate(tuple(images.shape))
        n, i, h, w = images.shape
        (down, right), (rows, places) = self.kernel.reach, self.blocks.shape[1:3]
        inner = self.blocks[:, down : rows - down, right : places - right].unflatten(-1, (2, 2, i))
        for y in range(2):
            for x in range(2):
                inner[..., y, x, :].copy_(images[:, :, y::2, x::2].movedim(1, -1))
        for target, source in self.copies:
            target.copy_(source)
        patches, packed = self.patches.view(len(self.rows), -1), self.kernel.expand(kernel)
        if bias is None:
            torch.mm(patches, packed, out=self.rows)
        else:
            torch.addmm(bias.repeat(4), patches, packed, out=self.rows)
        return self.pool.forward(self.rows).view(n, h // 2, w // 2, -1)

    def backward(self, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        """The gradients with respect to kernel and bias; none with respect to the images."""
        rows = self.pool.backward(grad.reshape(len(self.rows), -1))
        by_kernel = self.patches.view(len(rows), -1).mT @ rows
        return None, self.kernel.reduce(by_kernel), rows.sum(0).view(4, -1).sum(0)


class PackedNext:
    """Convolution, ReLU and pooling of images packed in blocks of 2 x 1 pixels, by oneDNN.

    Args:
        shape: of the kernel.
    """

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self.kernel, self.pool = PackedKernel(shape, (2, 1), columns=False), _ReluPool(shape[0])
        self.images = self.packed = torch.empty(0)

    def forward(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        """(n, h, w, i) with rows (n, h / 2, w, 2, 1) -> (n, h / 2, w / 2, o)."""
        n, h, w, _ = images.shape
        self.images = images.view(n, h // 2, w, -1).permute(0, 3, 1, 2)
        self.packed = self.kernel.expand(kernel)
        twice = None if bias is None else bias.repeat(2)
        out = torch.conv2d(self.images, self.packed, twice, 1, self.kernel.reach)
        rows = out.permute(0, 2, 3, 1).reshape(n * (h // 2) * (w // 2), -1)
        return self.pool.forward(rows).view(n, h // 2, w // 2, -1)

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients with respect to images, kernel and bias."""
        n, channels, h, w = self.images.shape
        rows = self.pool.backward(grad.reshape(-1, grad.shape[-1]))
        out = rows.view(n, h, w, -1).permute(0, 3, 1, 2)
        by_images, by_kernel, _ = torch.ops.aten.convolution_backward(
            *(out, self.images, self.packed, None, (1, 1), self.kernel.reach, (1, 1), False, (0, 0), 1),
            (True, True, False),
        )
        images = by_images.permute(0, 2, 3, 1).reshape(n, 2 * h, w, channels // 2)
        return images, self.kernel.reduce(by_kernel), rows.sum(0).view(4, -1).sum(0)
