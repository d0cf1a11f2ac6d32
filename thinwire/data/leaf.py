"""Datasets of LEAF, by user: Shakespeare by speaking role, FEMNIST, Sent140.

    {"users": [name, ...], "num_samples": [count, ...], "user_data": {name: {"x": [...], "y": [...]}}}

shakespeare: prediction of the next character after 80 characters of a role. Read from `shakespeare/all_data.json.gz`,
with the whole text of each role under "raw" in place of "x" and "y"; line ends are spaces, and several spaces are one.
Windows begin at every character. The first 80 % of a role's windows are the training set and the rest the test set,
without the 80 windows in between, which share characters with both.

femnist, sent140, shakespeare-leaf: the output of LEAF's scripts, `data/train/*.json` and `data/test/*.json`, in
`femnist/data`, `sent140/data` and `shakespeare/data`, or the same under `leaf/data`. These loaders are implemented from
the published layout and tested with synthetic records: no result was measured on the real data.

Caldas et al., LEAF: a benchmark for federated settings, 2018.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data.examples import Arrays, Images, Source, TextWindows
from thinwire.data.files import class_tensor, find, no_data, pick, read_json_object
from thinwire.data.text import Vocabulary, words
from thinwire.errors import DataError

# The 80 characters of LEAF. Line ends are replaced in all texts, so the code of a line end is used for unknown ones.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
_RAW = "Roles come from the mark-up of the text; this is not LEAF's file, which has 1,129 users."
_PAPER = "Caldas et al., LEAF: a benchmark for federated settings, 2018"
_LIMIT = 1 << 31  # bytes of one file
_TWEET = 4  # the column of a tweet's text, after id, date, query and user

Windows = tuple[np.ndarray, int]  # starts of windows, and the user of these

_CODES = np.zeros(256, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


@register(
    "dataset",
    "shakespeare",
    doc="Next character after 80, by speaking role (1,074 of them); 80 characters.",
    paper="Caldas et al., LEAF, 2018; McMahan et al., AISTATS 2017",
)
def shakespeare(data_dir: Path | None = None) -> Source:
    """Next character of the lines of a role, one user per role."""
    folder = find(data_dir, "shakespeare")
    names = ("all_data.json", "all_data.json.gz")
    if folder is None or not any((folder / name).is_file() for name in names):
        raise no_data("shakespeare", "shakespeare/all_data.json.gz")
    path, text = pick(folder, *names), TextBuilder()
    train, test = list[Windows](), list[Windows]()
    for user, (name, record) in enumerate(_users(path)):
        starts = text.add_raw(f"{path}: user {name[:60]!r}", record.get("raw"))
        cut = max(1, int(0.8 * len(starts)))
        train.append((starts[:cut], user))
        test.append((starts[cut + LENGTH :], user))
    if not all(any(len(starts) for starts, _ in part) for part in (train, test)):
        raise DataError(f"{path}: no role has enough text for training and test windows of {LENGTH} characters")
    codes = text.codes()
    (first, users), (second, test_users) = _examples(codes, train), _examples(codes, test)
    return Source(first, second, len(ALPHABET), users, test_users, note=_RAW)


def _examples(codes: Tensor, windows: list[Windows]) -> tuple[TextWindows, Tensor]:
    """Windows of a text as examples, and the user of each."""
    starts = np.concatenate([some for some, _ in windows])
    users = np.repeat([user for _, user in windows], [len(some) for some, _ in windows])
    return TextWindows(codes, torch.from_numpy(starts), LENGTH), torch.from_numpy(users)


@dataclass
class TextBuilder:
    """Builds one long string of character codes from the texts of roles."""

    parts: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add_raw(self, who: str, raw: Any) -> np.ndarray:
        """Add the text of a role and return the starts of its windows."""
        if not isinstance(raw, str):
            raise DataError(f"{who}: 'raw' is a {type(raw).__name__}, expected text")
        cleaned = re.sub("  +", " ", raw.replace("\n", " "))
        first = self._append(cleaned)
        return np.arange(first, first + max(0, len(cleaned) - LENGTH))

    def add_samples(self, who: str, x: list[Any], y: list[Any]) -> np.ndarray:
        """Add the windows that a file lists one by one and return their starts.

        Consecutive windows share all but one character; shared ones are stored once, an eightieth of LEAF's file.
        """
        pieces: list[str] = []
        starts = np.empty(len(x), np.int64)
        end, expected = self.size, None
        for i, (window, after) in enumerate(zip(x, y, strict=True)):
            if not isinstance(window, str) or len(window) != LENGTH or not isinstance(after, str) or len(after) != 1:
                raise DataError(f"{who}: sample {i} is not {LENGTH} characters and one more")
            pieces.append(after if window == expected else window + after)
            end += len(pieces[-1])
            starts[i] = end - LENGTH - 1
            expected = window[1:] + after
        self._append("".join(pieces))
        return starts

    def _append(self, text: str) -> int:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        self.parts.append(_CODES[np.minimum(points, 255)])
        self.size += len(text)
        return self.size - len(text)

    def codes(self) -> Tensor:
        """The whole string, (characters,) uint8."""
        return torch.from_numpy(np.concatenate(self.parts))


# -- LEAF's training and test files ----------------------------------------------------------------------------------


@register(
    "dataset",
    "femnist",
    doc="Handwritten letters and digits of 28x28 by writer, 62 classes, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def femnist(data_dir: Path | None = None) -> Source:
    """Handwritten letters and digits, one user per writer; pixels as in the files, where the background is 1."""
    read = _splits("femnist", data_dir, lambda who, x, y: (_bytes(who, x), _labels(who, y, 62)))
    (train, users), (test, test_users) = ((Images(images, labels), users) for images, labels, users in read)
    # as published for LEAF's files; published values of the second are from 0.155 to 0.160, depending on the writers
    return Source(train, test, 62, users, test_users, mean=(0.9637,), std=(0.1592,))


@register(
    "dataset",
    "sent140",
    doc="Tweets by user, positive or negative, 40 words, LEAF layout (no result was measured).",
    paper=_PAPER,
)
def sent140(data_dir: Path | None = None) -> Source:
    """Sentiment of tweets: positive (1) or negative (0), one user per author."""
    texts: list[tuple[list[str]]] = []

    def rows(who: str, x: list[Any], y: list[Any]) -> tuple[np.ndarray, ...]:
        at = np.arange(len(texts), len(texts) + len(x))
        texts.extend((words(_tweet(who, row)),) for row in x)
        # positive is 4 in the original files, 1 in LEAF
        return at, _labels(who, [1 if str(label) == "4" else label for label in y], 2)

    (first, labels, users), (second, test_labels, test_users) = _splits("sent140", data_dir, rows)
    vocabulary = Vocabulary.of(text for (text,) in texts[: len(first)])
    ids = torch.from_numpy(vocabulary.rows(texts, 40))
    return Source(Arrays(ids[first], labels), Arrays(ids[second], test_labels), 2, users, test_users)


@register(
    "dataset",
    "shakespeare-leaf",
    doc="Next character after 80, by role, in LEAF's train/test split and layout (no result was measured).",
    paper=_PAPER,
)
def shakespeare_leaf(data_dir: Path | None = None) -> Source:
    """As `shakespeare`, from the training and test files of LEAF."""
    text = TextBuilder()
    read = _splits("shakespeare", data_dir, lambda who, x, y: (text.add_samples(who, x, y),))
    codes = text.codes()
    (train, users), (test, test_users) = ((TextWindows(codes, starts, LENGTH), users) for starts, users in read)
    return Source(train, test, len(ALPHABET), users, test_users)


Rows = Callable[[str, list[Any], list[Any]], tuple[np.ndarray, ...]]  # file and user for errors, inputs, targets


def _splits(name: str, data_dir: Path | None, rows: Rows) -> list[tuple[Tensor, ...]]:
    """Of the training and of the test files: what `rows` makes of each user's examples, and the user of each."""
    folder = find(data_dir, f"{name}/data", f"leaf/data/{name}/data", f"leaf/{name}/data")
    if folder is None:
        task = "shakespeare-leaf" if name == "shakespeare" else name
        raise no_data(task, f"LEAF's {name}/data/train/*.json and {name}/data/test/*.json")
    numbers, parts = dict[str, int](), []
    for part in ("train", "test"):
        if not (files := sorted((folder / part).glob("*.json"))):
            raise DataError(f"{folder / part}: no .json file, expected the output of LEAF's preprocess.sh")
        found = []
        for file, (user, record) in ((path, one) for path in files for one in _users(path)):
            who, x, y = f"{file}: user {user[:60]!r}", record.get("x"), record.get("y")
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise DataError(f"{who} needs lists 'x' and 'y' of the same length")
            if x:
                found.append((*rows(who, x, y), np.full(len(x), numbers.setdefault(user, len(numbers)))))
        if not found:
            raise DataError(f"{folder / part}: the files have no examples")
        parts.append(tuple(torch.from_numpy(np.concatenate(one)) for one in zip(*found, strict=True)))
    return parts


