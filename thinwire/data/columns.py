"""Columns of a table, with the row numbers that a spreadsheet shows: the header is row 1, the first example row 2.

>>> table = Columns("t.csv", {"age": ["31", "", "40"], "city": ["Rome", "Oslo", "NA"]})
>>> table.numbers("age"), table.texts("city"), table.row(2)
(array([31., nan, 40.]), ['Rome', 'Oslo', None], 't.csv: row 4')
>>> table.numbers("city") is None
True
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thinwire.core.text import visible
from thinwire.errors import DataError

# cells without a value; the last one is that of the UCI repository
MISSING = frozenset(("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "?"))
_LISTED = 12  # names of columns in an error message


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a table by name: lists of text cells, or arrays of numbers.

    Args:
        where: the file or object, for error messages.
        cells: column -> cells of all rows; numbers are arrays (NaN: no value), other columns are lists.
        unusable: column -> its type, of columns that hold neither numbers nor text.
        row_numbers: the number of each row in a spreadsheet; by default 2, 3, ...
        word: what a row is called in messages.
    """

    where: str
    cells: Mapping[str, Any]
    unusable: Mapping[str, str] = field(default_factory=dict)
    row_numbers: np.ndarray | None = None
    word: str = "row"

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()))) if self.cells else 0

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return [*self.cells, *self.unusable]

    def row(self, i: int) -> str:
        """File and number of a row, for error messages."""
        return f"{self.where}: {self.word} {i + 2 if self.row_numbers is None else self.row_numbers[i]}"

    def take(self, index: np.ndarray) -> Columns:
        """Some of the rows."""
        cells = {
            name: one[index] if isinstance(one, np.ndarray) else [one[i] for i in index.tolist()]
            for name, one in self.cells.items()
        }
        numbers = np.arange(2, len(self) + 2) if self.row_numbers is None else self.row_numbers
        return replace(self, cells=cells, row_numbers=numbers[index])

    def need(self, name: str, option: str) -> None:
        """Raise an error if there is no usable column of that name; `option` is the setting that names it."""
        if name in self.cells:
            return
        if name in self.unusable:
            raise DataError(
                f"{self.where}: column {name!r} ({option}) holds {self.unusable[name]}, expected numbers or text; "
                "leave it out: task.drop"
            )
        near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.5)
        guess = f"; did you mean {' or '.join(map(repr, near))}? I{self.listed()[1:]}" if near else f"; {self.listed()}"
        raise DataError(f"{self.where}: no column {visible(name, 80)!r} ({option}){guess}")

    def listed(self) -> str:
        """The names of the columns, for error messages."""
        names = ", ".join(visible(name, 40) for name in self.names[:_LISTED])
        return f"it has the columns {names}{', ...' if len(self.names) > _LISTED else ''}"

    def numbers(self, name: str) -> np.ndarray | None:
        """(rows,) float64, NaN where there is no value; None if a cell is no number."""
        cells = self.cells[name]
        if isinstance(cells, np.ndarray):
            return cells
        try:  # all cells at once, if each is a number: several times as fast
            if None not in cells and "_" not in "".join(cells):
                return np.array(cells, object).astype(np.float64)
        except ValueError:
            pass
        out = np.empty(len(cells))
        for i, cell in enumerate(cells):
            if (number := as_number(cell)) is None:
                return None
            out[i] = number
        return out

    def texts(self, name: str) -> list[str | None]:
        """The cells as text, None where there is no value; whole numbers without decimals."""
        cells = self.cells[name]
        if isinstance(cells, np.ndarray):
            return [None if np.isnan(value) else number_text(value) for value in cells.tolist()]
        return [None if cell is None or cell in MISSING else cell for cell in cells]


def as_number(cell: str | None) -> float | None:
    """The number in a cell, NaN if it has no value; None if it is text.

    >>> as_number("1e3"), as_number("?"), as_number("12 kg"), as_number("1_0")
    (1000.0, nan, None, None)
    """
    if cell is None or cell in MISSING:
        return float("nan")
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def number_text(value: float) -> str:
    """A number as text: whole numbers without decimals.

    >>> number_text(3.0), number_text(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else f"{value:g}"


def from_frame(frame: Any, where: str = "the data frame") -> Columns:
    """The columns of a pandas DataFrame (or of another library with the same methods); rows count from 0."""
    cells: dict[str, Any] = {}
    unusable: dict[str, str] = {}
    for name, times in Counter(map(str, frame.columns)).items():
        if times > 1:
            raise DataError(f"{where}: there are {times} columns {name!r}; rename all but one")
    for name in frame.columns:
        _place(str(name), np.asarray(frame[name]), cells, unusable)
    if not cells and not unusable:
        raise DataError(f"{where}: it has no columns")
    return Columns(where, cells, unusable, np.arange(len(frame)))


def _place(name: str, values: np.ndarray, cells: dict[str, Any], unusable: dict[str, str]) -> None:
    """Put a column of any type where it belongs."""
    if values.dtype.kind in "biuf" and values.ndim == 1:
        cells[name] = values.astype(np.float64)
        return
    listed: Sequence[Any] = values.tolist() if values.dtype.kind in "OUT" and values.ndim == 1 else [object()]
    kept = [None if _is_missing(value) else value for value in listed]
    known = [value for value in kept if value is not None]
    if all(isinstance(value, str) for value in known):
        cells[name] = kept
    elif all(isinstance(value, int | float) for value in known):
        cells[name] = np.array([np.nan if value is None else value for value in kept], np.float64)
    elif all(isinstance(value, int | float | str) for value in known):
        cells[name] = [value if value is None or isinstance(value, str) else number_text(value) for value in kept]
    else:
        unusable[name] = f"values of type {type(known[0]).__name__}" if values.dtype.kind == "O" else str(values.dtype)


def _is_missing(value: Any) -> bool:
    """Whether a cell of a data frame has no value: None, NaN or pandas.NA."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)
