"""Wide residual networks.

Papers: Zagoruyko and Komodakis; MAPO (16 layers, CIFAR-100 and TinyImageNet); FedLAMA (28 layers, CIFAR-100).
"""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.blocks import Norm, conv1x1, conv3x3, norm_layer
from thinwire.models.checks import at_least, check_images, divides, one_of, probability
from thinwire.models.resnet import ResNet


class PreBlock(nn.Module):
    """The pre-activation residual block: two convolutions, each preceded by a normalization, plus a shortcut.

        a = relu(N1(x));   y = conv2(dropout(relu(N2(conv1(a))))) + s,   s = x, or conv1x1(a) if `project`

    Not `BasicBlock`, which normalizes after each convolution and ends with a ReLU. The arguments are the same.

    >>> import torch
    >>> PreBlock(16, 32, stride=2, project=True)(torch.zeros(1, 16, 8, 8)).shape
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
    ) -> None:
        super().__init__()
        self.norm1 = norm(fan)
        self.relu = nn.ReLU()
        self.conv1 = conv3x3(fan, width, stride)
        self.norm2 = norm(width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(width, width)
        self.shortcut = conv1x1(fan, width, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        a = self.relu(self.norm1(x))
        y = self.conv2(self.dropout(self.relu(self.norm2(self.conv1(a)))))
        return y + (x if self.shortcut is None else self.shortcut(a))


class WideResNet(nn.Module):
    """A pre-activation residual network of three stages with `width` times the channels of a ResNet.

        Conv3x3(3 -> 16) -> (depth - 4) / 6 blocks each of 16, 32, 64 times `width` channels
        -> N -> ReLU -> mean over the image -> Linear

    Args:
        depth: number of layers, 4 more than a multiple of 6.
        width: multiplier of the channels.
        classes: number of classes.
        channels: channels of the images.
        norm: "bn", "gn" or "none".
        groups: groups of "gn".
        affine: whether the normalization has a trained scale and shift.
        project: "change" for a convolution on the shortcut if the shape changes, "always" for one in each block.
        dropout: dropout probability inside the blocks.

    >>> import torch
    >>> WideResNet(10, 1, 5)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """

    def __init__(
        self,
        depth: int,
        width: int,
        classes: int,
        *,
        channels: int = 3,
        norm: str = "bn",
        groups: int = 8,
        affine: bool = True,
        project: str = "change",
        dropout: float = 0.0,
    ) -> None:
        at_least(2, classes=classes)
        at_least(1, channels=channels, width=width, groups=groups)
        one_of(("change", "always"), project=project)
        probability(dropout=dropout)
        widths = (16 * width, 32 * width, 64 * width)
        if norm == "gn":
            divides(groups, (16, *widths))
        super().__init__()
        self.channels = channels
        self.conv = conv3x3(channels, 16)
        make = norm_layer(norm, groups=groups, affine=affine)
        blocks: list[nn.Module] = []
        fan = 16
        for stage, out in enumerate(widths):
            for i in range(blocks_per_stage(depth)):
                stride = 2 if stage and not i else 1
                bypass = project == "always" or stride > 1 or fan != out
                blocks.append(PreBlock(fan, out, stride=stride, project=bypass, norm=make, dropout=dropout))
                fan = out
        self.blocks = nn.Sequential(*blocks)
        self.norm = make(fan)
        self.relu = nn.ReLU()
        self.head = nn.Linear(fan, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of images of any size."""
        check_images(x, self.channels)
        y = self.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(y.mean((2, 3)))


def blocks_per_stage(depth: int) -> int:
    """The number of blocks of two layers in each of the three stages.

    >>> blocks_per_stage(16), blocks_per_stage(28)
    (2, 4)
    """
    at_least(10, depth=depth)
    if (depth - 4) % 6:
        raise ConfigError(f"depth = {depth}: expected 4 more than a multiple of 6 (10, 16, 22, 28, ...)")
    return (depth - 4) // 6


@register("model", "wrn16-4", doc="Wide residual network of 16 layers, for CIFAR-100 and TinyImageNet.", paper="MAPO")
def wrn16_4(classes: int = 100, channels: int = 3, norm: str = "gn", groups: int = 8) -> WideResNet:
    """WRN-16-4 with the count of MAPO: 2,854,420 parameters for 100 classes, 2,880,120 for 200.

    Each block has a 1x1 convolution on its shortcut, and normalization has no parameters: only this matches the
    reported count. Not the original network (affine normalization, shortcut convolutions only if the shape changes),
    which has 2,772,020 parameters for 100 classes.

    Args:
        classes: number of classes.
        channels: channels of the images.
        norm: "gn", which has no running statistics and supports any batch size; "bn_noaffine"; or "none".
        groups: groups of "gn".
    """
    one_of(("gn", "bn_noaffine", "none"), norm=norm)
    kind = norm.removesuffix("_noaffine")
    return WideResNet(16, 4, classes, channels=channels, norm=kind, groups=groups, affine=False, project="always")


@register("model", "wrn28-10", doc="Wide residual network of 28 layers, for CIFAR-100.", paper="WRN; FedLAMA")
def wrn28_10(
    classes: int = 100,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    dropout: float = 0.3,
    preactivation: bool = False,
) -> ResNet | WideResNet:
    """WRN-28-10: 36,539,124 parameters, or 36,536,884 with preactivation=True.

    As in FedLAMA, a normalization follows each convolution, including shortcuts. With `preactivation` it precedes each
    convolution, as in the original network. Dropout uses the global generator of torch; dropout=0 disables it.
    """
    one_of(("bn", "gn"), norm=norm)
    probability(dropout=dropout)
    if preactivation:
        return WideResNet(28, 10, classes, channels=channels, norm=norm, groups=groups, dropout=dropout)
    return ResNet(
        (160, 320, 640),
        blocks_per_stage(28),
        classes,
        channels=channels,
        norm=norm,
        groups=groups,
        stem_width=16,
        dropout=dropout,
    )
