"""Standardized images: per-channel mean 0 and standard deviation 1.

x  ->  (x - mean_c) / std_c          constants of the dataset (`Source.mean`, `Source.std`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.data.examples import Arrays, Examples, Images

_LEAST_STD = 1e-6  # of a channel that is constant


def image_values(examples: Examples) -> Tensor | None:
    """(n, channels, height, width) the stored values of images, bytes or floats; None for other examples."""
    if isinstance(examples, Images):
        return examples.pixels
    stored = examples.inputs if isinstance(examples, Arrays) else None
    return stored if isinstance(stored, Tensor) and stored.dim() == 4 and stored.is_floating_point() else None


def mean_and_std(values: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation (of the population) of each channel.

    Args:
        values: (n, channels, height, width) images; bytes count as pixel / 255.

    >>> mean_and_std(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ((0.5,), (0.5,))
    """
    rows = values.transpose(0, 1).flatten(1)
    if values.dtype == torch.uint8:
        # from counts of the 256 values: exact, and without a float copy of all images
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in rows])
        levels = torch.arange(256)
        total, squares = (counts * levels).sum(1).double() / 255, (counts * levels**2).sum(1).double() / 255**2
    else:
        wide = rows.double()
        total, squares = wide.sum(1), wide.square().sum(1)
    mean, square = total / rows.shape[1], squares / rows.shape[1]
    std = (square - mean * mean).clamp(min=0).sqrt().clamp(min=_LEAST_STD)
    return tuple(mean.tolist()), tuple(std.tolist())


def standardized(examples: Examples, mean: Sequence[float], std: Sequence[float]) -> Examples:
    """Images with (x - mean) / std per channel; examples that are no images (`image_values`) stay as they are.

    >>> images = Arrays(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1), torch.zeros(2))
    >>> standardized(images, (0.5,), (0.5,)).inputs.flatten().tolist()
    [-1.0, 1.0]
    """
    if isinstance(examples, Images):
        return replace(examples, mean=tuple(mean), std=tuple(std))
    if not isinstance(examples, Arrays) or (values := image_values(examples)) is None:
        return examples
    shift, divisor = (torch.tensor(one, dtype=values.dtype).view(-1, 1, 1) for one in (mean, std))
    return replace(examples, inputs=(values - shift) / divisor)
