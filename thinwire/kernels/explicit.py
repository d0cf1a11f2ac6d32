"""Layers with explicit gradients, for networks that are a chain of layers: no graph is recorded.

    y = layer.forward(x, weights)            keeps what the gradient needs
    gx = layer.backward(gy, weights, grads)  writes the gradients of its weights into `grads`

A layer object serves one thread at a time. Images between layers are (n, height, width, channels), the layout in which
CPU kernels are fastest; a layer may overwrite the output of the layer before it.

>>> layer = Linear("weight", "bias")
>>> weights, grads = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, {}
>>> layer.forward(torch.ones(4, 2), weights).shape, layer.backward(torch.ones(4, 3), weights, grads).shape
(torch.Size([4, 3]), torch.Size([4, 2]))
>>> grads["bias"].tolist()
[4.0, 4.0, 4.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.core.tree import Tree
from thinwire.kernels import conv_cpu
from thinwire.kernels.conv_cpu import Pair
from thinwire.kernels.packed import PackedFirst, PackedNext

_aten: Any = torch.ops.aten
_NONE = torch.empty(0)


class Layer(Protocol):
    """A layer."""

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """The output."""
        ...

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """The gradient with respect to the input, None where no layer before needs one; adds those of its weights."""
        ...


def images(x: Tensor) -> Tensor:
    """(n, h, w, c) -> (n, c, h, w), as torch's functions take images; no copy."""
    return x.permute(0, 3, 1, 2)


def rows(x: Tensor) -> Tensor:
    """(n, c, h, w) -> (n, h, w, c) in this memory order; a copy only where it has another one."""
    return x.permute(0, 2, 3, 1).contiguous()


@dataclass(eq=False)
class Conv2d:
    """Convolution, by oneDNN where it is on, else by `conv_cpu`.

    Args:
        weight, bias: names.
        stride, padding: of the convolution.
        first: whether the inputs are the examples, (n, c, h, w), whose gradient is not needed.
    """

    weight: str
    bias: str | None
    stride: Pair
    padding: Pair
    first: bool
    x: Tensor = _NONE
    kernel: Tensor = _NONE
    saved: Tensor | None = None

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """Convolve the images."""
        self.x = x if self.first else images(x)
        self.kernel, bias = weights[self.weight], weights[self.bias] if self.bias else None
        if torch.backends.mkldnn.enabled:
            self.x, self.kernel = (block.contiguous(memory_format=conv_cpu.LAST) for block in (self.x, self.kernel))
            return rows(torch.conv2d(self.x, self.kernel, bias, self.stride, self.padding))
        out, self.saved = conv_cpu.forward(self.x, self.kernel, bias, self.stride, self.padding)
        return rows(out)

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """Gradients by images, kernel and bias."""
        if self.bias:
            grads[self.bias] = grad.sum((0, 1, 2))
        place: Any = (self.stride, self.padding)
        if torch.backends.mkldnn.enabled:
            how = (None, *place, (1, 1), False, (0, 0), 1, (not self.first, True, False))
            by_x, by_kernel, _ = _aten.convolution_backward(images(grad), self.x, self.kernel, *how)
        else:
            need_x = not self.first
            by_x, by_kernel = conv_cpu.backward(images(grad), self.x, self.kernel, self.saved, *place, need_x=need_x)
        grads[self.weight] = by_kernel.contiguous()
        return None if by_x is None else rows(by_x)


@dataclass(eq=False)
class ConvReluPool:
    """Convolution, ReLU and average pooling of 2 x 2 pixels, packed (`kernels/packed.py`)."""

    weight: str
    bias: str | None
    kernels: PackedFirst | PackedNext

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """Convolve and pool the images."""
        return self.kernels.forward(x, weights[self.weight], weights[self.bias] if self.bias else None)

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """Gradients by images, kernel and bias."""
        by_x, grads[self.weight], by_bias = self.kernels.backward(grad)
        if self.bias:
            grads[self.bias] = by_bias
        return by_x


@dataclass(eq=False)
class ReLU:
    """ReLU, in place."""

    y: Tensor = _NONE

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """max(x, 0)."""
        self.y = x.relu_()
        return self.y

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """The gradient where the output is above zero; overwrites its argument."""
        return _aten.threshold_backward.grad_input(grad, self.y, 0, grad_input=grad)


@dataclass(eq=False)
class Pool:
    """Average or maximum pooling.

    Args:
        most: maximum instead of average.
        place: arguments of torch's function after the images.
    """

    most: bool
    place: tuple
    x: Tensor = _NONE
    where: Tensor = _NONE

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """Pool the images."""
        self.x = images(x)
        if not self.most:
            return rows(_aten.avg_pool2d(self.x, *self.place))
        out, self.where = _aten.max_pool2d_with_indices(self.x, *self.place)
        return rows(out)

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """The gradient of each window at its pixels."""
        if not self.most:
            return rows(_aten.avg_pool2d_backward(images(grad), self.x, *self.place))
        by_x = _aten.max_pool2d_with_indices_backward(images(grad), self.x, *self.place, self.where)
        return rows(by_x)


@dataclass(eq=False)
class Flatten:
    """Examples (n, ...) as rows, without a copy; the order of the values is that in memory."""

    shape: tuple[int, ...] = ()

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """(n, ...) -> (n, values)."""
        self.shape = tuple(x.shape)
        return x.reshape(len(x), -1)

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """(n, values) -> (n, ...)."""
        return grad.view(self.shape)


@dataclass(eq=False)
class Linear:
    """A linear layer.

    Args:
        weight, bias: names.
        channels: if above 0, the inputs are flattened images (h, w, channels), while the weight is for (channels, h,
            w), as torch flattens them.
        first: whether no gradient with respect to the inputs is needed.
    """

    weight: str
    bias: str | None
    channels: int = 0
    first: bool = False
    x: Tensor = _NONE
    matrix: Tensor = _NONE

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """x W^T + b."""
        self.x, self.matrix = x, weights[self.weight]
        if self.channels:
            self.matrix = self._swapped(self.matrix, self.channels)
        return torch.addmm(weights[self.bias], x, self.matrix.mT) if self.bias else x @ self.matrix.mT

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """Gradients by inputs, weight and bias."""
        by_weight = grad.mT @ self.x
        grads[self.weight] = (
            self._swapped(by_weight, by_weight.shape[1] // self.channels) if self.channels else by_weight
        )
        if self.bias:
            grads[self.bias] = grad.sum(0)
        return None if self.first else grad @ self.matrix

    @staticmethod
    def _swapped(matrix: Tensor, count: int) -> Tensor:
        """The columns (count, rest) of a matrix in the order (rest, count)."""
        return matrix.reshape(len(matrix), count, -1).transpose(1, 2).reshape(matrix.shape)
