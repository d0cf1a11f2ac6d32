"""Records of texts from files: JSONL, JSON, CSV, parquet, and datasets of Hugging Face. Nothing in a file is trusted.

    .jsonl, .jsonl.gz, .jsonl.xz    one JSON object a line
    .json                           a list of objects
    .csv, .tsv, .txt, .parquet      a table with a row of column names

Every record knows its file and row, for messages of errors.

>>> record = Record({"prompt": "1 + 1", "response": ""}, "sums.jsonl: row 3")
>>> record.text("prompt", "task.prompt")
'1 + 1'
>>> record.text("response", "task.response")
Traceback (most recent call last):
thinwire.errors.DataError: sums.jsonl: row 3: 'response' (task.response) is empty; write a text, or delete the row
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.data.columns import number_text
from thinwire.data.reading import one_line, read_bytes
from thinwire.data.table_files import LIMIT, SUFFIXES, read_table
from thinwire.errors import DataError

LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Record:
    """One record: its values by column, and its place.

    Args:
        values: column -> value.
        where: file and row.
    """

    values: Mapping[str, Any]
    where: str

    def text(self, column: str, option: str) -> str:
        """The text of a column that must not be empty; `option` is the setting that names the column."""
        value = self.value(column, option)
        if isinstance(value, bool | int | float):
            value = str(value) if isinstance(value, bool) else number_text(float(value))
        if not isinstance(value, str):
            raise DataError(f"{self.where}: {column!r} ({option}) is of type {type(value).__name__}, expected a text")
        if not value.strip():
            raise DataError(f"{self.where}: {column!r} ({option}) is empty; write a text, or delete the row")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DataError(f"{self.where}: {column!r} ({option}) has half of a character (a lone surrogate)") from None
        return value

    def value(self, column: str, option: str) -> Any:
        """The value of a column, which must be there."""
        if column not in self.values:
            listed = ", ".join(visible(name, 40) for name in list(self.values)[:12])
            raise DataError(f"{self.where}: no column {visible(column, 80)!r} ({option}); it has {listed or 'none'}")
        if self.values[column] is None:
            raise DataError(f"{self.where}: {column!r} ({option}) has no value; fill it in, or delete the row")
        return self.values[column]


def read_records(path: Path) -> list[Record]:
    """The records of a file."""
    bare = Path(path.stem) if path.suffix in (".gz", ".xz") else path
    if bare.suffix.lower() in SUFFIXES:
        return _of_table(path)
    if bare.suffix.lower() not in LINES:
        raise DataError(f"{path}: expected records in a file that ends in .jsonl, .json, .csv, .tsv or .parquet")
    data = read_bytes(path, LIMIT)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        row = data[: fault.start].count(b"\n") + 1
        raise DataError(f"{path}: row {row} is not UTF-8 text; save the file with the encoding UTF-8") from None
    found = _of_list(path, text) if bare.suffix.lower() == ".json" else _of_lines(path, text)
    if not found:
        raise DataError(f"{path}: the file has no records; expected one JSON object a line")
    return found


def from_rows(rows: Sequence[Mapping[str, Any]] | Any, where: str) -> list[Record]:
    """The records of a `datasets.Dataset` or of a list of dictionaries; rows count from 0."""
    found = [Record(dict(row), f"{where}: row {i}") for i, row in enumerate(rows)]
    if not found:
        raise DataError(f"{where}: it has no rows")
    return found


def _of_lines(path: Path, text: str) -> list[Record]:
    """One object a line; blank lines are skipped."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # other line breaks may stand inside of a text
        if line.strip():
            found.append(_record(path, number, _parsed(path, number, line)))
    return found


def _of_list(path: Path, text: str) -> list[Record]:
    """A list of objects, or one object a line all the same."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return _of_lines(path, text)
    if not isinstance(rows, list):
        rows = [rows]
    return [_record(path, number, row) for number, row in enumerate(rows, 1)]


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: row {number} is not a JSON object ({one_line(fault)})") from None


def _record(path: Path, number: int, row: Any) -> Record:
    if not isinstance(row, dict):
        raise DataError(f"{path}: row {number} is a JSON {type(row).__name__}, expected an object of columns")
    return Record(row, f"{path}: row {number}")


def _of_table(path: Path) -> list[Record]:
    """The rows of a table; cells without a value are None."""
    table = read_table(path)
    columns = {name: table.texts(name) for name in table.cells}
    return [Record({name: cells[i] for name, cells in columns.items()}, table.row(i)) for i in range(len(table))]
