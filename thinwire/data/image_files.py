"""Images from PNG and JPEG files, as bytes of one size. Needs pillow. Nothing in a file is trusted.

The size in a header is checked before pixels are decoded, so that a small file cannot take much memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.data.reading import one_line
from thinwire.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
MOST_PIXELS = 1 << 26  # of one image
MOST_BYTES = 1 << 33  # of all images, decoded
_GRAY = ("1", "L", "LA", "I", "I;16", "F")


class ImageShape(NamedTuple):
    """Channels (1 or 3), height and width of all images, and whether others are resized."""

    channels: int
    height: int
    width: int
    resize: bool


def image_files(folder: Path) -> list[Path]:
    """The images in a folder, in alphabetical order; hidden files and files of other kinds are ignored."""
    found = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def shape_of(first: Any, size: int | Sequence[int] = 0, channels: int = 0) -> ImageShape:
    """The shape of all images.

    Args:
        first: the first image, a path or an open image, whose shape is used where none is given.
        size: height and width, or one number for both; 0 for that of the first image.
        channels: 1 for gray, 3 for color; 0 for those of the first image.
    """
    if channels not in (0, 1, 3):
        raise ConfigError(f"task.channels must be 1 (gray), 3 (color) or 0 (as the first image), not {channels}")
    given = (size, size) if isinstance(size, int) else tuple(size)
    if len(given) != 2 or min(given) < 0 or given[0] * given[1] > MOST_PIXELS:
        raise ConfigError(f"task.size must be a number of pixels, or [height, width], not {size}")
    image = _opened(first) if isinstance(first, Path) else first
    found = channels or (1 if image.mode in _GRAY else 3)
    height, width = given if min(given) else (image.height, image.width)
    if image is not first:
        image.close()
    return ImageShape(found, height, width, bool(min(given)))


def read_images(images: Iterable[tuple[Any, str]], count: int, shape: ImageShape) -> Tensor:
    """(n, channels, height, width) uint8: all images, read one by one.

    Args:
        images: each a path or an open image, and its name for errors.
        count: number of images.
        shape: the shape of all.
    """
    channels, height, width, _ = shape
    if count * channels * height * width > MOST_BYTES:
        raise DataError(
            f"{count:,} images of {height} x {width} are more than {MOST_BYTES >> 30} GiB; write task.size to make "
            "them smaller"
        )
    out = np.empty((count, height, width, channels), np.uint8)
    for i, (given, name) in enumerate(images):
        if isinstance(given, Path):
            with _opened(given) as image:
                out[i] = _pixels(image, name, shape)
        else:
            out[i] = _pixels(given, name, shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def _opened(path: Path) -> Any:
    """An image whose header has been read and whose size is bounded."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{path}: reading images needs pillow; pip install pillow") from None
    try:
        image = Image.open(path, formats=("PNG", "JPEG"))
    except Exception as fault:  # pillow raises errors of many types for damaged files
        raise DataError(f"{path}: cannot be read as PNG or JPEG ({one_line(fault)})") from None
    if image.width * image.height > MOST_PIXELS:
        size = f"{image.height} x {image.width}"
        image.close()
        raise DataError(f"{path}: the image has {size} pixels, more than {MOST_PIXELS:,}; make it smaller")
    return image


def _pixels(image: Any, name: str, shape: ImageShape) -> np.ndarray:
    """(height, width, channels) uint8: the pixels of an image in the shape of all."""
    channels, height, width, resize = shape
    if (image.height, image.width) != (height, width) and not resize:
        raise DataError(
            f"{name}: the image has {image.height} x {image.width} pixels, but the first one {height} x {width}; write "
            f"task.size = [{height}, {width}] to resize all images"
        )
    if channels == 1 and image.mode not in _GRAY:
        raise DataError(
            f"{name}: the image is in color, but the first one is gray; write task.channels = 3 (or 1 for gray)"
        )
    try:
        if image.mode in ("I", "I;16", "F"):  # 16 bits: the upper eight
            image = image.point(lambda value: value / 256).convert("L")
        image = image.convert("L" if channels == 1 else "RGB")
        if (image.height, image.width) != (height, width):
            image = image.resize((width, height))
        return np.asarray(image, np.uint8).reshape(height, width, channels)
    except Exception as fault:  # cut off or damaged
        raise DataError(f"{name}: cannot be decoded ({one_line(fault)})") from None
