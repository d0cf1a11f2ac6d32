"""Small convolutional networks: 5x5 convolutions with pooling, then one or two linear layers.

Papers: MAPA and MAPO (MNIST, FMNIST, CIFAR-10, SVHN), EvoFed (CIFAR-10), LEAF and FedLAMA (FEMNIST).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from thinwire.core.registry import register
from thinwire.models.checks import at_least, check_images, one_of
from thinwire.models.exact_init import truncated_normal_
from thinwire.models.mlp import MLP, mlp

# Standard deviation of a standard normal truncated at two standard deviations.
TRUNCATED_STD = 0.87962566103423978


class ConvNet(nn.Sequential):
    """A CNN: convolutions with pooling, then one or two linear layers.

        [Conv5x5(pad 2) -> ReLU -> Pool2] per entry of `widths` -> flatten -> [Linear -> ReLU if hidden] -> Linear

    Args:
        channels: channels of the images.
        size: height and width of the images, one number if they are equal; each pooling halves both, rounding down,
            but not below 1.
        widths: output channels of the convolutions.
        hidden: width of the linear layer before the last one; 0 for none.
        classes: number of classes; for regression, of values to predict.
        pool: "avg" or "max".
        init: "lecun" (weights normal with variance 1 / inputs, truncated at two standard deviations; biases 0), or
            "torch".

    >>> import torch
    >>> ConvNet(1, 28, (8, 16), 0, 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        channels: int,
        size: int | tuple[int, int],
        widths: tuple[int, ...],
        hidden: int,
        classes: int,
        *,
        pool: str = "avg",
        init: str = "lecun",
    ) -> None:
        height, width = size if isinstance(size, tuple) else (size, size)
        at_least(1, channels=channels, classes=classes, height=height, width=width)
        if not isinstance(size, tuple):
            at_least(2 ** len(widths), size=size)
        one_of(("avg", "max"), pool=pool)
        one_of(("lecun", "torch"), init=init)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        fan, rows, columns = channels, height, width
        for i, filters in enumerate(widths, start=1):
            layers[f"conv{i}"] = nn.Conv2d(fan, filters, 5, padding=2)
            layers[f"relu{i}"] = nn.ReLU()
            step = (min(rows, 2), min(columns, 2))
            layers[f"pool{i}"] = nn.AvgPool2d(step) if pool == "avg" else nn.MaxPool2d(step)
            fan, rows, columns = filters, rows // step[0], columns // step[1]
        layers["flatten"] = nn.Flatten()
        fan *= rows * columns
        if hidden:
            layers["hidden"] = nn.Linear(fan, hidden)
            layers["relu"] = nn.ReLU()
            fan = hidden
        layers["head"] = nn.Linear(fan, classes)
        super().__init__(layers)
        self.channels, self.size = channels, (height, width)
        if init == "lecun":
            lecun_(self)

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, size, size) -> (n, classes)
        """Logits of a batch of images."""
        check_images(x, self.channels, exact=self.size)
        for layer in self:
            x = layer(x)
        return x


