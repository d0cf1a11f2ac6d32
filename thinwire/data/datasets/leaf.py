"""Data sets in the folders that LEAF's scripts leave: `data/train/*.json` and `data/test/*.json`, sorted by user.

Looked for in `femnist/data`, `sent140/data` and `shakespeare/data`, or under `leaf/data`. These loaders are written to
the published layout and tested with records made up in it: no result was measured on the real data.

Caldas et al., LEAF: a benchmark for federated settings, 2018.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.errors import DataError
from thinwire.data import hub
from thinwire.data.examples import Arrays, Images, Source, Windows
from thinwire.data.folder import find
from thinwire.data.datasets.leaf_json import halves, people, samples
from thinwire.data.reading import class_tensor
from thinwire.data.datasets.shakespeare import ALPHABET, Half, Text
from thinwire.data.vocabulary import Vocabulary, words

_PAPER = "Caldas et al., LEAF: a benchmark for federated settings, 2018"
_TWEET = 4  # the column of a tweet's text, after its number, date, query and writer


@register(
    "dataset",
    "femnist",
    doc="Handwritten letters and digits of 28x28 by writer, 62 classes, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def femnist(data_dir: Path | None = None) -> Source:
    """Letters and digits, one user a writer; pixels as in the files, where paper is 1."""
    names: dict[str, int] = {}
    parts = []
    for files in halves(_folder("femnist", data_dir)):
        pixels, labels, users = [], [], []
        for path in files:
            for name, record in people(path):
                x, y = samples(path, name, record)
                if x:
                    pixels.append(_bytes(path, name, x))
                    labels.append(_whole(path, name, y, 62))
                    users.append(np.full(len(x), names.setdefault(name, len(names))))
        _check_any(files[0], pixels)
        images = torch.from_numpy(np.concatenate(pixels))
        parts.append((Images(images, torch.cat(labels)), torch.from_numpy(np.concatenate(users))))
    (train, users_), (test, test_users) = parts
    return Source(train, test, 62, users_, test_users)


@register(
    "dataset",
    "sent140",
    doc="Tweets by user, glad or sad, 40 words, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def sent140(data_dir: Path | None = None) -> Source:
    """Is a tweet glad (1) or sad (0)? One user a writer."""
    names: dict[str, int] = {}
    parts = []
    for files in halves(_folder("sent140", data_dir)):
        texts: list[tuple[list[str]]] = []
        labels: list[Tensor] = []
        users: list[int] = []
        for path in files:
            for name, record in people(path):
                x, y = samples(path, name, record)
                texts += [(words(_tweet(path, name, row)),) for row in x]
                # the original files write 4 for glad, LEAF 1
                labels.append(_whole(path, name, [1 if str(mark) == "4" else mark for mark in y], 2))
                users += [names.setdefault(name, len(names))] * len(x)
        _check_any(files[0], texts)
        parts.append((texts, torch.cat(labels), torch.tensor(users)))
    vocabulary = Vocabulary.of(text for (text,) in parts[0][0])
    train, test = (Arrays(torch.from_numpy(vocabulary.rows(texts, 40)), labels) for texts, labels, _ in parts)
    return Source(train, test, 2, parts[0][2], parts[1][2])


@register(
    "dataset",
    "shakespeare-leaf",
    doc="Next character after 80, by role, in LEAF's own split and layout (no result was measured).",
    paper=_PAPER,
)
def shakespeare_leaf(data_dir: Path | None = None) -> Source:
    """As `shakespeare`, from the train and test files of LEAF itself."""
    names: dict[str, int] = {}
    parts: list[tuple[Windows, Tensor]] = []
    for files in halves(_folder("shakespeare", data_dir)):
        text, half = Text(), Half()
        for path in files:
            for name, record in people(path):
                half.add(text.add_samples(path, name, record), names.setdefault(name, len(names)))
        _check_any(files[0], half)
        parts.append((half.windows(text.codes()), half.users()))
    (train, users), (test, test_users) = parts
    return Source(train, test, len(ALPHABET), users, test_users)


def _folder(name: str, data_dir: Path | None) -> Path:
    folder = find(data_dir, f"{name}/data", f"leaf/data/{name}/data", f"leaf/{name}/data")
    if folder is None:
        task = "shakespeare-leaf" if name == "shakespeare" else name
        raise hub.missing(task, f"LEAF's {name}/data/train/*.json and {name}/data/test/*.json")
    return folder


def _bytes(path: Path, name: str, rows: list[Any]) -> np.ndarray:
    """Pictures of numbers in [0, 1] as (n, 1, 28, 28) bytes; the files were made from bytes, so nothing is lost."""
    try:
        values = np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.empty(0)
    if values.shape != (len(rows), 784):
        raise DataError(f"{path}: pictures of user {name[:60]!r} are not rows of 784 numbers, as expected")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"{path}: pictures of user {name[:60]!r} have a number outside 0 to 1")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _whole(path: Path, name: str, marks: list[Any], classes: int) -> Tensor:
    """Class numbers, which some versions of the files write as text."""
    if not all(isinstance(mark, int | str) and str(mark).isascii() and str(mark).isdigit() for mark in marks):
        raise DataError(f"{path}: an answer of user {name[:60]!r} is not a class number from 0 to {classes - 1}")
    numbers = [min(int(str(mark)[:9]), classes) for mark in marks]
    return class_tensor(np.array(numbers, np.int64), classes, path)


def _tweet(path: Path, name: str, row: Any) -> str:
    text = row[_TWEET] if isinstance(row, list) and len(row) > _TWEET else row
    if not isinstance(text, str):
        raise DataError(f"{path}: a tweet of user {name[:60]!r} is neither text nor a row with text in column 5")
    return text


def _check_any(path: Path, found: Any) -> None:
    if not len(found):
        raise DataError(f"{path.parent}: the files hold no examples")
