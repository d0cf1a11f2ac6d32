"""A table of your own: one row for each example, a target column, perhaps a column that names the client.

    thinwire run fedavg --on table --set task.file=patients.csv --set task.target=outcome --set task.client=hospital

    .csv, .tsv, .txt (each also with .gz)    UTF-8 text with one row of column names; delimiters are commas, semicolons,
                                             tabs or bars: the one that the first row has most of
    .parquet                                 read by pandas and pyarrow

Cells of a CSV file stay texts until a column is used as numbers, so that `007` and `1e5` can be names. The csv module
reads them, because pandas fills rows with too few cells without a word. Nothing in a file is trusted. Rows are numbered
as in a spreadsheet: the header is row 1, the first example row 2.

Columns become inputs and targets; statistics are those of the training rows.

    number           (x - mean) / std;  a missing number is the mean, and a second input is 1 where it was missing
    category         one input for each text of the training rows, and one for all other texts
    classification   one target column: texts, or whole numbers with few different values
    multi-label      several target columns of 0 and 1
    regression       one or several target columns of numbers: (y - mean) / std

>>> def columns(**cells):
...     return Columns("t.csv", {name: np.array(texts, object) for name, texts in cells.items()})
>>> rows = columns(age=["30", "", "50"], city=["Rome", "Oslo", "Rome"], pet=["dog", "cat", "dog"])
>>> features = Features.of(rows, ("age", "city"))
>>> features.encode(rows).tolist()
[[-1.0, 0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0, 0.0]]
>>> features.encode(columns(age=["40"], city=["Bonn"])).tolist()
[[0.0, 0.0, 0.0, 0.0, 1.0]]
>>> code = TargetCode.of(rows, ("pet",))
>>> code.kind, code.names, code.encode(rows)
('classification', ('cat', 'dog'), tensor([1, 0, 1]))
"""

from __future__ import annotations

import csv
import difflib
import functools
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.examples import Arrays, Examples, Source, positions
from thinwire.data.files import one_line, own_path, read_text
from thinwire.data.partition import held_out_rows
from thinwire.errors import ConfigError, DataError

# cells without a value; the last one is that of the UCI repository
MISSING = frozenset((None, "", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "?"))
LIMIT = 1 << 30  # bytes of a text file, decompressed
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
_DELIMITERS = ",;\t|"
MAX_CATEGORIES = 256  # of one column
MAX_VALUES = 1 << 31  # of all encoded rows
MAX_WHOLE_NUMBERS = 20  # whole numbers with at most so many different values are classes
MAX_CLASSES = 10_000
POOLED = (
    "Statistics (means, standard deviations, categories) come from the pooled training examples; a real federation "
    "would have to estimate them."
)

TargetKind = Literal["classification", "multi-label", "regression"]
_LOSSES = {"classification": "cross-entropy", "multi-label": "bce", "regression": "mse"}
_METRICS: dict[str, tuple[str, ...]] = {"multi-label": ("multilabel-f1",), "regression": ("r2",)}


def from_table(
    file: str | Path | Any = "",
    target: str | tuple[str, ...] | Sequence[str] = "",
    *,
    client: str = "",
    features: tuple[str, ...] | Sequence[str] = (),
    drop: tuple[str, ...] | Sequence[str] = (),
    target_kind: str = "",
    test_fraction: float = 0.2,
    test_file: str | Path | Any = None,
    delimiter: str = "",
    split_seed: int = 0,
) -> Source:
    """A dataset from a table: numbers are standardized, texts become one-hot inputs, targets get labels or a scale.

    Args:
        file: a CSV file (also .gz), a parquet file, or a pandas DataFrame.
        target: the column to predict, or several columns: labels of 0 and 1, or numbers.
        client: the column that names the client of a row; "" for none.
        features: the columns that are inputs of the model; by default all others.
        drop: columns that are not used.
        target_kind: classification, multi-label or regression; by default derived: texts and few whole numbers are
            classes, other numbers a regression, several columns of 0 and 1 are labels.
        test_fraction: the fraction of rows that is held out for testing, of each client and of each class.
        test_file: a file or DataFrame of test rows instead.
        delimiter: of a CSV file; by default derived.
        split_seed: of another choice of test rows; the seed of a run does not change them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "pets.csv"
    ...     _ = file.write_text("home,grams,species\\n" + "a,900,dog\\na,410,cat\\nb,870,dog\\nb,400,cat\\n" * 5)
    ...     source = from_table(file, "species", client="home")
    >>> len(source.train), len(source.test), source.class_names, source.user_names, source.model
    (16, 4, ('cat', 'dog'), ('a', 'b'), {'inputs': 1})
    """
    rows, drawn = _columns(file, delimiter), ""
    code = TargetCode.of(rows, (target,) if isinstance(target, str) and target else tuple(target), target_kind)
    if test_file is None:
        drawn = " (drawn once, independent of the seed)"
        rows, others = divided(rows, code, client, test_fraction, split_seed)
    else:
        others = _columns(test_file, delimiter)
    code = code.fitted(rows)
    note = f"{len(rows):,} rows for training, {len(others):,} for testing{drawn}. {code.note(derived=not target_kind)}"
    return from_columns(rows, others, code, client=client, features=features, drop=drop, note=note)


