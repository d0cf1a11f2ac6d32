"""Small convolutional networks: 5x5 convolutions with pooling, then one or two linear layers.

Papers: MAPA and MAPO (MNIST, FMNIST, CIFAR-10, SVHN), EvoFed (CIFAR-10), LEAF and FedLAMA (FEMNIST).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from thinwire.core.registry import register
from thinwire.core.text import NonNegativeInt, PositiveInt
from thinwire.errors import ConfigError
from thinwire.models.blocks import ImageNetwork
from thinwire.models.exact_init import truncated_normal_
from thinwire.models.mlp import MLP, mlp

# Standard deviation of a standard normal truncated at two standard deviations.
TRUNCATED_STD = 0.87962566103423978


def conv_net(
    channels: int,
    size: int | tuple[int, int],
    widths: tuple[int, ...],
    hidden: int,
    classes: int,
    *,
    pool: str = "avg",
    init: str = "lecun",
) -> ImageNetwork:
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
    >>> conv_net(1, 28, (8, 16), 0, 10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    height, width = size if isinstance(size, tuple) else (size, size)
    if not isinstance(size, tuple) and size < (least := 2 ** len(widths)):
        raise ConfigError(f"size must be {least} or more, not {size}")
    layers: dict[str, nn.Module] = {}
    fan, rows, columns = channels, height, width
    for i, filters in enumerate(widths, start=1):
        step = (min(rows, 2), min(columns, 2))
        layers[f"conv{i}"] = nn.Conv2d(fan, filters, 5, padding=2)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"pool{i}"] = nn.AvgPool2d(step) if pool == "avg" else nn.MaxPool2d(step)
        fan, rows, columns = filters, rows // step[0], columns // step[1]
    layers["flatten"] = nn.Flatten()
    fan *= rows * columns
    if hidden:
        layers["hidden"] = nn.Linear(fan, hidden)
        layers["relu"] = nn.ReLU()
    layers["head"] = nn.Linear(hidden or fan, classes)
    network = ImageNetwork(layers, channels, size=(height, width))
    return network.apply(_lecun) if init == "lecun" else network


def _lecun(layer: nn.Module) -> None:
    """LeCun normal initialization, the default of the library that the authors of MAPA and MAPO use."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        truncated_normal_(layer.weight, 1 / math.sqrt(math.prod(layer.weight.shape[1:])) / TRUNCATED_STD)
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


def _published(
    name: str,
    widths: tuple[int, ...],
    hidden: int = 0,
    *,
    doc: str,
    paper: str,
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    **more: str,
) -> Callable[..., ImageNetwork]:
    """Register a network of a paper, with the classes and images of its data as defaults."""

    @register("model", name, doc=doc, paper=paper)
    def make(
        classes: PositiveInt = classes, channels: PositiveInt = channels, size: PositiveInt = size
    ) -> ImageNetwork:
        return conv_net(channels, size, widths, hidden, classes, **more)

    return make


# 11,274 parameters for ten classes of 28x28 images
cnn2 = _published(
    "cnn2",
    (8, 16),
    doc="Two convolutions and one linear layer, for 28x28 images such as MNIST.",
    paper="MAPA; MAPO",
    channels=1,
    size=28,
)
# 1,146,634 parameters, as both papers report; not the four convolutions of the tables of MAPO
cnn_cifar = _published(
    "cnn-cifar",
    (64, 128, 128),
    256,
    doc="Three convolutions and two linear layers, for CIFAR-10 and SVHN.",
    paper="MAPA; MAPO",
)
# 855,882 parameters; not the model with the count that MAPO reports
cnn_cifar4 = _published(
    "cnn-cifar4",
    (64, 64, 128, 128),
    256,
    doc="Four convolutions and two linear layers, as in the tables of MAPO.",
    paper="MAPO",
)
# 2,309,770 parameters
femnist_cnn = _published(
    "femnist-cnn",
    (32, 64),
    2048,
    doc="Two convolutions and a wide linear layer, for FEMNIST.",
    paper="LEAF; FedLAMA",
    channels=1,
    size=28,
    classes=62,
    pool="max",
    init="torch",
)


@register("model", "cnn", doc="A small CNN for images of any size and any number of channels.")
def cnn(
    classes: PositiveInt = 10, channels: PositiveInt = 3, height: PositiveInt = 32, width: PositiveInt = 32
) -> ImageNetwork:
    """A small CNN for images of any size: as many convolutions as leave at most 7 rows and columns, from one to five.

        [Conv5x5 -> ReLU -> AvgPool2] with 16, 32, 64, 64, 64 channels -> Linear(-> classes)

    >>> import torch
    >>> [cnn(4, 1, *size)(torch.zeros(2, 1, *size)).shape[1] for size in ((8, 8), (3, 100), (1, 1))]
    [4, 4, 4]
    """
    layers = min(max((max(height, width) // 4).bit_length() - 1, 1), 5)
    return conv_net(channels, (height, width), (16, 32, 64, 64, 64)[:layers], 0, classes)


@register("model", "auto", doc="The model `cnn` for images, the model `mlp` for other numbers.")
def auto(
    classes: PositiveInt = 10,
    inputs: PositiveInt = 64,
    channels: NonNegativeInt = 0,
    height: NonNegativeInt = 0,
    width: NonNegativeInt = 0,
) -> ImageNetwork | MLP:
    """The model `cnn` if the data has images (channels, height, width), otherwise `mlp` with `inputs` features.

    >>> type(auto(inputs=3)).__name__, type(auto(channels=1, height=8, width=8)).__name__
    ('MLP', 'ImageNetwork')
    """
    return cnn(classes, channels, height, width) if channels else mlp(classes, inputs)
