"""Residual networks: of 18 and 20 layers, and wide ones of 16 and 28 layers.

Papers: He et al. (18, 20); Zagoruyko and Komodakis (wide); FedLAMA (20 layers on CIFAR-10, 28 on CIFAR-100); FedPara
(18); MAPO (16 on CIFAR-100 and TinyImageNet).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.errors import ConfigError
from thinwire.models.blocks import ImageNetwork, MeanOverImage, Norm, dropout_layer, norm_layer
from thinwire.models.checks import at_least, one_of, probability


def conv(fan: int, width: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of the image, without bias, because a normalization follows."""
    return nn.Conv2d(fan, width, kernel, stride, kernel // 2, bias=False)


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
        self.conv1 = conv(fan, width, stride=stride)
        self.norm1 = norm(width)
        self.relu = nn.ReLU()
        self.dropout = dropout_layer(dropout)
        self.conv2 = conv(width, width)
        self.norm2 = norm(width)
        if zero_gamma:
            nn.init.zeros_(self.norm2.get_parameter("weight"))
        self.shortcut = nn.Sequential(conv(fan, width, 1, stride), norm(width)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        y = self.dropout(self.relu(self.norm1(self.conv1(x))))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


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
        self.conv1 = conv(fan, width, stride=stride)
        self.norm2 = norm(width)
        self.dropout = dropout_layer(dropout)
        self.conv2 = conv(width, width)
        self.shortcut = conv(fan, width, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:  # (n, fan, h, w) -> (n, width, h / stride, w / stride)
        """Apply the block."""
        a = self.relu(self.norm1(x))
        y = self.conv2(self.dropout(self.relu(self.norm2(self.conv1(a)))))
        return y + (x if self.shortcut is None else self.shortcut(a))


def stages(
    block: Callable[..., nn.Module], fan: int, widths: Sequence[int], depth: int, project: str, **options: Any
) -> nn.Sequential:
    """Residual blocks in stages; each stage after the first halves the image.

    Args:
        block: `BasicBlock` or `PreBlock`.
        fan: input channels.
        widths: channels of the stages.
        depth: blocks per stage.
        project: which shortcuts have a convolution: "change", where the shape changes; "first", the first of each
            stage; "always".
        options: further arguments of the blocks.
    """
    one_of(("change", "first", "always"), project=project)
    blocks = []
    for stage, width in enumerate(widths):
        for i in range(depth):
            stride = 2 if stage and not i else 1
            bypass = {"change": stride > 1 or fan != width, "first": not i, "always": True}[project]
            blocks.append(block(fan, width, stride=stride, project=bypass, **options))
            fan = width
    return nn.Sequential(*blocks)


def resnet(
    widths: tuple[int, ...],
    depth: int,
    classes: int,
    *,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    stem: str = "cifar",
    project: str = "change",
    dropout: float = 0.0,
    stem_width: int | None = None,
    zero_gamma: bool = False,
    init: str = "torch",
) -> ImageNetwork:
    """A residual network: stages of basic blocks; each stage after the first halves the image.

        stem -> [block x depth] per width, all but the first stage with stride 2 -> mean over the image -> Linear

    Args:
        widths: channels of the stages.
        depth: blocks per stage.
        classes: number of classes.
        channels: channels of the images.
        norm: "bn" or "gn"; both have two parameters per channel, only "bn" has running statistics.
        groups: groups of "gn".
        stem: "cifar" for a 3x3 convolution, "imagenet" for a 7x7 of stride 2 and 3x3 max pooling of stride 2.
        project: which shortcuts have a convolution, see `stages`.
        dropout: dropout probability inside the blocks.
        stem_width: channels of the stem; those of the first stage by default.
        zero_gamma: start the last normalization of each block at 0, so that the block is its shortcut.
        init: how convolutions and the linear layer start: "torch" for PyTorch's default, "glorot" for Glorot's uniform
            rule with zero biases, the default of Keras. Kernels of as many inputs as outputs start 1.7 times as large.

    >>> import torch
    >>> resnet((8, 16), 1, 10)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    at_least(2, classes=classes)
    at_least(1, channels=channels)
    one_of(("bn", "gn"), norm=norm)
    one_of(("cifar", "imagenet"), stem=stem)
    one_of(("torch", "glorot"), init=init)
    probability(dropout=dropout)
    fan, wide = stem_width or widths[0], stem == "imagenet"
    make = norm_layer(norm, (fan, *widths), groups=groups)
    layers = {
        "conv": conv(channels, fan, 7, 2) if wide else conv(channels, fan),
        "norm": make(fan),
        "relu": nn.ReLU(),
        "pool": nn.MaxPool2d(3, 2, 1) if wide else nn.Identity(),
        "blocks": stages(BasicBlock, fan, widths, depth, project, norm=make, dropout=dropout, zero_gamma=zero_gamma),
        "mean": MeanOverImage(),
        "head": nn.Linear(widths[-1], classes),
    }
    network = ImageNetwork(layers, channels)
    return network.apply(_glorot) if init == "glorot" else network


def _glorot(module: nn.Module) -> None:
    """Start a convolution or a linear layer by Glorot's uniform rule, its bias at 0."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def wide_resnet(
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
) -> ImageNetwork:
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
        project: which shortcuts have a convolution, see `stages`.
        dropout: dropout probability inside the blocks.

    >>> import torch
    >>> wide_resnet(10, 1, 5)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """
    at_least(2, classes=classes)
    at_least(1, channels=channels, width=width)
    at_least(10, depth=depth)
    probability(dropout=dropout)
    if (depth - 4) % 6:
        raise ConfigError(f"depth = {depth}: expected 4 more than a multiple of 6 (10, 16, 22, 28, ...)")
    widths = (16 * width, 32 * width, 64 * width)
    make = norm_layer(norm, (16, *widths), groups=groups, affine=affine)
    layers = {
        "conv": conv(channels, 16),
        "blocks": stages(PreBlock, 16, widths, (depth - 4) // 6, project, norm=make, dropout=dropout),
        "norm": make(widths[-1]),
        "relu": nn.ReLU(),
        "mean": MeanOverImage(),
        "head": nn.Linear(widths[-1], classes),
    }
    return ImageNetwork(layers, channels)


@register("model", "resnet20", doc="Residual network of 20 layers, for CIFAR-10.", paper="He et al.; FedLAMA")
def resnet20(
    classes: int = 10,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    zero_gamma: bool = False,
    init: str = "torch",
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
        project="first",
        zero_gamma=zero_gamma,
        init=init,
    )


@register("model", "resnet18", doc="Residual network of 18 layers.", paper="He et al.; FedPara")
def resnet18(
    classes: int = 10, channels: int = 3, norm: str = "bn", groups: int = 32, stem: str = "cifar"
) -> ImageNetwork:
    """Four stages of two residual blocks: 11,173,962 parameters, or 11,181,642 with stem="imagenet".

    Conv3x3(3 -> 64) -> 2 blocks each of 64, 128, 256, 512 channels -> mean -> Linear(512 -> 10)
    """
    return resnet((64, 128, 256, 512), 2, classes, channels=channels, norm=norm, groups=groups, stem=stem)


@register("model", "wrn16-4", doc="Wide residual network of 16 layers, for CIFAR-100 and TinyImageNet.", paper="MAPO")
def wrn16_4(classes: int = 100, channels: int = 3, norm: str = "gn", groups: int = 8) -> ImageNetwork:
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
    return wide_resnet(16, 4, classes, channels=channels, norm=kind, groups=groups, affine=False, project="always")


@register("model", "wrn28-10", doc="Wide residual network of 28 layers, for CIFAR-100.", paper="WRN; FedLAMA")
def wrn28_10(
    classes: int = 100,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    dropout: float = 0.3,
    preactivation: bool = False,
) -> ImageNetwork:
    """WRN-28-10: 36,539,124 parameters, or 36,536,884 with preactivation=True.

    As in FedLAMA, a normalization follows each convolution, including shortcuts. With `preactivation` it precedes each
    convolution, as in the original network. Dropout uses the global generator of torch; dropout=0 disables it.
    """
    one_of(("bn", "gn"), norm=norm)
    options: dict[str, Any] = {"channels": channels, "norm": norm, "groups": groups, "dropout": dropout}
    if preactivation:
        return wide_resnet(28, 10, classes, **options)
    return resnet((160, 320, 640), 4, classes, stem_width=16, **options)
