"""Rows of a file or a data frame, by column; every row knows its file and number, for messages of errors.

    .csv, .tsv, .txt (each also with .gz)    UTF-8 text with one row of column names; delimiters are commas, semicolons,
                                             tabs or bars: the one that the first row has most of
    .parquet                                 read by pandas and pyarrow
    .jsonl (also .gz, .xz), .json            one JSON object a line; a list of objects

Cells of a CSV file stay texts until a column is used as numbers, so that `007` and `1e5` can be names. The csv module
reads them, because pandas fills rows with too few cells without a word. Nothing in a file is trusted. Rows of a table
are numbered as in a spreadsheet: the header is row 1, the first example row 2.

>>> rows = Columns("t.csv", {"age": np.array(["30", None, "1_0"], object), "size": np.array([1.0, 2.5, np.nan])})
>>> rows.numbers("age"), rows.texts("size"), rows.row(2)
(None, ['1', '2.5', None], 't.csv: row 4')
>>> rows.take(np.array([0, 1])).numbers("age").tolist()
[30.0, nan]
"""

from __future__ import annotations

import csv
import difflib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from thinwire.core.text import visible
from thinwire.data.files import one_line, read_text
from thinwire.errors import DataError

# cells without a value; the last one is that of the UCI repository
MISSING = frozenset((None, "", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "?"))
LIMIT = 1 << 30  # bytes of a text file, decompressed
TABLES = (".csv", ".tsv", ".txt", ".parquet")
_DELIMITERS = ",;\t|"
Names: TypeAlias = tuple[str, ...] | Sequence[str]  # of columns


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of some rows by name.

    Args:
        where: the file or object, for error messages.
        cells: column -> (rows,) float64, NaN for no value; or objects (texts, numbers, values of JSON), None for none.
        row_numbers: the number of each row in its file; by default 2, 3, ... as in a spreadsheet.
        word: what a row is called in messages.
    """

    where: str
    cells: Mapping[str, np.ndarray]
    row_numbers: np.ndarray | None = None
    word: str = "row"

    def __len__(self) -> int:
        return len(next(iter(self.cells.values()))) if self.cells else 0

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
        return f"it has the columns {listed(list(self.cells))}"

    def numbers(self, name: str) -> np.ndarray | None:
        """(rows,) float64, NaN where there is no value; None if a cell is no number."""
        return _numbers(self.cells[name])

    def texts(self, name: str) -> list[Any]:
        """The cells as text, None where there is no value; whole numbers without decimals."""
        return [cell if isinstance(cell, str | None) else number_text(cell) for cell in _known(self.cells[name])]

    def text(self, i: int, name: str, option: str) -> str:
        """The text of a cell that must not be empty; `option` is the setting that names the column."""
        self.need(name, option, any_type=True)
        (value,), where = _known(self.cells[name][i : i + 1]), f"{self.row(i)}: {name!r} ({option})"
        if value is None or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{where} has no value; fill it in, or delete the row")
        if isinstance(value, int | float):
            value = number_text(value)
        if not isinstance(value, str):
            raise DataError(f"{where} is of type {type(value).__name__}, expected a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} has half of a character (a lone surrogate)") from None
        return value

    def column(self, name: str, option: str) -> list[str] | None:
        """The text of every row, as in `text`; None if no column is named."""
        return [self.text(i, name, option) for i in range(len(self))] if name else None

    def need(self, name: str, option: str, any_type: bool = False) -> None:
        """Raise an error if there is no column of that name that holds numbers or text, or if wanted any values.

        Args:
            name: of the column.
            option: the setting that names it.
            any_type: whether other values are accepted.
        """
        if name not in self.cells:
            near = difflib.get_close_matches(name, list(self.cells), n=3, cutoff=0.5)
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise DataError(f"{self.where}: no column {visible(name, 80)!r} ({option}){meant}; {self.listed()}")
        others = (one for one in self.cells[name].tolist() if not isinstance(one, str | int | float | None))
        if not any_type and (other := next(others, None)) is not None:
            raise DataError(
                f"{self.where}: column {name!r} ({option}) holds values of type {type(other).__name__}, expected "
                "numbers or text; leave it out: task.drop"
            )

    def need_numbers(self, name: str, expected: str, what: str = "column") -> np.ndarray:
        """The numbers of a column; a text is an error."""
        values = self.numbers(name)
        if values is None:
            i, text = next((i, text) for i, text in enumerate(self.texts(name)) if not is_number(text))
            raise DataError(f"{self.row(i)}: {what} {name!r} has {visible(text, 40)!r}, expected {expected}")
        return values

    def refuse(self, name: str, bad: np.ndarray, expected: str, what: str = "column") -> None:
        """Raise an error about the first row whose number is bad."""
        if bad.any():
            i = int(bad.argmax())
            raise DataError(f"{self.row(i)}: {what} {name!r} has {self.texts(name)[i]}, expected {expected}")


def _known(cells: np.ndarray) -> list[Any]:
    """The cells, None for numbers that are NaN."""
    return [None if cell != cell else cell for cell in cells.tolist()]


def _numbers(cells: np.ndarray) -> np.ndarray | None:
    try:
        out = np.array([np.nan if cell is None else cell for cell in cells.tolist()], np.float64)
    except (ValueError, TypeError):
        return None
    texts = cells.dtype.kind == "O" and any(isinstance(cell, str) and "_" in cell for cell in cells.tolist())
    return None if texts else out  # Python reads 1_0 as 10


def is_number(cell: str | None) -> bool:
    """Whether a cell holds a number or no value.

    >>> [is_number(cell) for cell in ("1e3", None, "12 kg", "1_0")]
    [True, True, False, False]
    """
    return _numbers(np.array([cell], object)) is not None


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


def objects(values: Iterable[Any]) -> np.ndarray:
    """(values,) an array of objects, also where they are lists of one length."""
    return np.fromiter(values, object)


# -- readers ---------------------------------------------------------------------------------------------------------


def from_frame(frame: Any, where: str = "the data frame") -> Columns:
    """The columns of a pandas DataFrame; rows count from 0."""
    for name, times in Counter(map(str, frame.columns)).items():
        if times > 1:
            raise DataError(f"{where}: there are {times} columns {name!r}; rename all but one")
    if not len(frame.columns):
        raise DataError(f"{where}: it has no columns")
    cells = {}
    for name, column in frame.items():
        values = column.astype(object).where(column.notna(), None).tolist()
        cells[str(name)] = objects(None if isinstance(one, str) and one in MISSING else one for one in values)
    return Columns(where, cells, np.arange(len(frame)))


def from_objects(rows: Mapping[int, Mapping[str, Any]], where: str) -> Columns:
    """The columns of JSON objects by their number."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    cells = {name: objects(row.get(name) for row in rows.values()) for name in names}
    return Columns(where, cells, row_numbers=np.array([*rows]))


