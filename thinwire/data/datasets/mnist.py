"""MNIST and Fashion-MNIST in their original IDX files.

    images: 2051, count, 28, 28 as big-endian int32, then count * 784 bytes
    labels: 2049, count, then count bytes

Files may be gzipped or not, in `mnist` and `fashion-mnist` or in the folders of torchvision (`MNIST/raw`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.examples import Images, Source
from thinwire.data.folder import find, pick
from thinwire.data.reading import class_tensor, read_bytes
from thinwire.errors import DataError

_SIDE = 28
_MOST = 100_000  # images; the datasets have 60,000


@register(
    "dataset",
    "mnist",
    doc="60,000 + 10,000 handwritten digits of 28x28, 10 classes.",
    paper="LeCun et al., Gradient-based learning applied to document recognition, 1998",
)
def mnist(data_dir: Path | None = None) -> Source:
    """Handwritten digits, 28x28 gray, with values in [0, 1]."""
    source = _source("mnist", "MNIST", "ylecun/mnist", data_dir)
    return replace(source, mean=(0.13066048,), std=(0.30810780,))


@register(
    "dataset",
    "fashion-mnist",
    doc="60,000 + 10,000 images of clothing of 28x28, 10 classes.",
    paper="Xiao et al., Fashion-MNIST, 2017",
)
def fashion_mnist(data_dir: Path | None = None) -> Source:
    """Images of clothing, 28x28 gray, with values in [0, 1]."""
    source = _source("fashion-mnist", "FashionMNIST", "zalando-datasets/fashion_mnist", data_dir)
    return replace(source, mean=(0.28604060,), std=(0.35302424,))


def _source(task: str, torchvision: str, name: str, data_dir: Path | None) -> Source:
    folder = find(data_dir, task, f"{torchvision}/raw", torchvision)
    if folder is None:
        layout = f"{task}/train-images-idx3-ubyte.gz and the three other IDX files"
        return hub.image_dataset(task, name, ("image", "label"), layout, (_SIDE, _SIDE), classes=10)
    return Source(_split(folder, "train"), _split(folder, "t10k"), classes=10)


def _split(folder: Path, prefix: str) -> Images:
    images = _file(folder, f"{prefix}-images", "idx3-ubyte")
    labels = _file(folder, f"{prefix}-labels", "idx1-ubyte")
    pixels = read_idx(images, 2051, (_SIDE, _SIDE))
    values = read_idx(labels, 2049, ())
    if len(pixels) != len(values):
        raise DataError(f"{labels}: {len(values)} labels, expected {len(pixels)}, one per image")
    return Images(torch.from_numpy(pixels)[:, None], class_tensor(values, 10, labels))


def _file(folder: Path, stem: str, kind: str) -> Path:
    return pick(folder, f"{stem}-{kind}.gz", f"{stem}-{kind}", f"{stem}.{kind}.gz", f"{stem}.{kind}")


def read_idx(path: Path, magic: int, shape: tuple[int, ...]) -> np.ndarray:
    """The array in an IDX file of bytes.

    Args:
        path: the file, gzipped if its name ends in .gz.
        magic: the expected magic number.
        shape: the expected shape of an example.
    """
    rank = 1 + len(shape)
    each = int(np.prod(shape, dtype=np.int64))
    data = read_bytes(path, 4 + 4 * rank + _MOST * each)
    if len(data) < 4 + 4 * rank:
        raise DataError(f"{path}: {len(data)} bytes, expected an IDX header of {4 + 4 * rank}")
    found, count, *dims = np.frombuffer(data, ">u4", 1 + rank).tolist()
    if found != magic:
        raise DataError(f"{path}: begins with {found}, expected the IDX number {magic}")
    if tuple(dims) != shape:
        raise DataError(f"{path}: examples have the shape {tuple(dims)}, expected {shape}")
    body = len(data) - 4 - 4 * rank
    if count == 0 or body != count * each:
        raise DataError(f"{path}: {body} bytes follow the header, expected {count * each} for {count} examples")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(count, *shape).copy()
