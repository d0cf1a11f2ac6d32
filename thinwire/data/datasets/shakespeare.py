"""Shakespeare by speaking role: 80 characters of what a role says, and the character that follows.

Read from `shakespeare/all_data.json.gz`, in LEAF's layout or with the whole text of each role under "raw"; line ends
are spaces, and several spaces are one. Windows begin at every character. In time, the first 80 % of a role's windows
are train data and the rest test data, less the 80 at the border, which share characters with both.
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
from thinwire.errors import DataError
from thinwire.data import hub
from thinwire.data.examples import Source, Windows
from thinwire.data.folder import find
from thinwire.data.datasets.leaf_json import people, samples

# The 80 characters of LEAF. No text has a line end left, so its code stands for whatever is not in the list.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80
_RAW = "Roles come from the text's own mark-up; this is not LEAF's file, which has 1,129 users."

_CODES = np.zeros(256, np.uint8)
_CODES[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))


@register(
    "dataset",
    "shakespeare",
    doc="Next character after 80, by speaking role (1,074 of them); 80 characters.",
    paper="Caldas et al., LEAF, 2018; McMahan et al., AISTATS 2017",
)
def shakespeare(data_dir: Path | None = None) -> Source:
    """What will a role of Shakespeare's say next, character by character?"""
    folder = find(data_dir, "shakespeare")
    paths = _files(folder) if folder else []
    if not paths:
        raise hub.missing("shakespeare", "shakespeare/all_data.json.gz")
    text = Text()
    train, test, raw = Half(), Half(), False
    number: dict[str, int] = {}
    for path in paths:
        for name, record in people(path):
            raw = raw or "raw" in record
            starts = text.add_raw(path, name, record) if "raw" in record else text.add_samples(path, name, record)
            user = number.setdefault(name, len(number))
            cut = max(1, int(0.8 * len(starts)))
            train.add(starts[:cut], user)
            test.add(starts[cut + LENGTH :], user)
    if not len(train) or not len(test):
        raise DataError(f"{paths[0]}: no role has text enough for train and test windows of {LENGTH} characters")
    codes = text.codes()
    return Source(
        train.windows(codes),
        test.windows(codes),
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
class Text:
    """One long string of codes under construction."""

    parts: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add_raw(self, path: Path, name: str, record: dict[str, Any]) -> np.ndarray:
        """Add all that a role says, and return where its windows start."""
        raw = record["raw"]
        if not isinstance(raw, str):
            raise DataError(f"{path}: 'raw' of user {name[:60]!r} is a {type(raw).__name__}, expected text")
        spoken = re.sub("  +", " ", raw.replace("\n", " "))
        first = self._append(spoken)
        return np.arange(first, first + max(0, len(spoken) - LENGTH))

    def add_samples(self, path: Path, name: str, record: dict[str, Any]) -> np.ndarray:
        """Add the windows that a file lists one by one, and return where they start.

        Neighbours share all but one character; those are stored once, so that LEAF's file shrinks eightyfold.
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
class Half:
    """The windows of train or test under construction."""

    starts: list[np.ndarray] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.starts))

    def add(self, starts: np.ndarray, user: int) -> None:
        """Add windows of one user."""
        self.starts.append(starts)
        self.owners.append(user)

    def windows(self, codes: Tensor) -> Windows:
        """The examples."""
        return Windows(codes, torch.from_numpy(_joined(self.starts)), LENGTH)

    def users(self) -> Tensor:
        """Who speaks each window."""
        return torch.from_numpy(np.repeat(np.array(self.owners, np.int64), [len(part) for part in self.starts]))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *parts])
