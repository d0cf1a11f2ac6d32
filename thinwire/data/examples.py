"""Examples that lie in a few large tensors and are fetched by index, many clients at a time.

Pictures stay bytes and windows of text stay one string of codes until a batch is gathered, on the device where the
tensors lie: a federation of any number of clients holds its data once.

>>> import torch
>>> pool = Arrays(torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 0]))
>>> x, y = pool.gather(torch.tensor([[2, 0]]))     # any shape of index: here one client, two examples
>>> x.shape, y.tolist()
(torch.Size([1, 2, 2]), [[0, 0]])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Device
from thinwire.core.tree import Tree

Inputs: TypeAlias = "Tensor | Tree"  # one tensor, or named tensors that go to the model as keyword arguments


class Examples(Protocol):
    """A set of examples that can be fetched by index."""

    def __len__(self) -> int: ...

    @property
    def targets(self) -> Tensor:
        """(n, ...) what is to be predicted, one row an example; class numbers where partitions by label are to work."""
        ...

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the examples in `index`, an int64 tensor of any shape; its shape leads the results'."""
        ...

    def to(self, device: Device) -> Examples:
        """The same examples on another device."""
        ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """Examples that are rows of ready tensors."""

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Rows by index."""
        if isinstance(self.inputs, dict):
            return {name: block[index] for name, block in self.inputs.items()}, self.targets[index]
        return self.inputs[index], self.targets[index]

    def to(self, device: Device) -> Arrays:
        """The same rows on another device."""
        if isinstance(self.inputs, dict):
            inputs: Inputs = {name: block.to(device) for name, block in self.inputs.items()}
        else:
            inputs = self.inputs.to(device)
        return Arrays(inputs, self.targets.to(device))


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures kept as bytes, turned into numbers when fetched:  (pixel / 255 - mean) / std  per channel.

    Args:
        pixels: (n, channels, height, width) uint8.
        targets: (n,) int64 class numbers.
        mean, std: one number a channel; the defaults leave pixels in [0, 1].
    """

    pixels: Tensor
    targets: Tensor
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Pictures by index, as float32."""
        return self.scaled(self.pixels[index]), self.targets[index]

    def scaled(self, pixels: Tensor) -> Tensor:
        """Bytes to numbers."""
        x = pixels.to(torch.float32).div_(255)
        if self.mean != (0.0,) or self.std != (1.0,):
            mean, std = self._numbers
            x = x.sub_(mean).div_(std)
        return x

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation beside the pixels: sending them along with every batch would make the device wait."""
        shape, device = (len(self.mean), 1, 1), self.pixels.device
        return torch.tensor(self.mean, device=device).view(shape), torch.tensor(self.std, device=device).view(shape)

    def to(self, device: Device) -> Images:
        """The same pictures on another device."""
        return replace(self, pixels=self.pixels.to(device), targets=self.targets.to(device))

    def measured(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of these pictures, as `mean` and `std` want them.

        >>> Images(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.zeros(2)).measured()
        ((0.5,), (0.5,))
        """
        flat = self.pixels.transpose(0, 1).flatten(1)
        # from counts of the 256 values: exact, and without a copy of all pictures as numbers
        counts = torch.stack([torch.bincount(channel, minlength=256) for channel in flat]).to(torch.float64)
        share = counts / counts.sum(1, keepdim=True)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = (share * values).sum(1)
        std = ((share * values**2).sum(1) - mean**2).clamp_min(1e-12).sqrt()
        return tuple(mean.tolist()), tuple(std.tolist())


@dataclass(frozen=True, eq=False)
class Shifted:
    """Pictures, and after them their copies moved by a few pixels and mirrored, none of which is stored.

    Example i + n v is picture i in variant v; variant 0 is the picture itself. What a move lays bare is black.

    Args:
        pictures: the pictures.
        reach: how many pixels they move at most, up, down, left and right.

    >>> pool = Shifted(Images(torch.eye(3, dtype=torch.uint8).view(1, 1, 3, 3) * 255, torch.zeros(1)), reach=1)
    >>> len(pool), pool.variants                                     # 3 rows x 3 columns x (as it is, mirrored)
    (1, 18)
    >>> pool.gather(torch.tensor([0, 1]))[0].squeeze(1).tolist()[1]  # variant 1: mirrored
    [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """

    pictures: Images
    reach: int = 4

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def targets(self) -> Tensor:
        """Those of the pictures."""
        return self.pictures.targets

    @property
    def variants(self) -> int:
        """How many forms a picture has."""
        return 2 * (2 * self.reach + 1) ** 2

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Pictures by index, moved and mirrored as the index says."""
        pixels, reach, span = self.pictures.pixels, self.reach, 2 * self.reach + 1
        which, variant = index % len(self), index // len(self)
        # the moves are counted from where the picture is, so that variant 0 stays
        down, right, mirrored = (variant // 2) // span, (variant // 2) % span, (variant % 2).bool()
        down, right = ((move + reach) % span - reach for move in (down, right))
        height, width = pixels.shape[-2:]
        column = torch.arange(width, device=index.device)
        column = torch.where(mirrored[..., None], column.flip(0), column)
        rows = torch.arange(height, device=index.device) - down[..., None]
        columns = column - right[..., None]
        inside = ((rows >= 0) & (rows < height))[..., :, None] & ((columns >= 0) & (columns < width))[..., None, :]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        channel = torch.arange(pixels.shape[1], device=index.device)[:, None, None]
        moved = pixels[which[..., None, None, None], channel, rows[..., None, :, None], columns[..., None, None, :]]
        return self.pictures.scaled(moved * inside[..., None, :, :]), self.targets[which]

    def to(self, device: Device) -> Shifted:
        """The same pictures on another device."""
        return replace(self, pictures=self.pictures.to(device))


@dataclass(frozen=True, eq=False)
class Windows:
    """Stretches of one long text: the input is `length` characters, the target is the one that follows.

    Args:
        codes: (characters,) uint8 codes of the whole text.
        starts: (n,) int64 first position of each window.
        length: characters in a window.
    """

    codes: Tensor
    starts: Tensor
    length: int = 80

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def targets(self) -> Tensor:
        """The character after each window."""
        return self.codes[self.starts + self.length].long()

    def gather(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Windows by index, as int64 codes."""
        first = self.starts[index]
        reach = torch.arange(self.length, device=first.device)
        return self.codes[first[..., None] + reach].long(), self.codes[first + self.length].long()

    def to(self, device: Device) -> Windows:
        """The same text on another device."""
        return replace(self, codes=self.codes.to(device), starts=self.starts.to(device))


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as it comes: train and test examples, and who wrote each train example where that is known.

    Args:
        train, test: the official splits.
        classes: how many different targets there are.
        users: (n_train,) the natural client of each train example, numbered from 0, or None.
        test_users: the same for the test examples, or None.
        note: what a reader of results must know about this copy of the data (for example, that it is lossy).
        model: options that a model needs to read these examples, such as the checkpoint whose words they are made of.
    """

    train: Examples
    test: Examples
    classes: int
    users: Tensor | None = None
    test_users: Tensor | None = None
    note: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)


class Half(NamedTuple):
    """Texts as they are written, one or two for each example, and the class number of each."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray


class Texts(NamedTuple):
    """A data set of texts before anybody cut them into words.

    Args:
        files: all that `read` reads; empty where it fetches.
        read: gives the train and the test half.
        classes: how many different labels there are.
        note: as in `Source`.
    """

    files: tuple[Path, ...]
    read: Callable[[], list[Half]]
    classes: int
    note: str = ""
