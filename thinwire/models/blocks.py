"""Building blocks of residual networks: normalization layers, convolutions and the basic block.

Paper: He et al., Deep Residual Learning for Image Recognition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from thinwire.models.checks import one_of

Norm: TypeAlias = Callable[[int], nn.Module]  # makes a normalization layer for that many channels


def norm_layer(kind: str, *, groups: int = 8, affine: bool = True) -> Norm:
    """What makes normalization layers: batch norm ("bn"), group norm ("gn") or identity ("none").

    >>> norm_layer("gn")(16).num_groups
    8
    """
    one_of(("bn", "gn", "none"), norm=kind)
    if kind == "bn":
        return partial(nn.BatchNorm2d, affine=affine)
    return partial(nn.GroupNorm, groups, affine=affine) if kind == "gn" else nn.Identity


def conv3x3(fan: int, width: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution with padding 1, without bias, because a normalization follows."""
    return nn.Conv2d(fan, width, 3, stride=stride, padding=1, bias=False)


def conv1x1(fan: int, width: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution without bias, for shortcuts that change the shape."""
    return nn.Conv2d(fan, width, 1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    """The basic residual block: two convolutions, each followed by a normalization, plus a shortcut.

        y = relu( N2(conv2(dropout(relu(N1(conv1(x)))))) + shortcut(x) ),   shortcut = identity or N3(conv1x1)

    Args:
        fan: input channels.
        width: output channels.
        stride: of the first convolution and of the shortcut.
        project: whether the shortcut has a convolution; required if the shape changes.
        norm: makes normalization layers (`norm_layer`).
        dropout: dropout probability between the convolutions.
        zero_gamma: start the scale of the second normalization at 0, so that the block is its shortcut (Goyal et al.).

    Not `PreBlock`, which normalizes before each convolution.

    >>> import torch
    >>> BasicBlock(16, 32, stride=2, project=True)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    def __init__(
        self,
        fan: int,
        width: int,
        *,
        stride: int = 1,
        project: bool = False,
        norm: Norm = nn.BatchNorm2d,
        dropout: float = 0.0,
        zero_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(fan, width, stride)
        self.norm1 = norm(width)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(width, width)
        self.norm2 = norm(width)
        if zero_gamma:
            nn.init.zeros_(self.norm2.get_parameter("weight"))
        self.shortcut = nn.Sequential(conv1x1(fan, width, stride), norm(width)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        y = self.dropout(self.relu(self.norm1(self.conv1(x))))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