def read_table(path: Path) -> Columns:
    """The columns of a table in a file, decompressed if its name ends in .gz."""
    suffix = (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()
    if suffix not in TABLES:
        advice = "; save the sheet as CSV" if suffix in (".xlsx", ".xls", ".ods") else ""
        raise DataError(f"{path}: expected a table in a file that ends in .csv, .csv.gz, .tsv or .parquet{advice}")
    if suffix == ".parquet":
        return _read_parquet(path)
    text, rows, number = read_text(path, LIMIT), dict[int, list[str]](), 0
    delimiter = max(_DELIMITERS, key=text.split("\n", 1)[0].count)
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1):
            if any(cells := [cell.strip() for cell in row]):
                rows[number] = cells
    except csv.Error as fault:
        raise DataError(f"{path}: row {number + 1} is not CSV ({one_line(fault)}); check its quotation marks") from None
    if not rows:
        raise DataError(f"{path}: the file is empty; expected a row of column names, then one row for each example")
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
    known = (
        objects(None if cell in MISSING else cell for cell in column) for column in zip(*rows.values(), strict=True)
    )
    columns = dict(zip(header, known, strict=True))
    if len(columns) > 1 and columns.get("", np.zeros(0)).tolist() == [str(i) for i in range(len(rows))]:
        del columns[""]  # the index that pandas writes
    if "" in columns:
        raise DataError(f"{path}: column {header.index('') + 1} has no name; write one in row 1")
    return Columns(str(path), columns, row_numbers=np.array([*rows]))


def _read_parquet(path: Path) -> Columns:
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
    return replace(from_frame(frame, str(path)), row_numbers=None)


def read_records(path: Path) -> Columns:
    """The records of a file: JSON objects, which may hold lists and objects, or the rows of a table."""
    suffix = (Path(path.stem) if path.suffix in (".gz", ".xz") else path).suffix.lower()
    if suffix in TABLES:
        return read_table(path)
    if suffix not in (".jsonl", ".ndjson", ".json"):
        raise DataError(f"{path}: expected records in a file that ends in .jsonl, .json, .csv, .tsv or .parquet")
    text, rows, whole = read_text(path, LIMIT), dict[int, Any](), suffix == ".json"
    for number, part in enumerate([text] if whole else text.split("\n"), 1):  # texts may contain other line breaks
        if part.strip():
            try:
                rows[number] = json.loads(part)
            except (ValueError, RecursionError) as fault:
                what = "not a JSON list of objects" if whole else f"row {number} is not a JSON object"
                raise DataError(f"{path}: {what} ({one_line(fault)})") from None
    if whole and isinstance(rows.get(1), list):
        rows = dict(enumerate(rows[1], 1))
    for number, row in rows.items():
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number} is a JSON {type(row).__name__}, expected an object of columns")
    if not rows:
        raise DataError(f"{path}: the file has no records; expected one JSON object a line")
    return from_objects(rows, str(path))
