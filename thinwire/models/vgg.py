"""VGG-16 with group norm.

Papers: Simonyan and Zisserman; FedPara (CIFAR-10, CIFAR-100, CINIC-10).
"""

from __future__ import annotations

from torch import nn

from thinwire.core.registry import register
from thinwire.core.text import BelowOne, Classes, PositiveInt
from thinwire.models.blocks import ImageNetwork, MeanOverImage, dropout_layer, norm_layer

# Output channels of the convolutions; each stage ends with a pooling that halves the image.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@register("model", "vgg16-gn", doc="VGG-16 with group norm.", paper="VGG; FedPara")
def vgg16_gn(
    classes: Classes = 10,
    channels: PositiveInt = 3,
    groups: PositiveInt = 32,
    dropout: BelowOne = 0.0,
    bias: bool = True,
) -> ImageNetwork:
    """VGG-16 with group norm: 15,253,578 parameters for 10 classes, 15,299,748 for 100.

        [Conv3x3 -> GroupNorm -> ReLU] per channel number, MaxPool2 per stage -> mean over the image
        -> [Linear(512 -> 512) -> ReLU] twice -> Linear(512 -> classes)

    Images of 32x32 have one pixel left before the mean; larger ones are averaged. FedPara does not report the number
    of groups or the dropout; neither changes the count.

    Args:
        classes: number of classes.
        channels: channels of the images.
        groups: groups of each group norm.
        dropout: dropout probability between the linear layers.
        bias: whether convolutions have biases; those of FedPara's authors have none (4,224 parameters less).

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in vgg16_gn().parameters())
    15253578
    """
    norm = norm_layer("gn", [width for stage in STAGES for width in stage], groups=groups)
    features: list[nn.Module] = []
    fan = channels
    for stage in STAGES:
        for width in stage:
            features += [nn.Conv2d(fan, width, 3, padding=1, bias=bias), norm(width), nn.ReLU()]
            fan = width
        features.append(nn.MaxPool2d(2))
    layers = {
        "features": nn.Sequential(*features),
        "mean": MeanOverImage(),
        "fc1": nn.Linear(fan, 512),
        "relu1": nn.ReLU(),
        "dropout1": dropout_layer(dropout),
        "fc2": nn.Linear(512, 512),
        "relu2": nn.ReLU(),
        "dropout2": dropout_layer(dropout),
        "head": nn.Linear(512, classes),
    }
    return ImageNetwork(layers, channels, least=32)
