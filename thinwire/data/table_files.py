"""Tables from files: CSV (compressed or not) and parquet. Nothing in a file is trusted.

A CSV file is UTF-8 text with one row of column names. Delimiters are commas, semicolons, tabs or bars: the one that
the first row has most of. Reading parquet takes the library pyarrow.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.core.text import visible
from thinwire.data.columns import MISSING, Columns, as_number, from_frame
from thinwire.data.reading import one_line, read_bytes
from thinwire.errors import ConfigError, DataError

LIMIT = 1 << 30  # bytes of a CSV file, decompressed
CELLS = 1 << 28  # of a parquet file: 2 GiB as numbers
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_DELIMITERS = ",;\t|"


def read_table(path: Path, delimiter: str = "") -> Columns:
    """The columns of a file whose name ends in .csv, .tsv, .txt (each also with .gz) or .parquet."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in SUFFIXES:
        advice = "; save the sheet as CSV" if suffix.lower() in (".xlsx", ".xls", ".ods") else ""
        raise DataError(f"{path}: expected a table in a file that ends in .csv, .csv.gz, .tsv or .parquet{advice}")
    return read_parquet(path) if suffix.lower() == ".parquet" else read_csv(path, delimiter)


def read_csv(path: Path, delimiter: str = "") -> Columns:
    """The columns of a CSV file.

    Args:
        path: the file; decompressed if its name ends in .gz.
        delimiter: one character between cells; by default derived from the first row.
    """
    if delimiter and len(delimiter) != 1:
        raise ConfigError(f"task.delimiter = {delimiter!r}: expected one character, such as ';'")
    text = _text(path)
    first = text.split("\n", 1)[0]
    delimiter = delimiter or max(_DELIMITERS, key=first.count)
    rows, numbers = _rows(path, text, delimiter)
    if not rows:
        raise DataError(f"{path}: the file is empty; expected a row of column names, then one row for each example")
    header = _header(path, rows[0])
    if len(rows) == 1:
        raise DataError(f"{path}: it has a row of column names, but no rows of examples")
    for cells, number in zip(rows, numbers, strict=True):
        if len(cells) != len(header):
            raise DataError(f"{path}: row {number} has {len(cells)} cells, but row 1 names {len(header)} columns")
    columns = {name: list(cells) for name, cells in zip(header, zip(*rows[1:], strict=True), strict=True)}
    if "" in columns:
        # the index that pandas writes
        if columns.pop("") != [str(i) for i in range(len(rows) - 1)]:
            raise DataError(f"{path}: column {header.index('') + 1} has no name; write one in row 1")
        if not columns:
            raise DataError(f"{path}: it has no column besides the row index")
    return Columns(str(path), columns, row_numbers=np.array(numbers[1:]))


def _text(path: Path) -> str:
    data = read_bytes(path, LIMIT)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        row = data[: fault.start].count(b"\n") + 1
        raise DataError(f"{path}: row {row} is not UTF-8 text; save the file with the encoding UTF-8") from None


def _rows(path: Path, text: str, delimiter: str) -> tuple[list[list[str]], list[int]]:
    """The cells of all rows that are not blank, without space around them, and the number of each row."""
    rows, numbers, number = [], [], 0
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 1):
            if any(cell and not cell.isspace() for cell in row):
                rows.append([cell.strip() for cell in row])
                numbers.append(number)
    except csv.Error as fault:
        raise DataError(f"{path}: row {number + 1} is not CSV ({one_line(fault)}); check its quotation marks") from None
    return rows, numbers


def _header(path: Path, header: list[str]) -> list[str]:
    """The names of the columns, checked."""
    if all(cell not in MISSING and as_number(cell) is not None for cell in header):
        first = visible(", ".join(header), 60)
        raise DataError(f"{path}: row 1 has numbers ({first}), expected the names of the columns; add a first row")
    name, times = Counter(header).most_common(1)[0]
    if times > 1:
        at = " and ".join(str(i + 1) for i, one in enumerate(header) if one == name)
        raise DataError(f"{path}: columns {at} have the same name {visible(name, 80)!r}; rename all but one")
    return header


def read_parquet(path: Path) -> Columns:
    """The columns of a parquet file; needs pyarrow."""
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,import-untyped]
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs pyarrow; pip install pyarrow, or save the table as CSV"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            rows, columns = file.metadata.num_rows, file.metadata.num_columns
            if rows * columns > CELLS:
                raise DataError(f"{path}: has {rows:,} x {columns:,} cells, more than {CELLS:,}; leave columns out")
            table = file.read()
    except DataError:
        raise
    except Exception as fault:  # the type depends on the version: not a parquet file, cut off, damaged
        raise DataError(f"{path}: cannot be read as parquet ({one_line(fault)})") from None
    if not rows or not columns:
        raise DataError(f"{path}: the table is empty")
    found = from_frame(_ArrowFrame(table), str(path))
    return Columns(found.where, found.cells, found.unusable)


class _ArrowFrame:
    """An arrow table with the two methods of a data frame that `from_frame` uses."""

    def __init__(self, table: Any) -> None:
        self.table, self.columns = table, table.column_names

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, name: str) -> np.ndarray:
        import pyarrow  # type: ignore[import-not-found,import-untyped]

        kind, column = self.table.schema.field(name).type, self.table.column(name)
        if pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind) or pyarrow.types.is_boolean(kind):
            return np.asarray(column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False), np.float64)
        if pyarrow.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        out = np.empty(len(column), object)
        for i, value in enumerate(column.to_pylist()):
            out[i] = value
        return out
