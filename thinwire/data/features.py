"""Columns of a table as inputs of a model: numbers standardized, categories one-hot, all by training rows.

    number      (x - mean) / std;  a missing number is the mean, and a second column is 1 where it was missing
    category    one column for each text of the training rows, and one for all other texts

>>> rows = Columns("t.csv", {"age": ["30", "", "50"], "city": ["Rome", "Oslo", "Rome"]})
>>> features = Features.of(rows, ("age", "city"))
>>> features.encode(rows).tolist()
[[-1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0]]
>>> features.encode(Columns("u.csv", {"age": ["40"], "city": ["Bonn"]})).tolist()
[[0.0, 0.0, 0.0, 0.0, 1.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.core.text import visible
from thinwire.data.columns import Columns
from thinwire.errors import DataError

MOST_CATEGORIES = 256  # of one column
MOST_VALUES = 1 << 31  # of all encoded rows


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers.

    Args:
        name: of the column.
        mean, std: of the training rows that have a value.
        missing: whether training rows without a value exist, which a second column marks.
    """

    name: str
    mean: float
    std: float
    missing: bool

    @property
    def width(self) -> int:
        """The number of inputs that it becomes."""
        return 2 if self.missing else 1

    @classmethod
    def of(cls, name: str, values: np.ndarray, rows: Columns) -> NumberColumn:
        """The statistics of a column."""
        known = values[~np.isnan(values)]
        bad = np.flatnonzero(~np.isfinite(values) & ~np.isnan(values))
        if len(bad):
            raise DataError(f"{rows.row(int(bad[0]))}: column {name!r} has {values[bad[0]]}, expected a finite number")
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = float(known.mean()), float(known.std())
        if not np.isfinite(std):
            largest = float(np.abs(known).max())
            raise DataError(
                f"{rows.where}: column {name!r} has numbers as large as {largest:g}; divide them by a constant"
            )
        return cls(name, mean, std or 1.0, len(known) < len(values))

    def encode(self, rows: Columns) -> np.ndarray:
        """(rows, width) float32."""
        values = rows.numbers(self.name)
        if values is None:
            i, cell = _first_text(rows, self.name)
            given = visible(cell, 40)
            raise DataError(
                f"{rows.row(i)}: column {self.name!r} has {given!r}, expected a number as in all training rows"
            )
        absent = np.isnan(values)
        scaled = (np.where(absent, self.mean, values) - self.mean) / self.std
        bad = np.flatnonzero(~(np.abs(scaled) < 1e30))
        if len(bad):
            raise DataError(
                f"{rows.row(int(bad[0]))}: column {self.name!r} has {values[bad[0]]:g}, far from the training rows "
                f"(mean {self.mean:g}, standard deviation {self.std:g})"
            )
        return np.stack([scaled, absent] if self.missing else [scaled], 1).astype(np.float32)


@dataclass(frozen=True)
class CategoryColumn:
    """A column of texts.

    Args:
        name: of the column.
        categories: the texts of training rows; a missing text is "".
    """

    name: str
    categories: tuple[str, ...]

    @property
    def width(self) -> int:
        """The number of inputs that it becomes: one for each category, and one for all others."""
        return len(self.categories) + 1

    @classmethod
    def of(cls, name: str, rows: Columns) -> CategoryColumn:
        """The categories of a column."""
        found = sorted({text or "" for text in rows.texts(name)})
        if len(found) > MOST_CATEGORIES:
            raise DataError(
                f"{rows.where}: column {name!r} has {len(found):,} different texts, such as {visible(found[1], 40)!r}; "
                f"at most {MOST_CATEGORIES} can be categories; leave it out: task.drop = [{name!r}]"
            )
        return cls(name, tuple(found))

    def encode(self, rows: Columns) -> np.ndarray:
        """(rows, width) float32 of zeros and one 1 in each row."""
        position = {text: i for i, text in enumerate(self.categories)}
        code = np.array([position.get(text or "", len(position)) for text in rows.texts(self.name)], np.int64)
        out = np.zeros((len(code), self.width), np.float32)
        out[np.arange(len(code)), code] = 1
        return out


@dataclass(frozen=True)
class Features:
    """The columns that a model gets, in order, and how each is encoded; `empty` were left out: they have no values."""

    columns: tuple[NumberColumn | CategoryColumn, ...]
    empty: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Columns, names: Sequence[str]) -> Features:
        """The encoding of these columns, from the training rows."""
        found: list[NumberColumn | CategoryColumn] = []
        empty = []
        for name in names:
            values = rows.numbers(name)
            if values is None:
                found.append(CategoryColumn.of(name, rows))
            elif np.isnan(values).all():
                empty.append(name)
            else:
                found.append(NumberColumn.of(name, values, rows))
        if not found:
            raise DataError(f"{rows.where}: no column is left for the inputs of the model; {rows.listed()}")
        return cls(tuple(found), tuple(empty))

    @property
    def width(self) -> int:
        """The number of inputs of the model."""
        return sum(column.width for column in self.columns)

    def encode(self, rows: Columns) -> Tensor:
        """(rows, width) float32."""
        if self.width * len(rows) > MOST_VALUES:
            raise DataError(
                f"{rows.where}: {len(rows):,} rows with {self.width:,} inputs each are more than {MOST_VALUES:,} "
                "numbers; leave columns out: task.drop"
            )
        for column in self.columns:
            rows.need(column.name, "an input of the training rows")
        return torch.from_numpy(np.concatenate([column.encode(rows) for column in self.columns], 1))

    def note(self) -> str:
        """What was done, for readers of results."""
        numbers = [one for one in self.columns if isinstance(one, NumberColumn)]
        categories = [one for one in self.columns if isinstance(one, CategoryColumn)]
        parts = []
        if numbers:
            parts.append(f"{len(numbers)} number column{'s' * (len(numbers) > 1)}, standardized")
        if categories:
            more = f"{len(categories)} text column{'s' * (len(categories) > 1)}"
            parts.append(f"{more} as {sum(one.width for one in categories)} one-hot inputs")
        words = f"{self.width} inputs: {' and '.join(parts)}."
        if filled := [one.name for one in numbers if one.missing]:
            words += f" Missing numbers are the mean, with an input that marks them ({_names(filled)})."
        if self.empty:
            words += f" Left out, because no training row has a value: {_names(self.empty)}."
        return words


def _names(names: Sequence[str]) -> str:
    """A few names, for readers."""
    return ", ".join(visible(name, 40) for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def _first_text(rows: Columns, name: str) -> tuple[int, str]:
    """The first cell of a column that is no number."""
    from thinwire.data.columns import as_number

    return next((i, text) for i, text in enumerate(rows.texts(name)) if text is not None and as_number(text) is None)
