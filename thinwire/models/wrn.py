"""Wide residual networks: few layers, many channels.

Papers: Zagoruyko and Komodakis; MAPO (16 layers, CIFAR-100 and TinyImageNet); FedLAMA (28 layers, CIFAR-100).
"""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.blocks import conv1x1, conv3x3, norm_layer
from thinwire.models.checks import at_least, divides, one_of, pictures, probability
from thinwire.models.resnet import ResNet


class PreBlock(nn.Module):
    """Two convolutions whose result is added to their input, normalised before each convolution.

        a = relu(N1(x));   y = conv2(dropout(relu(N2(conv1(a))))) + s,   s = x, or conv1x1(a) where the block projects

    Not `BasicBlock`, which normalises after each convolution and ends in a ReLU.

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
        norm: str = "bn",
        groups: int = 8,
        affine: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(norm, fan, groups=groups, affine=affine)
        self.relu = nn.ReLU()
        self.conv1 = conv3x3(fan, width, stride)
        self.norm2 = norm_layer(norm, width, groups=groups, affine=affine)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = conv3x3(width, width)
        self.shortcut = conv1x1(fan, width, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """The block's output."""
        a = self.relu(self.norm1(x))
        y = self.conv2(self.dropout(self.relu(self.norm2(self.conv1(a)))))
        out: Tensor = y + (x if self.shortcut is None else self.shortcut(a))
        return out


class WideResNet(nn.Module):
    """A residual network of three stages with `width` times the usual channels, normalised before each convolution.

        Conv3x3(3 -> 16) -> (depth - 4) / 6 blocks each of 16, 32, 64 times `width` channels
        -> N -> ReLU -> mean over the picture -> Linear

    Args:
        depth: layers, 4 more than a multiple of 6.
        width: factor on the channels.
        classes: outputs.
        channels: colours of the pictures.
        norm: "bn", "gn" or "none".
        groups: groups of "gn".
        affine: whether normalisation has a trained scale and shift.
        project: "change" for a convolution on the shortcut where the shape changes, "always" for one in every block.
        dropout: inside the blocks.

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
        blocks: list[nn.Module] = []
        fan = 16
        for stage, out in enumerate(widths):
            for i in range(blocks_per_stage(depth)):
                stride = 2 if stage and not i else 1
                blocks.append(
                    PreBlock(
                        fan,
                        out,
                        stride=stride,
                        project=project == "always" or stride > 1 or fan != out,
                        norm=norm,
                        groups=groups,
                        affine=affine,
                        dropout=dropout,
                    )
                )
                fan = out
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm_layer(norm, fan, groups=groups, affine=affine)
        self.relu = nn.ReLU()
        self.head = nn.Linear(fan, classes)

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of pictures of any size."""
        pictures(x, self.channels)
        y = self.relu(self.norm(self.blocks(self.conv(x))))
        out: Tensor = self.head(y.mean((2, 3)))
        return out


def blocks_per_stage(depth: int) -> int:
    """How many blocks of two layers each of the three stages has.

    >>> blocks_per_stage(16), blocks_per_stage(28)
    (2, 4)
    """
    at_least(10, depth=depth)
    if (depth - 4) % 6:
        raise ConfigError(f"depth = {depth}: expected 4 more than a multiple of 6 (10, 16, 22, 28, ...)")
    return (depth - 4) // 6


@register("model", "wrn16-4", doc="Wide residual network of 16 layers, for CIFAR-100 and TinyImageNet.", paper="MAPO")
def wrn16_4(classes: int = 100, channels: int = 3, norm: str = "gn", groups: int = 8) -> WideResNet:
    """Sixteen layers, four times wide, as MAPO counts it: 2,854,420 weights for 100 classes, 2,880,120 for 200.

    Every block has a 1x1 convolution on its shortcut and no normalisation has weights: only this gives the printed
    count. Not the textbook network (trained normalisation, shortcut convolutions only where the shape changes), which
    has 2,772,020 weights for 100 classes.

    Args:
        classes: outputs.
        channels: colours of the pictures.
        norm: "gn", which keeps no running statistics and takes batches of any size; "bn_noaffine"; or "none".
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
    """Twenty-eight layers, ten times wide: 36,539,124 weights, or 36,536,884 with preactivation=True.

    As FedLAMA has it, normalisation follows each convolution, also that on a shortcut. With `preactivation` it comes
    before, as in the original network. Dropout draws from torch's own generator; dropout=0 leaves it out.
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
