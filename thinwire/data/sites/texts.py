"""Texts of a site: one row for each example, a column of texts and a column of classes.

    word -> 3 + crc32(word) mod (words - 3)

Word ids are a hash, so that sites need no common vocabulary. Two words may share an id. 0 is padding, 1 a text without
words.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.data.sites.base import Pair, SiteData
from thinwire.data.sites.table import check_classes, class_targets
from thinwire.data.table_files import read_table
from thinwire.data.vocabulary import SEPARATOR, Vocabulary, words
from thinwire.errors import ConfigError

_FIRST = SEPARATOR + 1  # id of a word


@dataclass(frozen=True)
class SiteTexts(SiteData):
    """Texts in a CSV or parquet file of each site.

    Args:
        file: the name of the file in the folder of a site.
        text: the column of texts.
        target: the column of classes.
        classes: the classes of all sites, in the order of the model's outputs.
        length: number of words of a text that are used.
        words: number of word ids.

    >>> notes = SiteTexts("notes.csv", "note", "urgent", ("no", "yes"), length=3, words=100)
    >>> notes.ids(["Fever, fever and cough!", ""]).tolist()
    [[13, 13, 22], [1, 0, 0]]
    """

    file: str
    text: str
    target: str
    classes: tuple[str, ...]
    length: int = 128
    words: int = 20_000

    def __post_init__(self) -> None:
        check_classes(self.classes)
        if self.length < 1 or self.words <= _FIRST:
            raise ConfigError(f"length must be 1 or more and words above {_FIRST}, not {self.length} and {self.words}")

    @property
    def outputs(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def shapes(self) -> Mapping[str, int]:
        """The number of word ids, and of words of a text."""
        return {"words": self.words, "length": self.length}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes."""
        return self.classes

    @property
    def expected(self) -> str:
        """The file."""
        return f"the file {self.file}"

    @property
    def note(self) -> str:
        """What was done to the texts."""
        return f"The first {self.length} words of a text are used; word ids are a hash of the word."

    def is_site(self, folder: Path) -> bool:
        """Whether the folder has the file."""
        return (folder / self.file).is_file()

    def read(self, folder: Path) -> Pair:
        """The rows of the file."""
        rows = read_table(folder / self.file)
        rows.need(self.text, "the texts named in task.py")
        return self.ids([text or "" for text in rows.texts(self.text)]), class_targets(rows, self.target, self.classes)

    def blank(self, rows: int) -> Pair:
        """Texts without words."""
        return self.ids([""] * rows), torch.zeros(rows, dtype=torch.int64)

    def ids(self, texts: list[str]) -> torch.Tensor:
        """(texts, length) int64 word ids, padded with 0."""
        split = [(words(text),) for text in texts]
        known = {word for (text,) in split for word in text}
        hashed = {word: _FIRST + zlib.crc32(word.encode()) % (self.words - _FIRST) for word in known}
        return torch.from_numpy(Vocabulary(hashed).rows(split, self.length))
