"""Images of your own in PNG and JPEG files, one folder for each class. Needs pillow; nothing in a file is trusted.

FOLDER/CLASS/*.png                                   a fifth of the images is held out for testing
FOLDER/train/CLASS/*.png, FOLDER/test/CLASS/*.png    the test images are given
FOLDER/CLIENT/CLASS/*.png                            with client_folders = true; also below train and test

thinwire run fedavg --on image-folder --set task.folder=leaves

The size in a header is checked before pixels are decoded, so that a small file cannot take much memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.columns import Columns, objects
from thinwire.data.examples import Source, mean_and_std, numbered
from thinwire.data.files import one_line, own_path
from thinwire.data.table import TargetCode
from thinwire.errors import ConfigError, DataError

SUFFIXES = (".png", ".jpg", ".jpeg")
MAX_PIXELS = 1 << 26  # of one image
MAX_BYTES = 1 << 33  # of all images, decoded
_TEST = ("test", "val", "valid", "validation")
_GRAY = ("1", "L", "LA", "I", "I;16", "F")


@register(
    "dataset", "image-folder", doc="A folder of PNG or JPEG images of your own, one folder for each class: task.folder."
)
def from_image_folder(
    folder: str | Path = "",
    *,
    size: int | tuple[int, ...] | Sequence[int] = 0,
    channels: int = 0,
    client_folders: bool = False,
    test_fraction: float = 0.2,
    data_dir: Path | None = None,
) -> Source:
    """A dataset of images, one folder for each class.

    Args:
        folder: has a folder for each class, or the folders `train` and `test` with these.
        size: height and width to which all images are resized, or one number for both; by default images are not
            resized, and all must have the size of the first one.
        channels: 1 for gray, 3 for color; by default as the first image.
        client_folders: whether there is a folder for each client, which has the folders of classes.
        test_fraction: the fraction of images that is held out for testing, if there is no folder `test`; the seed of a
            run does not change them.
        data_dir: the folder of all datasets, in which this folder may be.
    """
    base = own_path(data_dir, folder, "task.folder")
    if not base.is_dir():
        raise DataError(f"{base}: not a folder; expected one with a folder of images for each class")
    test_folder = next((base / name for name in _TEST if (base / name).is_dir()), None)
    split = test_folder is not None and (base / "train").is_dir()
    rows = images_in(base / "train" if split else base, client_folders)
    given = images_in(test_folder, client_folders) if split and test_folder is not None else None
    classes = numbered(rows.texts("label"))
    if len(classes) < 2:
        raise DataError(
            f"{base}: one class only, {visible(classes[0], 40)!r}; expected a folder for each of two or more"
        )
    code = TargetCode("classification", ("label",), classes, listed="the training images")
    client = "client" if client_folders else ""
    parts = code.split(rows, given, client, test_fraction)
    shape = shape_of(parts[0].cells["path"][0], size, channels)
    train, test = (read_files(part, shape) for part in parts)
    how = (
        "drawn once, independent of the seed" if test_folder is None or not split else f"the folder {test_folder.name}"
    )
    note = (
        f"{len(train):,} images for training, {len(test):,} for testing ({how}), of {shape.height} x {shape.width} "
        f"pixels{', resized' if shape.resize else ''}. Mean and standard deviation of task.scale = standard are those "
        "of the pooled training images."
    )
    mean, std = mean_and_std(train)
    return code.source(parts, (train, test), client, note=note, model=image_options(train), mean=mean, std=std)


def image_options(pixels: Tensor) -> dict[str, int]:
    """What models need to know about images (n, channels, height, width)."""
    channels, height, width = pixels.shape[1:]
    options = {"channels": channels, "height": height, "width": width, "inputs": channels * height * width}
    return options | ({"size": height} if height == width else {})


def images_in(folder: Path, client_folders: bool = False) -> Columns:
    """The path, class and client of all images in the folders of classes, or of clients and classes."""
    found = []
    for base in _folders(folder) if client_folders else [folder]:
        if loose := _images(base):
            raise DataError(f"{loose[0]}: this image is in no class; put it into a folder with the name of its class")
        for inner in _folders(base):
            files = _images(inner)
            if not files:
                deeper = any(path.is_dir() and _images(path) for path in inner.iterdir())
                fill = "delete the folder, or fill it"
                advice = "if these are clients, write task.client_folders = true" if deeper else fill
                raise DataError(f"{inner}: no image ({', '.join(SUFFIXES)}) in this class; {advice}")
            found += [(path, inner.name, base.name) for path in files]
    cells = dict(zip(("path", "label", "client"), map(objects, zip(*found, strict=True)), strict=True))
    names = objects(str(path.relative_to(folder)) for path in cells["path"])
    return Columns(str(folder), cells, row_numbers=names, word="image")


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, in alphabetical order, without hidden ones."""
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not found:
        raise DataError(f"{folder}: no folders, expected one for each class")
    return found


def _images(folder: Path) -> list[Path]:
    """The images in a folder, in alphabetical order; hidden files and files of other kinds are ignored."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [path for path in files if path.suffix.lower() in SUFFIXES]


# -- pixels ----------------------------------------------------------------------------------------------------------


class ImageShape(NamedTuple):
    """Channels (1 or 3), height and width of all images, and whether others are resized."""

    channels: int
    height: int
    width: int
    resize: bool


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
    if len(given) != 2 or min(given) < 0 or given[0] * given[1] > MAX_PIXELS:
        raise ConfigError(f"task.size must be a number of pixels, or [height, width], not {size}")
    image = open_image(first)
    height, width = given if min(given) else (image.height, image.width)
    return ImageShape(channels or (1 if image.mode in _GRAY else 3), height, width, bool(min(given)))


def read_files(rows: Columns, shape: ImageShape) -> Tensor:
    """(n, channels, height, width) uint8: the images of the rows of `images_in`."""
    return read_images([(path, str(path)) for path in rows.cells["path"]], len(rows), shape)


def read_images(images: Iterable[tuple[Any, str]], count: int, shape: ImageShape) -> Tensor:
    """(n, channels, height, width) uint8: all images, read one by one.

    Args:
        images: each a path or an open image, and its name for errors.
        count: number of images.
        shape: the shape of all.
    """
    channels, height, width, _ = shape
    if count * channels * height * width > MAX_BYTES:
        raise DataError(
            f"{count:,} images of {height} x {width} are more than {MAX_BYTES >> 30} GiB; write task.size to make "
            "them smaller"
        )
    out = np.empty((count, height, width, channels), np.uint8)
    for i, (given, name) in enumerate(images):
        out[i] = _pixels(open_image(given, name), name, shape)
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def open_image(given: Any, name: str = "the first row") -> Any:
    """An image, read from a file if it is a path; the size in the header is bounded before pixels are decoded."""
    if given is None:
        raise DataError(f"{name} has no image")
    if not isinstance(given, Path):
        return given
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{given}: reading images needs pillow; pip install 'thinwire[data]'") from None
    try:
        with Image.open(given, formats=("PNG", "JPEG")) as image:
            if image.width * image.height <= MAX_PIXELS:
                image.load()
                return image
    except Exception as fault:  # pillow raises errors of many types for damaged files
        raise DataError(f"{given}: cannot be read as PNG or JPEG ({one_line(fault)})") from None
    size = f"{image.height} x {image.width}"
    raise DataError(f"{given}: the image has {size} pixels, more than {MAX_PIXELS:,}; make it smaller")


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
    except Exception as fault:  # of an image of another library: cut off or damaged
        raise DataError(f"{name}: cannot be decoded ({one_line(fault)})") from None
