"""Building blocks of residual networks: normalization layers, convolutions and the basic block.

Paper: He et al., Deep Residual Learning for Image Recognition.
"""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.models.checks import one_of


def norm_layer(kind: str, channels: int, *, groups: int = 8, affine: bool = True) -> nn.Module:
    """A normalization layer: batch norm ("bn"), group norm ("gn") or identity ("none").

    >>> norm_layer("gn", 16).num_groups
    8
    """
    one_of(("bn", "gn", "none"), norm=kind)
    if kind == "bn":
        return nn.BatchNorm2d(channels, affine=affine)
    if kind == "gn":
        return nn.GroupNorm(groups, channels, affine=affine)
    return nn.Identity()


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
        norm: the kind of `norm_layer`.
        groups: groups of "gn".
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
        norm: str = "bn",
        groups: int = 8,
        dropout: float = 0.0,
        zero_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(fan, width, stride)
        self.norm1 = norm_layer(norm, width, groups=groups)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(width, width)
        self.norm2 = norm_layer(norm, width, groups=groups)
        if zero_gamma:
            nn.init.zeros_(self.norm2.get_parameter("weight"))
        if project:
            self.shortcut: nn.Module = nn.Sequential(
                conv1x1(fan, width, stride), norm_layer(norm, width, groups=groups)
            )
        else:
            self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        y = self.dropout(self.relu(self.norm1(self.conv1(x))))
        out: Tensor = self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
        return out
