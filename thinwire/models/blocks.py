"""Building blocks of networks for images: a chain of named layers, and normalization layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

from thinwire.errors import ConfigError

Norm: TypeAlias = Callable[[int], nn.Module]  # makes a normalization layer for that many channels


class ImageNetwork(nn.Sequential):
    """Named layers in a row, which map images (n, channels, height, width) to logits (n, classes).

    Args:
        layers: the layers by name, in the order of the forward pass.
        channels: channels of the images.
        size: the height and width that they must have; None for any.
        least: the least height and width.

    >>> import torch
    >>> network = ImageNetwork({"mean": MeanOverImage(), "head": nn.Linear(3, 5)}, 3)
    >>> network(torch.zeros(2, 3, 8, 8)).shape, list(network.state_dict())
    (torch.Size([2, 5]), ['head.weight', 'head.bias'])
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], channels: int, *, size: tuple[int, int] | None = None, least: int = 1
    ) -> None:
        super().__init__(OrderedDict(layers))
        self.channels, self.size, self.least = channels, size, least

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, classes)
        """Logits of a batch of images; only shapes are checked, so it works under `vmap`."""
        shape = tuple(x.shape[1:])
        fits = len(shape) == 3 and shape[0] == self.channels
        if not fits or (shape[1:] != self.size if self.size else min(shape[1:]) < self.least):
            height, width = self.size or [f"{self.least} or more"] * 2
            raise ConfigError(
                f"images of shape {shape}: this model takes ({self.channels}, {height}, {width}); build it with the "
                "channels and the size of the data"
            )
        for layer in self:
            x = layer(x)
        return x


class MeanOverImage(nn.Module):
    """The mean over the pixels of each channel."""

    def forward(self, x: Tensor) -> Tensor:  # (n, channels, h, w) -> (n, channels)
        """Average height and width."""
        return x.mean((2, 3))


def dropout_layer(p: float) -> nn.Module:
    """Dropout, or the identity for a probability of 0."""
    return nn.Dropout(p) if p else nn.Identity()


def norm_layer(kind: str, widths: Iterable[int], *, groups: int = 8, affine: bool = True) -> Norm:
    """What makes normalization layers: batch norm ("bn"), group norm ("gn") or identity ("none").

    Args:
        kind: bn, gn or none.
        widths: the numbers of channels that occur; the number of groups must divide each of them.
        groups: of group norm.
        affine: whether the normalization has a trained scale and shift.

    >>> norm_layer("gn", [16])(16).num_groups
    8
    """
    if kind == "bn":
        return partial(nn.BatchNorm2d, affine=affine)
    if kind == "none":
        return nn.Identity
    for width in widths:
        if width % groups:
            raise ConfigError(f"groups = {groups}: does not divide a layer of {width} channels; write a power of two")
    return partial(nn.GroupNorm, groups, affine=affine)
