"""VGG-16 with group norm.

Papers: Simonyan and Zisserman; FedPara (CIFAR-10, CIFAR-100, CINIC-10).
"""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.models.checks import at_least, check_images, divides, probability

# Output channels of the convolutions; each stage ends with a pooling that halves the image.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """VGG-16: thirteen 3x3 convolutions in five stages, then three linear layers.

        [Conv3x3 -> GroupNorm -> ReLU] per channel number, MaxPool2 per stage -> mean over the image
        -> [Linear(512 -> 512) -> ReLU] twice -> Linear(512 -> classes)

    Images of 32x32 have one pixel left before the mean; larger ones are averaged.

    Args:
        classes: number of classes.
        channels: channels of the images.
        groups: groups of each group norm.
        dropout: dropout probability between the linear layers.
    """

    def __init__(self, classes: int, *, channels: int = 3, groups: int = 32, dropout: float = 0.0) -> None:
        at_least(2, classes=classes)
        at_least(1, channels=channels, groups=groups)
        divides(groups, {width for stage in STAGES for width in stage})
        probability(dropout=dropout)
        super().__init__()
        self.channels = channels
        layers: list[nn.Module] = []
        fan = channels
        for stage in STAGES:
            for width in stage:
                layers += [nn.Conv2d(fan, width, 3, padding=1), nn.GroupNorm(groups, width), nn.ReLU()]
                fan = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc1 = nn.Linear(fan, 512)
        self.fc2 = nn.Linear(512, 512)
        self.head = nn.Linear(512, classes)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of images of at least 32x32."""
        check_images(x, self.channels, least=32)
        y = self.features(x).mean((2, 3))
        y = self.dropout(self.relu(self.fc1(y)))
        y = self.dropout(self.relu(self.fc2(y)))
        return self.head(y)


@register("model", "vgg16-gn", doc="VGG-16 with group norm.", paper="VGG; FedPara")
def vgg16_gn(classes: int = 10, channels: int = 3, groups: int = 32, dropout: float = 0.0) -> VGG16:
    """VGG-16 with group norm: 15,253,578 parameters for 10 classes, 15,299,748 for 100.

    FedPara does not report the number of groups or the dropout; neither changes the count.

    >>> import torch
    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in vgg16_gn().parameters())
    15253578
    """
    return VGG16(classes, channels=channels, groups=groups, dropout=dropout)
