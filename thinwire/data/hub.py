"""Download of datasets from the Hugging Face hub, with the `datasets` library.

The library is an optional dependency. Without it, or without a network, the error message says where to put the files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinwire.data.examples import Images, Source
from thinwire.data.folder import VARIABLE
from thinwire.data.reading import class_tensor, one_line
from thinwire.errors import DataError


def missing(task: str, layout: str) -> DataError:
    """The error for a dataset that is not on the hub."""
    return DataError(f"{task}: no data found; {_advice(layout)}")


def columns(
    task: str,
    name: str,
    wanted: tuple[str, ...],
    layout: str,
    config: str | None = None,
    splits: tuple[str, str] = ("train", "test"),
) -> list[list[list[Any]]]:
    """Columns of a dataset on the hub, as lists: one list of columns for each split.

    Args:
        task: the name of the task, for errors.
        name: owner/name on the hub.
        wanted: names of the columns.
        layout: the local files that would be read instead, for errors.
        config: the configuration (subset) of the dataset.
        splits: names of the training and the test split.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        advice = f"{_advice(layout)}, or install the downloader: pip install 'thinwire[data]'"
        raise DataError(f"{task}: no data found; {advice}") from None
    try:
        parts = load_dataset(name, config) if config else load_dataset(name)
        return [[list(parts[split][column]) for column in wanted] for split in splits]
    except Exception as fault:  # the type depends on the version: network, proxy, disk, renamed dataset or column
        raise DataError(f"{task}: download of {name} failed ({one_line(fault)}); {_advice(layout)}") from None


def texts(
    task: str,
    name: str,
    wanted: tuple[str, ...],
    layout: str,
    config: str | None = None,
    splits: tuple[str, str] = ("train", "test"),
) -> list[tuple[list[tuple[str, ...]], np.ndarray]]:
    """The texts of each example and its label, for each split; the last of the wanted columns is the label."""
    out = []
    for *lists, labels in columns(task, name, wanted, layout, config, splits):
        for column, entries in zip(wanted, lists, strict=False):
            if not all(isinstance(entry, str) for entry in entries):
                raise DataError(f"{name}: column {column!r} has values that are not text")
        out.append((list(zip(*lists, strict=True)), np.asarray(labels)))
    return out


def image_dataset(
    task: str, name: str, wanted: tuple[str, str], layout: str, shape: tuple[int, ...], classes: int
) -> Source:
    """A dataset of images from the hub; `shape` is that of one image, (height, width) or (height, width, 3)."""
    parts = []
    for images, labels in columns(task, name, wanted, layout):
        pixels = np.empty((len(images), *shape), np.uint8)
        for i, image in enumerate(images):
            found = np.asarray(image)
            if found.shape != shape or found.dtype != np.uint8:
                raise DataError(f"{name}: image {i} is {found.dtype} {found.shape}, expected uint8 {shape}")
            pixels[i] = found
        tensor = torch.from_numpy(pixels)
        tensor = tensor[:, None] if len(shape) == 2 else tensor.permute(0, 3, 1, 2).contiguous()
        parts.append(Images(tensor, class_tensor(np.asarray(labels), classes, name)))
    return Source(parts[0], parts[1], classes, note=f"Downloaded from the Hugging Face hub ({name}).")


def _advice(layout: str) -> str:
    return f"put {layout} into a folder and give that folder with --data-dir or {VARIABLE}"