def lecun_(module: nn.Module) -> None:
    """LeCun normal initialization in place: weights normal with variance 1 / inputs, truncated; biases zero.

    It is the default of the library that the authors of MAPA and MAPO use.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            std = 1 / math.sqrt(math.prod(layer.weight.shape[1:])) / TRUNCATED_STD
            truncated_normal_(layer.weight, std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@register(
    "model", "cnn2", doc="Two convolutions and one linear layer, for 28x28 images such as MNIST.", paper="MAPA; MAPO"
)
def cnn2(classes: int = 10, channels: int = 1, size: int = 28) -> ConvNet:
    """Two convolutions and one linear layer: 11,274 parameters for ten classes of 28x28 images.

        Conv5x5(1 -> 8) -> ReLU -> AvgPool2 -> Conv5x5(8 -> 16) -> ReLU -> AvgPool2 -> Linear(784 -> 10)

    >>> sum(p.numel() for p in cnn2().parameters())
    11274
    """
    return ConvNet(channels, size, (8, 16), 0, classes)


@register(
    "model", "cnn-cifar", doc="Three convolutions and two linear layers, for CIFAR-10 and SVHN.", paper="MAPA; MAPO"
)
def cnn_cifar(classes: int = 10, channels: int = 3, size: int = 32) -> ConvNet:
    """Three convolutions and two linear layers: 1,146,634 parameters, as both papers report.

        [Conv5x5 -> ReLU -> AvgPool2] with 64, 128, 128 channels -> Linear(2048 -> 256) -> ReLU -> Linear(256 -> 10)

    Not the four convolutions of the tables of MAPO, which have a different count: see `cnn-cifar4`.
    """
    return ConvNet(channels, size, (64, 128, 128), 256, classes)


@register("model", "cnn", doc="A small CNN for images of any size and any number of channels.")
def cnn(classes: int = 10, channels: int = 3, height: int = 32, width: int = 32) -> ConvNet:
    """A small CNN for images of any size: as many convolutions as leave at most 7 rows and columns, from one to five.

        [Conv5x5 -> ReLU -> AvgPool2] with 16, 32, 64, 64, 64 channels -> Linear(-> classes)

    >>> import torch
    >>> [cnn(4, 1, *size)(torch.zeros(2, 1, *size)).shape[1] for size in ((8, 8), (3, 100), (1, 1))]
    [4, 4, 4]
    """
    at_least(1, height=height, width=width)
    layers = min(max((max(height, width) // 4).bit_length() - 1, 1), 5)
    return ConvNet(channels, (height, width), (16, 32, 64, 64, 64)[:layers], 0, classes)


@register("model", "auto", doc="The model `cnn` for images, the model `mlp` for other numbers.")
def auto(classes: int = 10, inputs: int = 64, channels: int = 0, height: int = 0, width: int = 0) -> ConvNet | MLP:
    """The model `cnn` if the data has images (channels, height, width), otherwise `mlp` with `inputs` features.

    >>> type(auto(inputs=3)).__name__, type(auto(channels=1, height=8, width=8)).__name__
    ('MLP', 'ConvNet')
    """
    return cnn(classes, channels, height, width) if channels else mlp(classes, inputs)


@register("model", "cnn-cifar4", doc="Four convolutions and two linear layers, as in the tables of MAPO.", paper="MAPO")
def cnn_cifar4(classes: int = 10, channels: int = 3, size: int = 32) -> ConvNet:
    """Four convolutions and two linear layers, as in the tables of MAPO: 855,882 parameters.

        [Conv5x5 -> ReLU -> AvgPool2] with 64, 64, 128, 128 channels -> Linear(512 -> 256) -> ReLU -> Linear(256 -> 10)

    Not the model with the count that MAPO reports: see `cnn-cifar`.
    """
    return ConvNet(channels, size, (64, 64, 128, 128), 256, classes)


@register("model", "cnn-cifar-evofed", doc="Two wide convolutions and two linear layers, for CIFAR-10.", paper="EvoFed")
def cnn_cifar_evofed(classes: int = 10, channels: int = 3, size: int = 32) -> ConvNet:
    """Two wide convolutions and two linear layers: 2,309,770 parameters.

    [Conv5x5 -> ReLU -> AvgPool2] with 64, 128 channels -> Linear(8192 -> 256) -> ReLU -> Linear(256 -> 10)
    """
    return ConvNet(channels, size, (64, 128), 256, classes)


@register("model", "femnist-cnn", doc="Two convolutions and a wide linear layer, for FEMNIST.", paper="LEAF; FedLAMA")
def femnist_cnn(classes: int = 62, channels: int = 1, size: int = 28) -> ConvNet:
    """Two convolutions and a wide linear layer: 6,603,710 parameters for 62 letters and digits.

    [Conv5x5 -> ReLU -> MaxPool2] with 32, 64 channels -> Linear(3136 -> 2048) -> ReLU -> Linear(2048 -> 62)
    """
    return ConvNet(channels, size, (32, 64), 2048, classes, pool="max", init="torch")
