"""CIFAR-10 and CIFAR-100: 32x32 color images, from the official binary files or from JPEG sheets.

    binary  `cifar-10-batches-bin/data_batch_1.bin` ...   a record is the label, then 1,024 red, green, blue bytes each
            `cifar-100-binary/train.bin`, `test.bin`      a record is the coarse label, the fine label, then the same
    sheets  `cifar10/data_batch_1.jpg` ..., `labels.bin`  100 x 100 images per sheet, row by row; labels in one file

The official Python files are pickles, which can run code when they are opened; they are not read.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.cache import cached
from thinwire.data.examples import Images, Source
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, one_line, read_bytes
from thinwire.errors import DataError

_PIXELS = 3 * 32 * 32
_BATCH = 10_000
_SIDE = 100  # images in a row of a sheet
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_LOSSY = "Pixels come from JPEG sheets, not the original files: lossy, PSNR 41.7 dB, in train and test alike."
# mean and standard deviation of red, green, blue over the 50,000 training images, from the original files
_MEAN_10, _STD_10 = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
_MEAN_100, _STD_100 = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)  # as published
_PAPER = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"


@register("dataset", "cifar10", doc="50,000 + 10,000 color images of 32x32, 10 classes.", paper=_PAPER)
def cifar10(data_dir: Path | None = None) -> Source:
    """Color images in 10 classes, with values in [0, 1]."""
    return replace(_cifar10(data_dir), mean=_MEAN_10, std=_STD_10)


def _cifar10(data_dir: Path | None) -> Source:
    folder = find(data_dir, "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-py")
    if folder is None:
        layout = "cifar-10-batches-bin/data_batch_1.bin ... test_batch.bin"
        return hub.image_dataset("cifar10", "uoft-cs/cifar10", ("img", "label"), layout, (32, 32, 3), classes=10)
    if (folder / "data_batch_1.jpg").is_file() and not (folder / "data_batch_1.bin").is_file():
        return _from_sheets(folder)
    _check_no_pickles(folder, "data_batch_1", "cifar-10-binary.tar.gz")
    paths = [pick(folder, f"{name}.bin") for name in _BATCHES]
    batches = [_records(path, _BATCH, header=1) for path in paths]
    labels = [class_tensor(head[:, 0], 10, path) for (head, _), path in zip(batches, paths, strict=True)]
    pixels = torch.from_numpy(np.concatenate([rows for _, rows in batches[:-1]]))
    test = torch.from_numpy(batches[-1][1])
    return Source(Images(pixels, torch.cat(labels[:-1])), Images(test, labels[-1]), classes=10)


@register(
    "dataset",
    "cifar100",
    doc="50,000 + 10,000 color images of 32x32, 100 classes (no result was measured with it).",
    paper=_PAPER,
)
def cifar100(data_dir: Path | None = None) -> Source:
    """Color images in 100 classes, with values in [0, 1]; the 20 coarse labels are not used.

    Implemented from the published layout and tested with synthetic records: no result was measured on the real files.
    """
    return replace(_cifar100(data_dir), mean=_MEAN_100, std=_STD_100)


def _cifar100(data_dir: Path | None) -> Source:
    folder = find(data_dir, "cifar-100-binary", "cifar100/cifar-100-binary", "cifar100", "cifar-100-python")
    if folder is None:
        layout = "cifar-100-binary/train.bin and test.bin"
        return hub.image_dataset(
            "cifar100", "uoft-cs/cifar100", ("img", "fine_label"), layout, (32, 32, 3), classes=100
        )
    _check_no_pickles(folder, "train", "cifar-100-binary.tar.gz")
    parts = []
    for name, count in (("train.bin", 5 * _BATCH), ("test.bin", _BATCH)):
        path = pick(folder, name)
        head, rows = _records(path, count, header=2)
        class_tensor(head[:, 0], 20, path)
        parts.append(Images(torch.from_numpy(rows.copy()), class_tensor(head[:, 1], 100, path)))
    return Source(parts[0], parts[1], classes=100)


def _records(path: Path, count: int, header: int) -> tuple[np.ndarray, np.ndarray]:
    """Label bytes (count, header) and pixels (count, 3, 32, 32) of a binary file."""
    each = header + _PIXELS
    data = read_bytes(path, count * each)
    if len(data) != count * each:
        raise DataError(f"{path}: {len(data)} bytes, expected {count * each} for {count} images")
    rows = np.frombuffer(data, np.uint8).reshape(count, each)
    return rows[:, :header], np.ascontiguousarray(rows[:, header:]).reshape(count, 3, 32, 32)


def _check_no_pickles(folder: Path, first: str, instead: str) -> None:
    if (folder / first).is_file() and not (folder / f"{first}.bin").is_file():
        raise DataError(f"{folder / first}: a pickle, which can run code and is not opened; get {instead} instead")


# -- sheets ----------------------------------------------------------------------------------------------------------


def _from_sheets(folder: Path) -> Source:
    paths = [pick(folder, f"{name}.jpg") for name in _BATCHES]
    labels = pick(folder, "labels.bin")
    values = np.frombuffer(read_bytes(labels, len(paths) * _BATCH), np.uint8)
    if len(values) != len(paths) * _BATCH:
        raise DataError(f"{labels}: {len(values)} bytes, expected {len(paths) * _BATCH}, one label per image")
    targets = class_tensor(values, 10, labels)
    shape = (len(paths) * _BATCH, 3, 32, 32)
    arrays = cached(
        "cifar10-v1",
        paths,
        make=lambda: {"pixels": np.concatenate([_sheet(path) for path in paths])},
        fits=lambda found: {n: (a.dtype.name, a.shape) for n, a in found.items()} == {"pixels": ("uint8", shape)},
    )
    pixels = torch.from_numpy(arrays["pixels"])
    train = Images(pixels[:-_BATCH], targets[:-_BATCH])
    return Source(train, Images(pixels[-_BATCH:], targets[-_BATCH:]), classes=10, note=_LOSSY)


def _sheet(path: Path) -> np.ndarray:
    """The (10000, 3, 32, 32) images of a sheet; its size is checked before it is decoded."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{path}: reading JPEG needs Pillow: pip install 'thinwire[data]'") from None
    try:
        with warnings.catch_warnings(action="error"), Image.open(path, formats=("JPEG",)) as sheet:
            if sheet.size != (32 * _SIDE, 32 * _SIDE) or sheet.mode != "RGB":
                raise DataError(
                    f"{path}: an image of {sheet.size[0]}x{sheet.size[1]} {sheet.mode}, "
                    f"expected {32 * _SIDE}x{32 * _SIDE} RGB"
                )
            pixels = np.asarray(sheet)
    except (OSError, ValueError, SyntaxError, Warning, Image.DecompressionBombError) as fault:
        raise DataError(f"{path}: not a complete JPEG image ({one_line(fault)})") from None
    return pixels.reshape(_SIDE, 32, _SIDE, 32, 3).transpose(0, 2, 4, 1, 3).reshape(_BATCH, 3, 32, 32)
