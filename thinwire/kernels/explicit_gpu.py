"""Layers with explicit gradients for many clients at once on a GPU, for networks that are a chain of layers.

    y = layer.forward(x, weights)            keeps what the gradient needs
    gx = layer.backward(gy, weights, grads)  writes the gradients of its weights into `grads`

Weights and gradients are trees of float32 blocks with a client axis. Kernels of convolutions may have their channels
last in memory, which saves copies. Images between layers are (c, n, height, width, channels). Products are computed in
the type that the layer is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.core.tree import Tree
from thinwire.kernels.conv_cpu import Pair

_NONE = torch.empty(0)


def _kernels() -> tuple[Any, Any]:
    from thinwire.kernels import chain_triton, conv_triton

    return conv_triton, chain_triton


@dataclass(eq=False)
class ConvReluPool:
    """Convolution, ReLU and average pooling over adjacent windows.

    Args:
        weight, bias: names; no bias if None.
        stride, padding: of the convolution.
        window: of the pooling.
        kind: type of the products.
        first: whether the inputs are the examples, (c, n, channels, height, width), whose gradient is not needed. They
            may have one more channel than the kernel, which is one everywhere: then a pixel of three colors is loaded
            at once, and the gradient of that channel is the one of the bias.
        last: whether the result is flattened, channels first.
    """

    weight: str
    bias: str | None
    stride: Pair
    padding: Pair
    window: Pair
    kind: torch.dtype
    first: bool
    last: bool
    x: Tensor = _NONE
    y: Tensor = _NONE
    kernel: Tensor = _NONE

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """Convolve and pool the images."""
        conv, others = _kernels()
        self.x = x if self.first else x.permute(0, 1, 4, 2, 3)
        self.kernel = self._last(weights[self.weight])
        bias = weights[self.bias] if self.bias else None
        made = conv.forward(self.x, self.kernel, bias, self.stride, self.padding, relu=True)
        self.y = made.permute(0, 1, 3, 4, 2)
        out: Tensor = others.average(self.y, self.window, self.last)
        return out.flatten(2) if self.last else out

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """Gradients by images, kernel and bias."""
        conv, others = _kernels()
        grad = others.spread(grad.contiguous(), self.y, self.window, self.last)
        by_kernel, by_bias = grads[self.weight], grads[self.bias] if self.bias else None
        size, place = tuple(by_kernel.shape[-2:]), (self.stride, self.padding)
        more = self.x.shape[2] > by_kernel.shape[2]
        rows = None if more else _rows(by_kernel)
        partial = conv.kernel_gradient_parts(grad, self.x, size, *place, by_bias is not None and not more, rows)
        inner, taps = self.x.shape[2], size[0] * size[1]
        column = taps * inner if partial.shape[-1] > taps * inner else -1
        if more:  # the tap that is inside the image for every pixel of the result
            column = (self.padding[0] * size[1] + self.padding[1]) * inner + inner - 1
        if partial is rows:
            column = -1
        else:
            others.sum_parts(partial, by_kernel, by_bias, column)
        if by_bias is not None and column < 0:
            conv.sum_rows(grad.flatten(1, 3), by_bias)
        if self.first:
            return None
        by_x = conv.input_gradient(grad.permute(0, 1, 4, 2, 3), self.kernel, tuple(self.x.shape[-2:]), *place)
        return by_x.permute(0, 1, 3, 4, 2)

    def channels(self, kernel: Tensor) -> int:
        """The channels that pixels of images are to have for this kernel (c, o, i, kh, kw); 0 for those that they have.

        Three colors and a one are 8 or 16 bytes, which a GPU loads at once.
        """
        i, *size = kernel.shape[2:]
        inside = all(2 * padding < length for padding, length in zip(self.padding, size, strict=True))
        return 4 if self.first and i == 3 and inside else 0

    def _last(self, kernel: Tensor) -> Tensor:
        """A copy of the kernel with its channels last in memory; those that only the images have are zero."""
        view, missing = kernel.permute(0, 1, 3, 4, 2), self.x.shape[2] - kernel.shape[2]
        made = torch.zeros if missing else torch.empty
        out = made((*view.shape[:4], self.x.shape[2]), dtype=self.kind, device=view.device)
        out[..., : view.shape[4]].copy_(view)
        return out.permute(0, 1, 4, 2, 3)


def _rows(kernel: Tensor) -> Tensor | None:
    """The memory of each client's kernel as a row (c, o kh kw i); None if channels are not last."""
    c, o, i, kh, kw = kernel.shape
    if kernel.stride()[1:] != (kh * kw * i, 1, kw * i, i):
        return None
    return kernel.as_strided((c, o * kh * kw * i), (kernel.stride(0), 1))


@dataclass(eq=False)
class Linear:
    """A linear layer, with ReLU unless it is the last one, whose bias is added by the loss.

    Args:
        weight, bias: names; no bias if None.
        kind: type of the products.
        first: whether no gradient with respect to the inputs is needed.
        last: whether it is the last layer.
    """

    weight: str
    bias: str | None
    kind: torch.dtype
    first: bool
    last: bool
    x: Tensor = _NONE
    y: Tensor = _NONE
    matrix: Tensor = _NONE

    def forward(self, x: Tensor, weights: Tree) -> Tensor:
        """max(x W^T + b, 0); x W^T in the last layer."""
        self.x, self.matrix = x, weights[self.weight].to(self.kind)
        if self.last or not self.bias:
            y = torch.bmm(x, self.matrix.mT)
        else:
            y = torch.baddbmm(weights[self.bias].to(self.kind)[:, None], x, self.matrix.mT)
        self.y = y if self.last else y.relu_()
        return self.y

    def backward(self, grad: Tensor, weights: Tree, grads: Tree) -> Tensor | None:
        """Gradients by inputs, weight and bias; that of the last layer's bias is the loss's."""
        if not self.last:
            grad = torch.ops.aten.threshold_backward(grad, self.y, 0)
            if self.bias:
                torch.sum(grad, 1, dtype=torch.float32, out=grads[self.bias])
        grads[self.weight].copy_(torch.bmm(grad.mT, self.x))
        return None if self.first else torch.bmm(grad, self.matrix)