@register("dataset", "table", doc="A CSV or parquet file of your own: task.file, task.target, task.client.")
@functools.wraps(from_table)
def table(data_dir: Path | None = None, **options: Any) -> Source:
    """A table in a file; the options are those of `from_table`."""
    for option in ("file", *(["test_file"] if options.get("test_file") else [])):
        options[option] = own_path(data_dir, options.get(option, ""), f"task.{option}")
    return from_table(**options)


def divided(rows: Columns, code: TargetCode, client: str, fraction: float, seed: int) -> list[Columns]:
    """Training and test rows: a fraction of each client and of each class is held out."""
    labels = [str(text) for text in rows.texts(code.columns[0])] if code.kind == "classification" else None
    test = held_out_rows(len(rows), fraction, clients_of(rows, client), labels, seed)
    return [rows.take(np.flatnonzero(test == part)) for part in (False, True)]


def from_columns(
    train_rows: Columns,
    test_rows: Columns,
    code: TargetCode,
    *,
    client: str = "",
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    note: str = "",
) -> Source:
    """A dataset from training and test rows; the options are those of `from_table`."""
    for name in drop:
        if name not in train_rows.names:
            train_rows.need(name, "task.drop")
    taken = {*code.columns, client}
    if both := [name for name in features if name in taken]:
        raise ConfigError(f"task.features has {both[0]!r}, which is the target or the client; leave it out")
    inputs = [name for name in features or train_rows.names if name not in {*taken, *drop}]
    for name in inputs:
        train_rows.need(name, "task.features" if features else "an input")
    encoding = Features.of(train_rows, inputs)
    train, test = (Arrays(encoding.encode(part), code.encode(part)) for part in (train_rows, test_rows))
    owners = [clients_of(train_rows, client), clients_of(test_rows, client) if client in test_rows.cells else None]
    words = f"{note} {encoding.note()} {POOLED}"
    return code.source(train, test, owners, note=words, model={"inputs": encoding.width})


def _columns(file: Any, delimiter: str) -> Columns:
    """The columns of a file or a DataFrame."""
    if isinstance(file, str | Path):
        return read_table(Path(file).expanduser(), delimiter)
    if not hasattr(file, "columns") or not hasattr(file, "__getitem__"):
        raise ConfigError(f"a table is a file (.csv, .parquet) or a pandas DataFrame, not {type(file).__name__}")
    if not len(file):
        raise DataError("the data frame has no rows")
    return from_frame(file)


def clients_of(rows: Columns, client: str) -> list[str] | None:
    """The client of each row; None without a client column."""
    if not client:
        return None
    rows.need(client, "task.client")
    texts = rows.texts(client)
    if None in texts:
        where = rows.row(texts.index(None))
        raise DataError(f"{where} names no client in the column {client!r}; fill it in, or delete the row")
    return [str(text) for text in texts]


# -- columns ---------------------------------------------------------------------------------------------------------


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


