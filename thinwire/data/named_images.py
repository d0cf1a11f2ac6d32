"""Named datasets of images: digits, MNIST and Fashion-MNIST, CIFAR-10 and CIFAR-100, FEMNIST.

    digits   1,797 images of 8x8 that come with scikit-learn, without a download; the default task
    MNIST    IDX files, gzipped or not, in `mnist` and `fashion-mnist` or in the folders of torchvision (`MNIST/raw`)
             images: 2051, count, 28, 28 as big-endian int32, then count * 784 bytes
             labels: 2049, count, then count bytes
    CIFAR-10 `cifar-10-batches-bin/data_batch_1.bin` ...   a record is the label, then 1,024 red, green, blue bytes each
             `cifar10/data_batch_1.jpg` ..., `labels.bin`  sheets of 100 x 100 images, row by row; labels in one file

Without these files MNIST and CIFAR-10 come from the Hugging Face hub, CIFAR-100 and FEMNIST always do. The official
Python files of CIFAR are pickles, which can run code when they are opened; they are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.key import Key
from thinwire.core.registry import register
from thinwire.data.cache import cached
from thinwire.data.examples import Arrays, Images, Source
from thinwire.data.files import class_tensor, find, pick, read_bytes
from thinwire.data.huggingface import download_images
from thinwire.data.images import open_image
from thinwire.errors import DataError

_MAX_IMAGES = 100_000  # images of a split of MNIST; it has 60,000
_FILE_IMAGES = 10_000  # images of a file of CIFAR-10
_SHEET_SIDE = 100  # images in a row of a sheet
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_LOSSY = "Pixels come from JPEG sheets, not the original files: lossy, PSNR 41.7 dB, in train and test alike."
_KRIZHEVSKY = "Krizhevsky, Learning multiple layers of features from tiny images, 2009"


@register(
    "dataset",
    "digits",
    doc="1,797 handwritten digits of 8x8 from scikit-learn; needs no files.",
    paper="Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI repository, 1998",
)
def digits(data_dir: Path | None = None) -> Source:
    """Handwritten digits, with 17 gray levels scaled to [0, 1]; no files are needed.

    A fifth of the examples of each class, drawn with a constant seed, is the test set.

    >>> source = digits()
    >>> len(source.train), len(source.test), source.classes
    (1438, 359, 10)
    """
    package: Any = find_spec("sklearn")  # not imported: that takes longer than training on its digits
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    labels = table[:, -1].astype(np.int64)
    test = np.zeros(len(labels), bool)
    for k in range(10):
        members = np.flatnonzero(labels == k)
        shuffled = members[Key(0).fold("digits", k).permutation(len(members)).numpy()]
        test[shuffled[: round(len(members) / 5)]] = True
    inputs = torch.from_numpy((table[:, :-1] / 16).astype(np.float32)).view(-1, 1, 8, 8)  # multiples of 1/16: exact
    targets, train = torch.from_numpy(labels), torch.from_numpy(~test)
    parts = [Arrays(inputs[which], targets[which]) for which in (train, ~train)]
    return Source(parts[0], parts[1], classes=10, mean=(0.30538223,), std=(0.37601014,))


# -- MNIST -----------------------------------------------------------------------------------------------------------


def _mnist(
    task: str, doc: str, paper: str, torchvision: str, hub: str, mean: float, std: float
) -> Callable[..., Source]:
    """The loader of a dataset in the files of MNIST, registered."""

    @register("dataset", task, doc=doc, paper=paper)
    def read(data_dir: Path | None = None) -> Source:
        folder = find(data_dir, task, f"{torchvision}/raw", torchvision)
        if folder is None:
            layout = f"{task}/train-images-idx3-ubyte.gz and the three other IDX files"
            source = download_images(task, hub, "image", "label", layout)
        else:
            source = Source(_idx_images(folder, "train"), _idx_images(folder, "t10k"), classes=10)
        return replace(source, mean=(mean,), std=(std,))

    return read


mnist = _mnist(
    "mnist",
    "60,000 + 10,000 handwritten digits of 28x28, 10 classes.",
    "LeCun et al., Gradient-based learning applied to document recognition, 1998",
    torchvision="MNIST",
    hub="ylecun/mnist",
    mean=0.13066048,
    std=0.30810780,
)
fashion_mnist = _mnist(
    "fashion-mnist",
    "60,000 + 10,000 images of clothing of 28x28, 10 classes.",
    "Xiao et al., Fashion-MNIST, 2017",
    torchvision="FashionMNIST",
    hub="zalando-datasets/fashion_mnist",
    mean=0.28604060,
    std=0.35302424,
)


def _idx_images(folder: Path, prefix: str) -> Images:
    """The images and labels of a split."""
    ends = [f"{mark}idx{{}}-ubyte{end}" for mark in "-." for end in (".gz", "")]
    pixels = read_idx(pick(folder, *(f"{prefix}-images{end.format(3)}" for end in ends)), (28, 28))
    path = pick(folder, *(f"{prefix}-labels{end.format(1)}" for end in ends))
    labels = read_idx(path, ())
    if len(pixels) != len(labels):
        raise DataError(f"{path}: {len(labels)} labels, expected {len(pixels)}, one per image")
    return Images(torch.from_numpy(pixels)[:, None], class_tensor(labels, 10, path))


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array in an IDX file of bytes, of examples of this shape."""
    head, each = 8 + 4 * len(shape), math.prod(shape)
    data = read_bytes(path, head + _MAX_IMAGES * each)
    count = (len(data) - head) // each
    header = np.array([2049 + len(shape), max(count, 0), *shape], ">u4").tobytes()
    if count < 1 or len(data) != head + count * each or data[:head] != header:
        raise DataError(
            f"{path}: {len(data)} bytes that are no IDX file; expected the header {2049 + len(shape)}, count, "
            f"{', '.join(map(str, shape)) or 'nothing more'}, then {each} bytes for each example"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(count, *shape).copy()


# -- CIFAR -----------------------------------------------------------------------------------------------------------


@register("dataset", "cifar10", doc="50,000 + 10,000 color images of 32x32, 10 classes.", paper=_KRIZHEVSKY)
def cifar10(data_dir: Path | None = None) -> Source:
    """Color images in 10 classes, with values in [0, 1]."""
    folder = find(data_dir, "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-py")
    if folder is None:
        layout = "cifar-10-batches-bin/data_batch_1.bin ... test_batch.bin"
        source = download_images("cifar10", "uoft-cs/cifar10", "img", "label", layout)
    else:
        first = folder / "data_batch_1"
        sheets = first.with_suffix(".jpg").is_file() and not first.with_suffix(".bin").is_file()
        pixels, labels, note = _of_sheets(folder) if sheets else _of_records(folder)
        split = len(pixels) - _FILE_IMAGES
        train, test = (Images(pixels[part], labels[part]) for part in (slice(split), slice(split, None)))
        source = Source(train, test, classes=10, note=note)
    # mean and standard deviation of red, green, blue over the 50,000 training images, from the original files
    mean, std = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
    return replace(source, mean=mean, std=std)


@register(
    "dataset",
    "cifar100",
    doc="50,000 + 10,000 color images of 32x32, 100 classes, from the hub (no result was measured with it).",
    paper=_KRIZHEVSKY,
)
def cifar100(data_dir: Path | None = None) -> Source:
    """Color images in 100 classes; the 20 coarse labels are not used."""
    return download_images("cifar100", "uoft-cs/cifar100", "img", "fine_label")


@register(
    "dataset",
    "femnist",
    doc="Handwritten letters and digits of 28x28 by writer, 62 classes, from the hub (no result was measured).",
    paper="Caldas et al., LEAF: a benchmark for federated settings, 2018",
)
def femnist(data_dir: Path | None = None) -> Source:
    """Handwritten letters and digits, one user per writer; a fifth of the images of each is the test set."""
    return download_images("femnist", "flwrlabs/femnist", "image", "character", client="writer_id")


def _of_records(folder: Path) -> tuple[Tensor, Tensor, str]:
    """The images and labels of the official binary files."""
    if (folder / "data_batch_1").is_file() and not (folder / "data_batch_1.bin").is_file():
        raise DataError(
            f"{folder / 'data_batch_1'}: a pickle, which can run code and is not opened; get cifar-10-binary.tar.gz"
        )
    files = [pick(folder, f"{name}.bin") for name in _BATCHES]
    rows = [_bytes(file, _FILE_IMAGES * 3073).reshape(-1, 3073) for file in files]
    labels = [class_tensor(one[:, 0], 10, file) for one, file in zip(rows, files, strict=True)]
    pixels = np.concatenate([one[:, 1:] for one in rows]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.cat(labels), ""


def _of_sheets(folder: Path) -> tuple[Tensor, Tensor, str]:
    """The images and labels of JPEG sheets, and what to know about them."""
    paths, labels = [pick(folder, f"{name}.jpg") for name in _BATCHES], pick(folder, "labels.bin")
    targets = class_tensor(_bytes(labels, len(paths) * _FILE_IMAGES), 10, labels)
    pixels = cached("cifar10-v2", paths, lambda: torch.from_numpy(np.concatenate([*map(_sheet, paths)])))
    return pixels, targets, _LOSSY


def _bytes(path: Path, size: int) -> np.ndarray:
    data = read_bytes(path, size)
    if len(data) != size:
        raise DataError(f"{path}: {len(data)} bytes, expected {size} for {_FILE_IMAGES} images in each file")
    return np.frombuffer(data, np.uint8)


def _sheet(path: Path) -> np.ndarray:
    """The (10000, 3, 32, 32) images of a sheet."""
    sheet, side = open_image(path), 32 * _SHEET_SIDE
    if sheet.size != (side, side) or sheet.mode != "RGB":
        raise DataError(f"{path}: an image of {sheet.size} {sheet.mode}, expected {side}x{side} RGB")
    pixels = np.asarray(sheet).reshape(_SHEET_SIDE, 32, _SHEET_SIDE, 32, 3)
    return pixels.transpose(0, 2, 4, 1, 3).reshape(_FILE_IMAGES, 3, 32, 32)
