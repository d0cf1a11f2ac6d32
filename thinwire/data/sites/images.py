"""Images of a site: a folder for each class, in the folder of the site.

FOLDER/CLASS/*.png, *.jpg        a class without a folder has no examples at this site
x -> (pixel / 255 - mean) / std  by constants of the app; by default 0 and 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.core.text import visible
from thinwire.data.examples import Examples, Images
from thinwire.data.image_files import SUFFIXES, ImageShape, image_files, read_images
from thinwire.data.sites.base import Pair, SiteData
from thinwire.data.sites.table import check_classes
from thinwire.errors import ConfigError, DataError


@dataclass(frozen=True)
class SiteImages(SiteData):
    """PNG or JPEG images in one folder for each class.

    Args:
        classes: the classes of all sites, the names of folders, in the order of the model's outputs.
        size: height and width, or one number for both, to which all images are resized.
        channels: 1 for gray, 3 for color.
        mean, std: of each channel, by which values from 0 to 1 are scaled: constants that are the same at all sites.

    >>> SiteImages(("benign", "malignant"), size=32).shapes
    {'channels': 3, 'height': 32, 'width': 32, 'inputs': 3072}
    """

    classes: tuple[str, ...]
    size: int | tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        check_classes(self.classes)
        if self.channels not in (1, 3) or min(self._size) < 1:
            raise ConfigError(
                f"SiteImages needs channels of 1 or 3 and a size of 1 or more, not {self.channels} and {self.size}"
            )
        if not {len(self.mean), len(self.std)} <= {1, self.channels} or not all(one > 0 for one in self.std):
            raise ConfigError(
                f"mean and std must have 1 or {self.channels} values, std above 0, not {self.mean} and {self.std}"
            )

    @property
    def _size(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def outputs(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def shapes(self) -> Mapping[str, int]:
        """Channels, height and width."""
        height, width = self._size
        return {"channels": self.channels, "height": height, "width": width, "inputs": self.channels * height * width}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def expected(self) -> str:
        """Folders of classes."""
        return f"folders of images with the names of classes, such as {self.classes[0]}"

    @property
    def note(self) -> str:
        """Where the scales come from."""
        return "Images are scaled by constants of the app."

    def is_site(self, folder: Path) -> bool:
        """Whether the folder has a folder of one of the classes."""
        return any((folder / name).is_dir() for name in self.classes)

    def read(self, folder: Path) -> Pair:
        """All images; a folder of no class of the app is an error."""
        for inner in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if inner.name not in self.classes:
                known = visible(", ".join(self.classes), 80)
                raise DataError(f"{inner}: not one of the classes of the app ({known}); rename it, or correct task.py")
        files = [(path, i) for i, name in enumerate(self.classes) for path in _images(folder / name)]
        if not files:
            raise DataError(f"{folder}: its folders of classes have no image ({', '.join(SUFFIXES)})")
        shape = ImageShape(self.channels, *self._size, True)
        pixels = read_images(((path, str(path)) for path, _ in files), len(files), shape)
        return pixels, torch.tensor([label for _, label in files])

    def blank(self, rows: int) -> Pair:
        """Black images."""
        pixels = torch.zeros(rows, self.channels, *self._size, dtype=torch.uint8)
        return pixels, torch.zeros(rows, dtype=torch.int64)

    def examples(self, inputs: Tensor, targets: Tensor) -> Examples:
        """Images stored as bytes, scaled when they are used."""
        mean, std = (one * (self.channels // len(one)) for one in (self.mean, self.std))
        return Images(inputs, targets, mean, std)


def _images(folder: Path) -> list[Path]:
    return image_files(folder) if folder.is_dir() else []
