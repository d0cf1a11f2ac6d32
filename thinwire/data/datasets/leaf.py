"""Datasets from the output of LEAF's scripts: `data/train/*.json` and `data/test/*.json`, grouped by user.

Read from `femnist/data`, `sent140/data` and `shakespeare/data`, or the same under `leaf/data`. These loaders are
implemented from the published layout and tested with synthetic records: no result was measured on the real data.

Caldas et al., LEAF: a benchmark for federated settings, 2018.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.datasets.leaf_json import read_users, samples, split_files
from thinwire.data.datasets.shakespeare import ALPHABET, TextBuilder, WindowBuilder
from thinwire.data.examples import Arrays, Images, Source, TextWindows
from thinwire.data.folder import find
from thinwire.data.reading import class_tensor
from thinwire.data.vocabulary import Vocabulary, words
from thinwire.errors import DataError

_PAPER = "Caldas et al., LEAF: a benchmark for federated settings, 2018"
# mean and standard deviation of FEMNIST's training images as published for LEAF's files, where the background is 1;
# published values of the second are from 0.155 to 0.160, depending on the sample of writers
_MEAN, _STD = (0.9637,), (0.1592,)
_TWEET = 4  # the column of a tweet's text, after id, date, query and user


@register(
    "dataset",
    "femnist",
    doc="Handwritten letters and digits of 28x28 by writer, 62 classes, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def femnist(data_dir: Path | None = None) -> Source:
    """Handwritten letters and digits, one user per writer; pixels as in the files, where the background is 1."""
    user_ids: dict[str, int] = {}
    parts = []
    for files in split_files(_folder("femnist", data_dir)):
        pixels, labels, users = [], [], []
        for path in files:
            for name, record in read_users(path):
                x, y = samples(path, name, record)
                if x:
                    pixels.append(_bytes(path, name, x))
                    labels.append(_labels(path, name, y, 62))
                    users.append(np.full(len(x), user_ids.setdefault(name, len(user_ids))))
        _check_any(files[0], pixels)
        images = torch.from_numpy(np.concatenate(pixels))
        parts.append((Images(images, torch.cat(labels)), torch.from_numpy(np.concatenate(users))))
    (train, users_), (test, test_users) = parts
    return Source(train, test, 62, users_, test_users, mean=_MEAN, std=_STD)


@register(
    "dataset",
    "sent140",
    doc="Tweets by user, positive or negative, 40 words, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def sent140(data_dir: Path | None = None) -> Source:
    """Sentiment of tweets: positive (1) or negative (0), one user per author."""
    user_ids: dict[str, int] = {}
    parts = []
    for files in split_files(_folder("sent140", data_dir)):
        texts: list[tuple[list[str]]] = []
        labels: list[Tensor] = []
        users: list[int] = []
        for path in files:
            for name, record in read_users(path):
                x, y = samples(path, name, record)
                texts += [(words(_tweet(path, name, row)),) for row in x]
                # positive is 4 in the original files, 1 in LEAF
                labels.append(_labels(path, name, [1 if str(label) == "4" else label for label in y], 2))
                users += [user_ids.setdefault(name, len(user_ids))] * len(x)
        _check_any(files[0], texts)
        parts.append((texts, torch.cat(labels), torch.tensor(users)))
    vocabulary = Vocabulary.of(text for (text,) in parts[0][0])
    train, test = (Arrays(torch.from_numpy(vocabulary.rows(texts, 40)), labels) for texts, labels, _ in parts)
    return Source(train, test, 2, parts[0][2], parts[1][2])


@register(
    "dataset",
    "shakespeare-leaf",
    doc="Next character after 80, by role, in LEAF's train/test split and layout (no result was measured).",
    paper=_PAPER,
)
def shakespeare_leaf(data_dir: Path | None = None) -> Source:
    """As `shakespeare`, from the training and test files of LEAF."""
    user_ids: dict[str, int] = {}
    parts: list[tuple[TextWindows, Tensor]] = []
    for files in split_files(_folder("shakespeare", data_dir)):
        text, windows = TextBuilder(), WindowBuilder()
        for path in files:
            for name, record in read_users(path):
                windows.add(text.add_samples(path, name, record), user_ids.setdefault(name, len(user_ids)))
        _check_any(files[0], windows)
        parts.append((windows.examples(text.codes()), windows.users()))
    (train, users), (test, test_users) = parts
    return Source(train, test, len(ALPHABET), users, test_users)


def _folder(name: str, data_dir: Path | None) -> Path:
    folder = find(data_dir, f"{name}/data", f"leaf/data/{name}/data", f"leaf/{name}/data")
    if folder is None:
        task = "shakespeare-leaf" if name == "shakespeare" else name
        raise hub.missing(task, f"LEAF's {name}/data/train/*.json and {name}/data/test/*.json")
    return folder


def _bytes(path: Path, name: str, rows: list[Any]) -> np.ndarray:
    """Images with values in [0, 1] as (n, 1, 28, 28) bytes; lossless, since the files were made from bytes."""
    try:
        values = np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.empty(0)
    if values.shape != (len(rows), 784):
        raise DataError(f"{path}: images of user {name[:60]!r} are not rows of 784 values, as expected")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"{path}: images of user {name[:60]!r} have a value outside 0 to 1")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _labels(path: Path, name: str, values: list[Any], classes: int) -> Tensor:
    """Class labels, which some versions of the files write as strings."""
    if not all(isinstance(value, int | str) and str(value).isascii() and str(value).isdigit() for value in values):
        raise DataError(f"{path}: a label of user {name[:60]!r} is not an integer from 0 to {classes - 1}")
    labels = [min(int(str(value)[:9]), classes) for value in values]
    return class_tensor(np.array(labels, np.int64), classes, path)


def _tweet(path: Path, name: str, row: Any) -> str:
    text = row[_TWEET] if isinstance(row, list) and len(row) > _TWEET else row
    if not isinstance(text, str):
        raise DataError(f"{path}: a tweet of user {name[:60]!r} is neither text nor a row with text in column 5")
    return text


def _check_any(path: Path, found: Any) -> None:
    if not len(found):
        raise DataError(f"{path.parent}: the files have no examples")
