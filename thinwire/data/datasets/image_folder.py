"""A folder of images of your own, one folder for each class.

FOLDER/CLASS/*.png                                   a fifth of the images is held out for testing
FOLDER/train/CLASS/*.png, FOLDER/test/CLASS/*.png    the test images are given
FOLDER/CLIENT/CLASS/*.png                            with client_folders = true; also below train and test

thinwire run fedavg --on image-folder --set task.folder=leaves
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.examples import Images, Source
from thinwire.data.folder import own_path
from thinwire.data.hold_out import held_out_rows
from thinwire.data.image_files import SUFFIXES, ImageShape, image_files, read_images, shape_of
from thinwire.data.reading import numbered
from thinwire.data.scaling import sums_of
from thinwire.errors import DataError

MOST_FOLDERS = 100_000
_TEST = ("test", "val", "valid", "validation")


@register(
    "dataset", "image-folder", doc="A folder of PNG or JPEG images of your own, one folder for each class: task.folder."
)
def image_folder(
    data_dir: Path | None = None,
    folder: str = "",
    size: int | tuple[int, ...] = 0,
    channels: int = 0,
    client_folders: bool = False,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """Images in folders; the options are those of `from_image_folder`."""
    path = own_path(data_dir, folder, "task.folder")
    return from_image_folder(
        path,
        size=size,
        channels=channels,
        client_folders=client_folders,
        test_fraction=test_fraction,
        split_seed=split_seed,
    )


def from_image_folder(
    folder: str | Path,
    *,
    size: int | Sequence[int] = 0,
    channels: int = 0,
    client_folders: bool = False,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """A dataset of images, one folder for each class.

    Args:
        folder: has a folder for each class, or the folders `train` and `test` with these.
        size: height and width to which all images are resized, or one number for both; by default images are not
            resized, and all must have the size of the first one.
        channels: 1 for gray, 3 for color; by default as the first image.
        client_folders: whether there is a folder for each client, which has the folders of classes.
        test_fraction: the fraction of images that is held out for testing, if there is no folder `test`.
        split_seed: of another choice of test images; the seed of a run does not change them.
    """
    base = Path(folder).expanduser()
    if not base.is_dir():
        raise DataError(f"{base}: not a folder; expected one with a folder of images for each class")
    test_folder = next((base / name for name in _TEST if (base / name).is_dir()), None)
    if (base / "train").is_dir() and test_folder is not None:
        listed = [_listed(base / "train", client_folders), _listed(test_folder, client_folders)]
        how = f"the folder {test_folder.name}"
    else:
        everything = _listed(base, client_folders)
        listed = _divided(everything, test_fraction, split_seed)
        how = "drawn once, independent of the seed"
    classes, users = (numbered(getattr(one, field) for one in listed[0]) for field in ("label", "client"))
    _check(base, classes, listed[1])
    shape = shape_of(listed[0][0].path, size, channels)
    train, test = (Images(_pixels(part, shape), _codes(part, "label", classes)) for part in listed)
    mean, std = sums_of(train.pixels).mean_and_std()
    everyone = numbered([*users, *(one.client for one in listed[1])])
    note = (
        f"{len(train):,} images for training, {len(test):,} for testing ({how}), of {shape.height} x {shape.width} "
        f"pixels{', resized' if shape.resize else ''}. Mean and standard deviation of task.scale = standard are those "
        "of the pooled training images; task.scale = estimated has clients report them."
    )
    return Source(
        train,
        test,
        len(classes),
        _codes(listed[0], "client", everyone) if client_folders else None,
        _codes(listed[1], "client", everyone) if client_folders else None,
        note=note,
        model=image_options(train.pixels),
        mean=mean,
        std=std,
        class_names=classes,
        user_names=everyone if client_folders else (),
    )


def image_options(pixels: Tensor) -> dict[str, int]:
    """What models need to know about images (n, channels, height, width)."""
    channels, height, width = pixels.shape[1:]
    square = {"size": height} if height == width else {}
    return {"channels": channels, "height": height, "width": width, "inputs": channels * height * width, **square}


class _File(NamedTuple):
    path: Path
    label: str
    client: str = ""


def _listed(folder: Path, client_folders: bool) -> list[_File]:
    """All images in the folders of classes, or of clients and classes."""
    if not client_folders:
        return _classes(folder)
    return [one._replace(client=client.name) for client in _folders(folder) for one in _classes(client)]


def _classes(folder: Path) -> list[_File]:
    """All images in the folders of classes."""
    if loose := image_files(folder):
        raise DataError(f"{loose[0]}: this image is in no class; put it into a folder with the name of its class")
    found = []
    for inner in _folders(folder):
        files = image_files(inner)
        if not files:
            deeper = any(path.is_dir() and image_files(path) for path in inner.iterdir())
            advice = (
                "if these are clients, write task.client_folders = true" if deeper else "delete the folder, or fill it"
            )
            raise DataError(f"{inner}: no image ({', '.join(SUFFIXES)}) in this class; {advice}")
        found += [_File(path, inner.name) for path in files]
    return found


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, in alphabetical order, without hidden ones."""
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not found or len(found) > MOST_FOLDERS:
        count = f"{len(found):,} folders" if found else "no folders"
        raise DataError(f"{folder}: {count}, expected one for each class")
    return found


def _divided(files: list[_File], fraction: float, seed: int) -> list[list[_File]]:
    """Training and test images."""
    labels, clients = (
        np.unique(np.array([getattr(one, field) for one in files], object), return_inverse=True)[1]
        for field in ("label", "client")
    )
    test = held_out_rows(len(files), fraction, clients, labels, seed)
    return [[one for one, held in zip(files, test.tolist(), strict=True) if held is part] for part in (False, True)]


def _check(folder: Path, classes: tuple[str, ...], test: list[_File]) -> None:
    """Raise an error if there is one class only, or a test image of another class."""
    if len(classes) < 2:
        raise DataError(
            f"{folder}: one class only, {visible(classes[0], 40)!r}; expected a folder for each of two or more"
        )
    known = set(classes)
    for one in test:
        if one.label not in known:
            given = visible(", ".join(classes), 80)
            raise DataError(f"{one.path}: class {visible(one.label, 40)!r} has no training images (classes: {given})")


def _pixels(files: list[_File], shape: ImageShape) -> Tensor:
    return read_images(((one.path, str(one.path)) for one in files), len(files), shape)


def _codes(files: list[_File], field: str, names: tuple[str, ...]) -> Tensor:
    position = {name: i for i, name in enumerate(names)}
    return torch.tensor([position[getattr(one, field)] for one in files])
