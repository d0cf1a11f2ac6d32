"""Residual networks: of 18 and 20 layers, and wide ones of 16 and 28 layers.

Papers: He et al. (18, 20); Zagoruyko and Komodakis (wide); FedLAMA (20 layers on CIFAR-10, 28 on CIFAR-100); FedPara
(18); MAPO (16 on CIFAR-100 and TinyImageNet).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.core.text import Classes, PositiveInt
from thinwire.models.blocks import ImageNetwork, MeanOverImage, Norm, norm_layer

BatchOrGroup = Literal["bn", "gn"]


def conv(fan: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of the image, without bias, because a normalization follows."""
    return nn.Conv2d(fan, width, kernel, stride, kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """The basic residual block: two convolutions, each followed by a normalization, plus a shortcut.

        y = relu( N2(conv2(relu(N1(conv1(x))))) + shortcut(x) ),   shortcut = identity or N3(conv1x1)

    Args:
        fan: input channels.
        width: output channels.
        stride: of the first convolution and of the shortcut.
        project: whether the shortcut has a convolution; required if the shape changes.
        norm: makes normalization layers (`norm_layer`).
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
        zero_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = conv(fan, width, stride=stride)
        self.norm1 = norm(width)
        self.relu = nn.ReLU()
        self.conv2 = conv(width, width)
        self.norm2 = norm(width)
        if zero_gamma:
            nn.init.zeros_(self.norm2.get_parameter("weight"))
        self.shortcut = nn.Sequential(conv(fan, width, 1, stride), norm(width)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class PreBlock(nn.Module):
    """The pre-activation residual block: two convolutions, each preceded by a normalization, plus a shortcut.

        a = relu(N1(x));   y = conv2(relu(N2(conv1(a)))) + conv1x1(a)

    Not `BasicBlock`, which normalizes after each convolution and ends with a ReLU.

    Args:
        fan: input channels.
        width: output channels.
        stride: of the first convolution and of the shortcut.
        norm: makes normalization layers (`norm_layer`).

    >>> import torch
    >>> PreBlock(16, 32, stride=2)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    def __init__(self, fan: int, width: int, *, stride: int = 1, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm1 = norm(fan)
        self.relu = nn.ReLU()
        self.conv1 = conv(fan, width, stride=stride)
        self.norm2 = norm(width)
        self.conv2 = conv(width, width)
        self.shortcut = conv(fan, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        a = self.relu(self.norm1(x))
        return self.conv2(self.relu(self.norm2(self.conv1(a)))) + self.shortcut(a)


def stages(fan: int, widths: Sequence[int], depth: int) -> Iterator[tuple[int, int, int]]:
    """Input channels, output channels and stride of each block; each stage after the first halves the image.

    >>> list(stages(16, (16, 32), 2))
    [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
    """
    for stage, width in enumerate(widths):
        for i in range(depth):
            yield fan, width, 2 if stage and not i else 1
            fan = width


def resnet(
    widths: tuple[int, ...],
    depth: int,
    classes: int,
    *,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    project_first: bool = False,
    zero_gamma: bool = False,
    init: str = "torch",
) -> ImageNetwork:
    """A residual network: stages of basic blocks; each stage after the first halves the image.

        Conv3x3 -> [block x depth] per width, all but the first stage with stride 2 -> mean over the image -> Linear

    Args:
        widths: channels of the stages.
        depth: blocks per stage.
        classes: number of classes.
        channels: channels of the images.
        norm: "bn" or "gn"; both have two parameters per channel, only "bn" has running statistics.
        groups: groups of "gn".
        project_first: whether the shortcut of the first block has a convolution, as those that change the shape have.
        zero_gamma: start the last normalization of each block at 0, so that the block is its shortcut.
        init: how convolutions and the linear layer start: "torch" for PyTorch's default, "glorot" for Glorot's uniform
            rule with zero biases, the default of Keras. Kernels of as many inputs as outputs start 1.7 times as large.

    >>> import torch
    >>> resnet((8, 16), 1, 10)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    start = widths[0]
    make, blocks = norm_layer(norm, widths, groups=groups), list[nn.Module]()
    stem = {"conv": conv(channels, start), "norm": make(start), "relu": nn.ReLU()}
    for fan, width, stride in stages(start, widths, depth):
        project = stride > 1 or fan != width or (project_first and not blocks)
        blocks.append(BasicBlock(fan, width, stride=stride, project=project, norm=make, zero_gamma=zero_gamma))
    head = {"mean": MeanOverImage(), "head": nn.Linear(widths[-1], classes)}
    network = ImageNetwork({**stem, "blocks": nn.Sequential(*blocks), **head}, channels)
    return network.apply(_glorot) if init == "glorot" else network


def _glorot(module: nn.Module) -> None:
    """Start a convolution or a linear layer by Glorot's uniform rule, its bias at 0."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@register("model", "resnet20", doc="Residual network of 20 layers, for CIFAR-10.", paper="He et al.; FedLAMA")
def resnet20(
    classes: Classes = 10,
    channels: PositiveInt = 3,
    norm: BatchOrGroup = "bn",
    groups: PositiveInt = 8,
    zero_gamma: bool = False,
    init: Literal["torch", "glorot"] = "torch",
) -> ImageNetwork:
    """Three stages of three residual blocks: 272,762 parameters, with 23 weight matrices, as in FedLAMA.

        Conv3x3(3 -> 16) -> 3 blocks each of 16, 32, 64 channels -> mean -> Linear(64 -> 10)

    The first block of each stage, including the first stage, has a 1x1 convolution on its shortcut. Not the version
    without the first of these (272,474 parameters), nor the one without any (269,722).
    """
    return resnet(
        (16, 32, 64),
        3,
        classes,
        channels=channels,
        norm=norm,
        groups=groups,
        project_first=True,
        zero_gamma=zero_gamma,
        init=init,
    )


@register("model", "resnet18", doc="Residual network of 18 layers.", paper="He et al.; FedPara")
def resnet18(
    classes: Classes = 10, channels: PositiveInt = 3, norm: BatchOrGroup = "bn", groups: PositiveInt = 32
) -> ImageNetwork:
    """Four stages of two residual blocks: 11,173,962 parameters.

    Conv3x3(3 -> 64) -> 2 blocks each of 64, 128, 256, 512 channels -> mean -> Linear(512 -> 10)
    """
    return resnet((64, 128, 256, 512), 2, classes, channels=channels, norm=norm, groups=groups)


@register("model", "wrn16-4", doc="Wide residual network of 16 layers, for CIFAR-100 and TinyImageNet.", paper="MAPO")
def wrn16_4(
    classes: Classes = 100,
    channels: PositiveInt = 3,
    norm: Literal["gn", "bn_noaffine", "none"] = "gn",
    groups: PositiveInt = 8,
) -> ImageNetwork:
    """WRN-16-4 with the count of MAPO: 2,854,420 parameters for 100 classes, 2,880,120 for 200.

        Conv3x3(3 -> 16) -> 2 blocks each of 64, 128, 256 channels -> N -> ReLU -> mean over the image -> Linear

    Each block has a 1x1 convolution on its shortcut, and normalization has no parameters: only this matches the
    reported count. Not the original network (affine normalization, shortcut convolutions only if the shape changes),
    which has 2,772,020 parameters for 100 classes.

    Args:
        classes: number of classes.
        channels: channels of the images.
        norm: "gn", which has no running statistics and supports any batch size; "bn_noaffine"; or "none".
        groups: groups of "gn".
    """
    widths = (64, 128, 256)
    make = norm_layer(norm.removesuffix("_noaffine"), (16, *widths), groups=groups, affine=False)
    layers = {
        "conv": conv(channels, 16),
        "blocks": nn.Sequential(
            *(PreBlock(fan, width, stride=s, norm=make) for fan, width, s in stages(16, widths, 2))
        ),
        "norm": make(widths[-1]),
        "relu": nn.ReLU(),
        "mean": MeanOverImage(),
        "head": nn.Linear(widths[-1], classes),
    }
    return ImageNetwork(layers, channels)