# -- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputColumn:
    """A column that a model gets, of numbers or of texts.

    Args:
        name: of the column.
        mean: of the training rows that have a number.
        std: the standard deviation of these.
        missing: whether training rows without a number exist, which a second input marks.
        categories: the texts of the training rows, "" for a missing one; None for numbers.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    missing: bool = False
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        """The number of inputs that it becomes; of texts, one for each category and one for all others."""
        return 1 + (self.missing if self.categories is None else len(self.categories))

    @classmethod
    def of(cls, name: str, rows: Columns) -> InputColumn:
        """The statistics or categories of a column."""
        values = rows.numbers(name)
        if values is None:
            found = sorted({text or "" for text in rows.texts(name)})
            if len(found) > MAX_CATEGORIES:
                raise DataError(
                    f"{rows.where}: column {name!r} has {len(found):,} different texts, such as "
                    f"{visible(found[1], 40)!r}; at most {MAX_CATEGORIES} can be categories; leave it out: "
                    f"task.drop = [{name!r}]"
                )
            return cls(name, categories=tuple(found))
        rows.refuse(name, np.isinf(values), "a finite number")
        known = values[~np.isnan(values)]
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
        if self.categories is not None:
            at = {text: i for i, text in enumerate(self.categories)}
            code = np.array([at.get(text or "", len(at)) for text in rows.texts(self.name)])
            return np.asarray(code[:, None] == np.arange(self.width), np.float32)
        values = rows.need_numbers(self.name, "a number as in all training rows")
        absent = np.isnan(values)
        scaled = (np.where(absent, self.mean, values) - self.mean) / self.std
        near = f"a number nearer to the training rows (mean {self.mean:g}, standard deviation {self.std:g})"
        rows.refuse(self.name, ~(np.abs(scaled) < 1e30), near)
        return np.stack([scaled, absent][: self.width], 1).astype(np.float32)


@dataclass(frozen=True)
class Features:
    """The columns that a model gets, in order; `empty` were left out: they have no values."""

    columns: tuple[InputColumn, ...]
    empty: tuple[str, ...] = ()

    @classmethod
    def of(cls, rows: Columns, names: Sequence[str]) -> Features:
        """The encoding of these columns, from the training rows."""
        empty = tuple(name for name in names if (one := rows.numbers(name)) is not None and np.isnan(one).all())
        found = tuple(InputColumn.of(name, rows) for name in names if name not in empty)
        if not found:
            raise DataError(f"{rows.where}: no column is left for the inputs of the model; {rows.listed()}")
        return cls(found, empty)

    @property
    def width(self) -> int:
        """The number of inputs of the model."""
        return sum(column.width for column in self.columns)

    def encode(self, rows: Columns) -> Tensor:
        """(rows, width) float32."""
        if self.width * len(rows) > MAX_VALUES:
            raise DataError(
                f"{rows.where}: {len(rows):,} rows with {self.width:,} inputs each are more than {MAX_VALUES:,} "
                "numbers; leave columns out: task.drop"
            )
        for column in self.columns:
            rows.need(column.name, "an input of the training rows")
        return torch.from_numpy(np.concatenate([column.encode(rows) for column in self.columns], 1))

    def note(self) -> str:
        """What was done, for readers of results."""
        numbers = [one for one in self.columns if one.categories is None]
        texts, parts = [one.width for one in self.columns if one.categories is not None], []
        if numbers:
            parts.append(f"{len(numbers)} number column{'s' * (len(numbers) > 1)}, standardized")
        if texts:
            parts.append(f"{len(texts)} text column{'s' * (len(texts) > 1)} as {sum(texts)} one-hot inputs")
        words = f"{self.width} inputs: {' and '.join(parts)}."
        if filled := [one.name for one in numbers if one.missing]:
            words += f" Missing numbers are the mean, with an input that marks them ({listed(filled, 5)})."
        if self.empty:
            words += f" Left out, because no training row has a value: {listed(self.empty, 5)}."
        return words


# -- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetCode:
    """How values become targets.

    Args:
        kind: classification, multi-label or regression.
        columns: the names of the target columns.
        names: of the classes, of the labels, or of the numbers to predict.
        numeric: of classes, whether they are numbers in the file.
        mean, std: of the numbers to predict.
        listed: where the classes are from, for error messages.
    """

    kind: TargetKind
    columns: tuple[str, ...]
    names: tuple[str, ...]
    numeric: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    listed: str = "the training rows"

    @classmethod
    def of(cls, rows: Columns, columns: Sequence[str], kind: str = "") -> TargetCode:
        """The code of target columns; the kind is derived if it is not given."""
        if not columns:
            raise DataError(f"{rows.where}: no target column is named; write task.target; {rows.listed()}")
        if kind and kind not in get_args(TargetKind):
            raise ConfigError(f"task.target_kind must be one of {', '.join(get_args(TargetKind))}, not {kind!r}")
        numbers = [_complete(rows, name) for name in columns]
        kind = kind or _derived(numbers)
        if kind != "classification":
            _stacked(rows, columns, kind)
            return cls("multi-label" if kind == "multi-label" else "regression", tuple(columns), tuple(columns))
        if len(columns) > 1:
            raise ConfigError(
                f"task.target names {len(columns)} columns, but a classification has one; write one column, or "
                "task.target_kind = 'multi-label' for columns of 0 and 1"
            )
        texts = {str(text) for text in rows.texts(columns[0])}
        names = sorted(texts) if numbers[0] is None else [number_text(one) for one in np.unique(numbers[0]).tolist()]
        where = f"{rows.where}: the target column {columns[0]!r} has"
        if len(names) < 2:
            raise DataError(f"{where} one class only, {visible(names[0], 40)!r}; expected two or more")
        if len(names) > min(MAX_CLASSES, max(len(rows) // 2, MAX_WHOLE_NUMBERS)):
            raise DataError(
                f"{where} {len(names):,} different texts in {len(rows):,} rows, such as {visible(names[0], 40)!r}: too "
                "many for classes; name another column: task.target"
            )
        return cls("classification", tuple(columns), tuple(names), numbers[0] is not None)

    def fitted(self, train: Columns) -> TargetCode:
        """The code with mean and standard deviation of the training rows, for regression."""
        if self.kind != "regression":
            return self
        values = _stacked(train, self.columns, self.kind)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = values.mean(0), values.std(0)
        for name, one in zip(self.columns, std.tolist(), strict=True):
            if not 0 < one < np.inf:
                raise DataError(
                    f"{train.where}: the target column {name!r} has a standard deviation of {one:g}, expected above 0"
                )
        return replace(self, mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    def source(self, train: Examples, test: Examples, owners: Sequence[Any], **more: Any) -> Source:
        """The dataset of examples with these targets; the other arguments are those of `Source.by_user`."""
        named = {"loss": _LOSSES[self.kind], "metrics": _METRICS.get(self.kind, ()), "class_names": self.names}
        return Source.by_user(train, test, len(self.names), owners, **named, **more)

    def encode(self, rows: Columns) -> Tensor:
        """(rows,) or (rows, labels) int64, or (rows,) or (rows, numbers) float32."""
        numbers = [_complete(rows, name) for name in self.columns]
        if self.kind == "classification":
            return self._labels(rows, numbers[0])
        table = _stacked(rows, self.columns, self.kind)
        if self.kind == "multi-label":
            return torch.from_numpy(table.astype(np.int64))
        scaled = torch.from_numpy(((table - self.mean) / self.std).astype(np.float32))
        return scaled[:, 0] if len(self.columns) == 1 else scaled

    def _labels(self, rows: Columns, numbers: np.ndarray | None) -> Tensor:
        if self.numeric and numbers is not None:
            texts = [number_text(value) for value in numbers.tolist()]
        else:
            texts = [str(text) for text in rows.texts(self.columns[0])]
        if unknown := set(texts) - set(self.names):
            i, known = next(i for i, text in enumerate(texts) if text in unknown), visible(", ".join(self.names), 80)
            raise DataError(f"{rows.row(i)}: class {visible(texts[i], 40)!r} does not occur in {self.listed} ({known})")
        return positions(texts, self.names)

    def note(self, derived: bool) -> str:
        """What the targets are, for readers of results."""
        named = listed(self.columns, 3)
        how = " (derived from its values; task.target_kind states it)" if derived else ""
        if self.kind == "classification":
            return f"Target {named}: classification with {len(self.names)} classes{how}."
        if self.kind == "multi-label":
            return f"Targets {named}: multi-label classification with {len(self.names)} labels{how}."
        scale = "; ".join(f"(y - {m:g}) / {s:g}" for m, s in zip(self.mean[:3], self.std[:3], strict=True))
        return f"Target {named}: regression{how}, standardized: {scale}."


def _derived(numbers: Sequence[np.ndarray | None]) -> str:
    """The kind of learning that target columns suggest."""
    if len(numbers) == 1:
        values = numbers[0]
        few = values is None or (
            bool(np.all(values == np.rint(values))) and len(np.unique(values)) <= MAX_WHOLE_NUMBERS
        )
        return "classification" if few else "regression"
    binary = all(values is not None and np.isin(values, (0, 1)).all() for values in numbers)
    return "multi-label" if binary else "regression"


def _complete(rows: Columns, name: str) -> np.ndarray | None:
    """The numbers of a target column or None; a row without a target, or with one that is not finite, is an error."""
    rows.need(name, "task.target")
    values = rows.numbers(name)
    absent = np.array([text is None for text in rows.texts(name)]) if values is None else np.isnan(values)
    if absent.any():
        where = rows.row(int(absent.argmax()))
        raise DataError(f"{where} has no value in the target column {name!r}; fill it in, or delete the row")
    if values is not None:
        rows.refuse(name, np.isinf(values), "a finite number", "the target column")
    return values


def _stacked(rows: Columns, names: Sequence[str], kind: str) -> np.ndarray:
    """(rows, columns) target numbers; a text, or of multi-label targets neither 0 nor 1, is an error."""
    expected, found = "0 or 1" if kind == "multi-label" else "a number", []
    for name in names:
        found.append(rows.need_numbers(name, f"{expected} ({kind})", "the target column"))
        if kind == "multi-label":
            rows.refuse(name, ~np.isin(found[-1], (0, 1)), f"{expected} ({kind})", "the label column")
    return np.stack(found, 1)