def _users(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each user of a file, in the order of the file."""
    found = read_json_object(path, _LIMIT)
    for key, kind in (("users", list), ("user_data", dict)):
        if not isinstance(found.get(key), kind):
            raise DataError(f"{path}: no {kind.__name__} under {key!r}, expected the layout of LEAF")
    data, seen = found["user_data"], set[str]()
    for name in found["users"]:
        if not isinstance(name, str) or not isinstance(data.get(name), dict) or name in seen:
            raise DataError(f"{path}: user {str(name)[:60]!r} is listed twice or has no object under 'user_data'")
        seen.add(name)
        yield name, data[name]


def _bytes(who: str, rows: list[Any]) -> np.ndarray:
    """Images with values in [0, 1] as (n, 1, 28, 28) bytes; lossless, since the files were made from bytes."""
    try:
        values = np.array(rows, np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.empty(0)
    if values.shape != (len(rows), 784):
        raise DataError(f"{who} has images that are not rows of 784 values, as expected")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"{who} has an image with a value outside 0 to 1")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _labels(who: str, values: list[Any], classes: int) -> np.ndarray:
    """Class labels, which some versions of the files write as strings."""
    if not all(isinstance(value, int | str) and str(value).isascii() and str(value).isdigit() for value in values):
        raise DataError(f"{who} has a label that is not an integer from 0 to {classes - 1}")
    return class_tensor(np.array([min(int(str(value)[:9]), classes) for value in values]), classes, who).numpy()


def _tweet(who: str, row: Any) -> str:
    text = row[_TWEET] if isinstance(row, list) and len(row) > _TWEET else row
    if not isinstance(text, str):
        raise DataError(f"{who} has a tweet that is neither text nor a row with text in column 5")
    return text
