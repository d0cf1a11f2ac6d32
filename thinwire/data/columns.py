"""Columns of a table, with the row numbers that a spreadsheet shows: the header is row 1, the first example row 2.

    .csv, .tsv, .txt (each also with .gz)    UTF-8 text with one row of column names; delimiters are commas, semicolons,
                                             tabs or bars: the one that the first row has most of
    .parquet                                 read by pandas and pyarrow

Cells of a CSV file stay texts until a column is used as numbers, so that `007` and `1e5` can be names. The csv module
reads them, because pandas fills rows with too few cells without a word. Nothing in a file is trusted.

>>> ages, cities = np.array([["31", "", "40"], ["Rome", "Oslo", "NA"]], object)
>>> table = Columns("t.csv", {"age": ages, "city": cities})
>>> table.numbers("age"), table.texts("city"), table.row(2)
(array([31., nan, 40.]), ['Rome', 'Oslo', None], 't.csv: row 4')
>>> table.numbers("city") is None
True
"""

from __future__ import annotations

import csv
import difflib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.core.text import visible
from thinwire.data.files import one_line, read_text
from thinwire.errors import ConfigError, DataError

# cells without a value; the last one is that of the UCI repository
MISSING = frozenset((None, "", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "?"))
LIMIT = 1 << 30  # bytes of a text file, decompressed
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_DELIMITERS = ",;\t|"


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a table by name.

    Args:
        where: the file or object, for error messages.
        cells: column -> (rows,) float64, NaN for no value; or objects, texts and None.
        unusable: column -> its type, of columns that hold neither numbers nor text.
        row_numbers: the number of each row in a spreadsheet; by default 2, 3, ...
        word: what a row is called in messages.
    """

    where: str
    cells: Mapping[str, np.ndarray]
    unusable: Mapping[str, str] = field(default_factory=dict)
    row_numbers: np.ndarray | None = None
    word: str = "row"

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()))) if self.cells else 0

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return [*self.cells, *self.unusable]

    @property
    def rows(self) -> np.ndarray:
        """The number of each row."""
        return np.arange(2, len(self) + 2) if self.row_numbers is None else self.row_numbers

    def row(self, i: int) -> str:
        """File and number of a row, for error messages."""
        return f"{self.where}: {self.word} {self.rows[i]}"

    def take(self, index: np.ndarray) -> Columns:
        """Some of the rows."""
        cells = {name: one[index] for name, one in self.cells.items()}
        return replace(self, cells=cells, row_numbers=self.rows[index])

    def listed(self) -> str:
        """The names of the columns, for error messages."""
        return f"it has the columns {listed(self.names)}"

    def numbers(self, name: str) -> np.ndarray | None:
        """(rows,) float64, NaN where there is no value; None if a cell is no number."""
        cells = self.cells[name]
        if cells.dtype.kind == "f":
            return cells
        known = np.array([cell not in MISSING for cell in cells], bool)
        out = np.full(len(cells), np.nan)
        try:
            out[known] = cells[known].astype(np.float64)
        except ValueError:
            return None
        return None if "_" in "".join(cells[known]) else out  # Python reads 1_0 as 10

    def texts(self, name: str) -> list[str | None]:
        """The cells as text, None where there is no value; whole numbers without decimals."""
        cells = self.cells[name].tolist()
        if self.cells[name].dtype.kind == "f":
            return [None if np.isnan(value) else number_text(value) for value in cells]
        return [None if cell in MISSING else cell for cell in cells]

    def need(self, name: str, option: str) -> None:
        """Raise an error if there is no usable column of that name; `option` is the setting that names it."""
        if name in self.unusable:
            raise DataError(
                f"{self.where}: column {name!r} ({option}) holds {self.unusable[name]}, expected numbers or text; "
                "leave it out: task.drop"
            )
        if name not in self.cells:
            near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.5)
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise DataError(f"{self.where}: no column {visible(name, 80)!r} ({option}){meant}; {self.listed()}")

    def need_numbers(self, name: str, expected: str, what: str = "column") -> np.ndarray:
        """The numbers of a column; a text is an error."""
        values = self.numbers(name)
        if values is None:
            texts = enumerate(self.texts(name))
            i, text = next((i, text) for i, text in texts if text is not None and not is_number(text))
            raise DataError(f"{self.row(i)}: {what} {name!r} has {visible(text, 40)!r}, expected {expected}")
        return values

    def refuse(self, name: str, bad: np.ndarray, expected: str, what: str = "column") -> None:
        """Raise an error about the first row whose number is bad."""
        if bad.any():
            i = int(bad.argmax())
            raise DataError(f"{self.row(i)}: {what} {name!r} has {self.texts(name)[i]}, expected {expected}")


def is_number(cell: str) -> bool:
    """Whether a cell holds a number or no value.

    >>> [is_number(cell) for cell in ("1e3", "?", "12 kg", "1_0")]
    [True, True, False, False]
    """
    return Columns("", {"": np.array([cell], object)}).numbers("") is not None


def number_text(value: float) -> str:
    """A number as text: whole numbers without decimals.

    >>> number_text(3.0), number_text(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else f"{value:g}"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Some names, for readers."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(visible(name, 40) for name in names[:most]) + more


def from_frame(frame: Any, where: str = "the data frame") -> Columns:
    """The columns of a pandas DataFrame; rows count from 0."""
    cells: dict[str, np.ndarray] = {}
    unusable: dict[str, str] = {}
    for name, times in Counter(map(str, frame.columns)).items():
        if times > 1:
            raise DataError(f"{where}: there are {times} columns {name!r}; rename all but one")
    for name in frame.columns:
        column = frame[name]
        known = column.dropna().tolist() if column.dtype.kind not in "biuf" else []
        if others := [value for value in known if not isinstance(value, int | float | str)]:
            of_type = f"values of type {type(others[0]).__name__}"
            unusable[str(name)] = of_type if column.dtype.kind == "O" else str(column.dtype)
        elif column.dtype.kind in "biuf" or (known and not any(isinstance(value, str) for value in known)):
            cells[str(name)] = column.to_numpy(np.float64, na_value=np.nan)
        else:
            texts = (value if isinstance(value, str) else number_text(value) for value in known)
            cells[str(name)] = np.full(len(column), None, object)
            cells[str(name)][column.notna().to_numpy()] = list(texts)
    if not cells and not unusable:
        raise DataError(f"{where}: it has no columns")
    return Columns(where, cells, unusable, np.arange(len(frame)))


def read_table(path: Path, delimiter: str = "") -> Columns:
    """The columns of a file.

    Args:
        path: the file; decompressed if its name ends in .gz.
        delimiter: of a CSV file, one character between cells; by default derived from the first row.
    """
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in SUFFIXES:
        advice = "; save the sheet as CSV" if suffix in (".xlsx", ".xls", ".ods") else ""
        raise DataError(f"{path}: expected a table in a file that ends in .csv, .csv.gz, .tsv or .parquet{advice}")
    if suffix == ".parquet":
        return replace(from_frame(_parquet(path), str(path)), row_numbers=None)
    if delimiter and len(delimiter) != 1:
        raise ConfigError(f"task.delimiter = {delimiter!r}: expected one character, such as ';'")
    text = read_text(path, LIMIT)
    rows = _rows(path, text, delimiter or max(_DELIMITERS, key=text.split("\n", 1)[0].count))
    header = rows.pop(next(iter(rows)))
    if all(cell not in MISSING and is_number(cell) for cell in header):
        first = visible(", ".join(header), 60)
        raise DataError(f"{path}: row 1 has numbers ({first}), expected the names of the columns; add a first row")
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        at = " and ".join(str(i + 1) for i, one in enumerate(header) if one == name)
        raise DataError(f"{path}: columns {at} have the same name {visible(name, 80)!r}; rename all but one")
    if not rows:
        raise DataError(f"{path}: it has a row of column names, but no rows of examples")
    for number, cells in rows.items():
        if len(cells) != len(header):
            raise DataError(f"{path}: row {number} has {len(cells)} cells, but row 1 names {len(header)} columns")
    columns = dict(zip(header, np.array(list(rows.values()), object).T, strict=True))
    if len(columns) > 1 and columns.get("", np.zeros(0)).tolist() == [str(i) for i in range(len(rows))]:
        del columns[""]  # the index that pandas writes
    if "" in columns:
        raise DataError(f"{path}: column {header.index('') + 1} has no name; write one in row 1")
    return Columns(str(path), columns, row_numbers=np.array(list(rows)))


def _rows(path: Path, text: str, delimiter: str) -> dict[int, list[str]]:
    """Number -> cells of all rows that are not blank, without space around the cells."""
    rows, number = {}, 0
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1):
            if any(cells := [cell.strip() for cell in row]):
                rows[number] = cells
    except csv.Error as fault:
        raise DataError(f"{path}: row {number + 1} is not CSV ({one_line(fault)}); check its quotation marks") from None
    if not rows:
        raise DataError(f"{path}: the file is empty; expected a row of column names, then one row for each example")
    return rows


def _parquet(path: Path) -> Any:
    """The data frame of a parquet file."""
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs pyarrow; pip install 'thinwire[data]', or save it as CSV"
        ) from None
    except Exception as fault:  # the type depends on the version: not a parquet file, cut off, damaged
        raise DataError(f"{path}: cannot be read as parquet ({one_line(fault)})") from None
    if frame.empty:
        raise DataError(f"{path}: it has no rows")
    return frame
