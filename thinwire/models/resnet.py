"""Residual networks of 18 and 20 layers.

Papers: He et al. (both); FedLAMA (20 layers, CIFAR-10); FedPara (18 layers).
"""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.models.blocks import BasicBlock, norm_layer
from thinwire.models.checks import at_least, check_images, divides, one_of


class ResNet(nn.Module):
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
        project_first: whether the first block of the first stage has a convolution on its shortcut.
        dropout: dropout probability inside the blocks.
        stem_width: channels of the stem; those of the first stage by default.
        zero_gamma: start the last normalization of each block at 0, so that the block is its shortcut.
        init: how convolutions and the linear layer start: "torch" for PyTorch's default, "glorot" for Glorot's uniform
            rule with zero biases, the default of Keras. Kernels of as many inputs as outputs start 1.7 times as large.

    >>> import torch
    >>> ResNet((8, 16), 1, 10)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        depth: int,
        classes: int,
        *,
        channels: int = 3,
        norm: str = "bn",
        groups: int = 8,
        stem: str = "cifar",
        project_first: bool = False,
        dropout: float = 0.0,
        stem_width: int | None = None,
        zero_gamma: bool = False,
        init: str = "torch",
    ) -> None:
        at_least(2, classes=classes)
        at_least(1, channels=channels, groups=groups)
        one_of(("bn", "gn"), norm=norm)
        one_of(("cifar", "imagenet"), stem=stem)
        one_of(("torch", "glorot"), init=init)
        fan = stem_width or widths[0]
        if norm == "gn":
            divides(groups, (fan, *widths))
        super().__init__()
        self.channels = channels
        wide = stem == "imagenet"
        self.conv = nn.Conv2d(channels, fan, 7 if wide else 3, 2 if wide else 1, 3 if wide else 1, bias=False)
        make = norm_layer(norm, groups=groups)
        self.norm = make(fan)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2, 1) if wide else nn.Identity()
        blocks: list[nn.Module] = []
        for stage, width in enumerate(widths):
            for i in range(depth):
                stride = 2 if stage and not i else 1
                project = not i and (project_first or stride > 1 or fan != width)
                blocks.append(
                    BasicBlock(
                        fan, width, stride=stride, project=project, norm=make, dropout=dropout, zero_gamma=zero_gamma
                    )
                )
                fan = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(fan, classes)
        if init == "glorot":
            self.apply(_glorot)

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of images of any size."""
        check_images(x, self.channels)
        y = self.blocks(self.pool(self.relu(self.norm(self.conv(x)))))
        return self.head(y.mean((2, 3)))


def _glorot(module: nn.Module) -> None:
    """Start a convolution or a linear layer by Glorot's uniform rule, its bias at 0."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


@register("model", "resnet20", doc="Residual network of 20 layers, for CIFAR-10.", paper="He et al.; FedLAMA")
def resnet20(
    classes: int = 10,
    channels: int = 3,
    norm: str = "bn",
    groups: int = 8,
    zero_gamma: bool = False,
    init: str = "torch",
) -> ResNet:
    """Three stages of three residual blocks: 272,762 parameters, with 23 weight matrices, as in FedLAMA.

        Conv3x3(3 -> 16) -> 3 blocks each of 16, 32, 64 channels -> mean -> Linear(64 -> 10)

    The first block of each stage, including the first stage, has a 1x1 convolution on its shortcut. Not the version
    without the first of these (272,474 parameters), nor the one without any (269,722).
    """
    return ResNet(
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
def resnet18(classes: int = 10, channels: int = 3, norm: str = "bn", groups: int = 32, stem: str = "cifar") -> ResNet:
    """Four stages of two residual blocks: 11,173,962 parameters, or 11,181,642 with stem="imagenet".

    Conv3x3(3 -> 64) -> 2 blocks each of 64, 128, 256, 512 channels -> mean -> Linear(512 -> 10)
    """
    return ResNet((64, 128, 256, 512), 2, classes, channels=channels, norm=norm, groups=groups, stem=stem)
