"""Shakespeare by speaking role: prediction of the next character after 80 characters of a role.

Read from `shakespeare/all_data.json.gz`, in LEAF's layout or with the whole text of each role under "raw"; line ends
are spaces, and several spaces are one. Windows begin at every character. The first 80 % of a role's windows are the
training set and the rest the test set, without the 80 windows in between, which share characters with both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data import hub
from thinwire.data.datasets.leaf_json import read_users, samples
from thinwire.data.examples import Source, TextWindows
from thinwire.data.folder import find
from thinwire.errors import DataError

# The 80 characters of LEAF. Line ends are replaced in all texts, so the code of a line end is used for unknown ones.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
_RAW = "Roles come from the mark-up of the text; this is not LEAF's file, which has 1,129 users."

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
    paths = _files(folder) if folder else []
    if not paths:
        raise hub.missing("shakespeare", "shakespeare/all_data.json.gz")
    text = TextBuilder()
    train, test, raw = WindowBuilder(), WindowBuilder(), False
    user_ids: dict[str, int] = {}
    for path in paths:
        for name, record in read_users(path):
            raw = raw or "raw" in record
            starts = text.add_raw(path, name, record) if "raw" in record else text.add_samples(path, name, record)
            user = user_ids.setdefault(name, len(user_ids))
            cut = max(1, int(0.8 * len(starts)))
            train.add(starts[:cut], user)
            test.add(starts[cut + LENGTH :], user)
    if not len(train) or not len(test):
        raise DataError(f"{paths[0]}: no role has enough text for training and test windows of {LENGTH} characters")
    codes = text.codes()
    return Source(
        train.examples(codes),
        test.examples(codes),
        classes=len(ALPHABET),
        users=train.users(),
        test_users=test.users(),
        note=_RAW if raw else "",
    )


def _files(folder: Path) -> list[Path]:
    for base in (folder, folder / "data" / "all_data"):
        if found := sorted(base.glob("all_data*.json")) or sorted(base.glob("all_data*.json.gz")):
            return found
    return []


@dataclass
class TextBuilder:
    """Builds one long string of character codes from the texts of roles."""

    parts: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add_raw(self, path: Path, name: str, record: dict[str, Any]) -> np.ndarray:
        """Add the text of a role and return the starts of its windows."""
        raw = record["raw"]
        if not isinstance(raw, str):
            raise DataError(f"{path}: 'raw' of user {name[:60]!r} is a {type(raw).__name__}, expected text")
        cleaned = re.sub("  +", " ", raw.replace("\n", " "))
        first = self._append(cleaned)
        return np.arange(first, first + max(0, len(cleaned) - LENGTH))

    def add_samples(self, path: Path, name: str, record: dict[str, Any]) -> np.ndarray:
        """Add the windows that a file lists one by one and return their starts.

        Consecutive windows share all but one character; shared ones are stored once, an eightieth of LEAF's file.
        """
        x, y = samples(path, name, record)
        pieces: list[str] = []
        starts = np.empty(len(x), np.int64)
        end, expected = self.size, None
        for i, (window, after) in enumerate(zip(x, y, strict=True)):
            if not isinstance(window, str) or len(window) != LENGTH or not isinstance(after, str) or len(after) != 1:
                raise DataError(f"{path}: sample {i} of user {name[:60]!r} is not {LENGTH} characters and one more")
            piece = after if window == expected else window + after
            pieces.append(piece)
            end += len(piece)
            starts[i] = end - LENGTH - 1
            expected = window[1:] + after
        self._append("".join(pieces))
        return starts

    def codes(self) -> Tensor:
        """The whole string, (characters,) uint8."""
        return torch.from_numpy(np.concatenate(self.parts))

    def _append(self, text: str) -> int:
        first = self.size
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        self.parts.append(_CODES[np.minimum(points, 255)])
        self.size += len(text)
        return first


@dataclass
class WindowBuilder:
    """Collects the windows of the training or the test set."""

    starts: list[np.ndarray] = field(default_factory=list)
    user_of_part: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.starts))

    def add(self, starts: np.ndarray, user: int) -> None:
        """Add the windows of a user."""
        self.starts.append(starts)
        self.user_of_part.append(user)

    def examples(self, codes: Tensor) -> TextWindows:
        """The windows as examples."""
        return TextWindows(codes, torch.from_numpy(_joined(self.starts)), LENGTH)

    def users(self) -> Tensor:
        """The user of each window, (n,) int64."""
        return torch.from_numpy(np.repeat(np.array(self.user_of_part, np.int64), [len(part) for part in self.starts]))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
