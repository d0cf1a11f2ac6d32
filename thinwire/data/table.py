"""A table of your own: one row for each example, a target column, perhaps a column that names the client.

    thinwire run fedavg --on table --set task.file=patients.csv --set task.target=outcome --set task.client=hospital

Files are read by `columns.py`. Columns become inputs and targets; statistics are those of the training rows.

    number           (x - mean) / std;  a missing number is the mean, and a second input is 1 where it was missing
    category         one input for each text of the training rows, and one for all other texts
    classification   one target column: texts, or whole numbers with few different values
    multi-label      several target columns of 0 and 1
    regression       one or several target columns of numbers: (y - mean) / std

>>> def columns(**cells):
...     return Columns("t.csv", {name: np.array(texts, object) for name, texts in cells.items()})
>>> rows = columns(age=["30", None, "50"], city=["Rome", "Oslo", "Rome"], pet=["dog", "cat", "dog"])
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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.columns import Columns, Names, from_frame, listed, number_text, read_table
from thinwire.data.examples import Arrays, Images, Source, positions
from thinwire.data.files import own_path
from thinwire.data.partition import held_out_rows
from thinwire.errors import ConfigError, DataError

MAX_CATEGORIES = 256  # of one column
MAX_VALUES = 1 << 31  # of all encoded rows
MAX_WHOLE_NUMBERS = 20  # whole numbers with at most so many different values are classes
MAX_CLASSES = 10_000
POOLED = (
    "Statistics (means, standard deviations, categories) come from the pooled training examples; a real federation "
    "would have to estimate them."
)


@register("dataset", "table", doc="A CSV or parquet file of your own: task.file, task.target, task.client.")
def from_table(
    file: str | Path | Any = "",
    target: str | Names = "",
    *,
    client: str = "",
    features: Names = (),
    drop: Names = (),
    target_kind: str = "",
    test_fraction: float = 0.2,
    test_file: str | Path | Any = None,
    data_dir: Path | None = None,
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
        test_fraction: the fraction of rows that is held out for testing, of each client and of each class; the seed of
            a run does not change them.
        test_file: a file or DataFrame of test rows instead.
        data_dir: the folder of all datasets, in which a file may be.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "pets.csv"
    ...     _ = file.write_text("home,grams,species\\n" + "a,900,dog\\na,410,cat\\nb,870,dog\\nb,400,cat\\n" * 5)
    ...     source = from_table(file, "species", client="home")
    >>> len(source.train), len(source.test), source.class_names, source.user_names, source.model
    (16, 4, ('cat', 'dog'), ('a', 'b'), {'inputs': 1})
    """
    rows = _columns(file, "task.file", data_dir)
    given = None if test_file is None else _columns(test_file, "task.test_file", data_dir)
    code = TargetCode.of(rows, (target,) if isinstance(target, str) and target else tuple(target), target_kind)
    parts = code.split(rows, given, client, test_fraction)
    drawn = " (drawn once, independent of the seed)" if given is None else ""
    return from_columns(parts, code, client, features, drop, drawn)


def from_columns(
    parts: Sequence[Columns],
    code: TargetCode,
    client: str = "",
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    drawn: str = "",
) -> Source:
    """A dataset from training and test rows.

    Args:
        parts: training and test rows.
        code: how targets are encoded.
        client: the column that names the client, "" for none.
        features: the columns that are inputs; by default all others.
        drop: columns that are not used.
        drawn: how test rows were chosen, for the note.
    """
    train, test = parts
    for name in drop:
        train.need(name, "task.drop", any_type=True)
    taken = {*code.columns, client}
    if both := [name for name in features if name in taken]:
        raise ConfigError(f"task.features has {both[0]!r}, which is the target or the client; leave it out")
    inputs = [name for name in features or train.cells if name not in {*taken, *drop}]
    for name in inputs:
        train.need(name, "task.features" if features else "an input")
    code = code.fitted(train)
    encoding = Features.of(train, inputs)
    note = f"{len(train):,} rows for training, {len(test):,} for testing{drawn}. {code.note()} {encoding.note()}"
    model = {"inputs": encoding.width}
    return code.source(parts, [encoding.encode(part) for part in parts], client, note=f"{note} {POOLED}", model=model)


def _columns(file: Any, option: str, data_dir: Path | None) -> Columns:
    """The columns of a file, which an option names, or of a DataFrame."""
    if isinstance(file, str | Path):
        return read_table(own_path(data_dir, file, option))
    if not hasattr(file, "columns") or not hasattr(file, "__getitem__"):
        raise ConfigError(f"a table is a file (.csv, .parquet) or a pandas DataFrame, not {type(file).__name__}")
    if not len(file):
        raise DataError("the data frame has no rows")
    return from_frame(file)


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


class Kind(NamedTuple):
    """A kind of targets: loss, metrics, and its name for readers."""

    loss: str
    metrics: tuple[str, ...]
    words: str


KINDS = {
    "classification": Kind("cross-entropy", (), "classification with {} classes"),
    "multi-label": Kind("bce", ("multilabel-f1",), "multi-label classification with {} labels"),
    "regression": Kind("mse", ("r2",), "regression"),
}


@dataclass(frozen=True)
class TargetCode:
    """How values become targets.

    Args:
        kind: classification, multi-label or regression.
        columns: the names of the target columns.
        names: of the classes, of the labels, or of the numbers to predict.
        derived: whether the kind was derived from the values.
        mean, std: of the numbers to predict.
        listed: where the classes are from, for error messages.
    """

    kind: str
    columns: tuple[str, ...]
    names: tuple[str, ...]
    derived: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    listed: str = "the training rows"

    @classmethod
    def of(cls, rows: Columns, columns: Sequence[str], kind: str = "") -> TargetCode:
        """The code of target columns; the kind is derived if it is not given."""
        if not columns:
            raise DataError(f"{rows.where}: no target column is named; write task.target; {rows.listed()}")
        if kind and kind not in KINDS:
            raise ConfigError(f"task.target_kind must be one of {', '.join(KINDS)}, not {kind!r}")
        numbers = [_complete(rows, name) for name in columns]
        derived, kind = not kind, kind or _derived(numbers)
        if kind != "classification":
            return cls(kind, tuple(columns), tuple(columns), derived)
        if len(columns) > 1:
            raise ConfigError(
                f"task.target names {len(columns)} columns, but a classification has one; write one column, or "
                "task.target_kind = 'multi-label' for columns of 0 and 1"
            )
        values = numbers[0]
        texts = sorted(set(rows.texts(columns[0]))) if values is None else map(number_text, np.unique(values).tolist())
        names = tuple(texts)
        where = f"{rows.where}: the target column {columns[0]!r} has"
        if len(names) < 2:
            raise DataError(f"{where} one class only, {visible(names[0], 40)!r}; expected two or more")
        if len(names) > min(MAX_CLASSES, max(len(rows) // 2, MAX_WHOLE_NUMBERS)):
            raise DataError(
                f"{where} {len(names):,} different texts in {len(rows):,} rows, such as {visible(names[0], 40)!r}: too "
                "many for classes; name another column: task.target"
            )
        return cls(kind, tuple(columns), names, derived)

    def fitted(self, train: Columns) -> TargetCode:
        """The code with mean and standard deviation of the training rows, for regression."""
        if self.kind != "regression":
            return self
        values = self._numbers(train)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = values.mean(0).tolist(), values.std(0).tolist()
        for name, one in zip(self.columns, std, strict=True):
            if not 0 < one < np.inf:
                raise DataError(
                    f"{train.where}: the target column {name!r} has a standard deviation of {one:g}, expected above 0"
                )
        return replace(self, mean=tuple(mean), std=tuple(std))

    def split(self, rows: Columns, test: Columns | None, client: str = "", fraction: float = 0.2) -> list[Columns]:
        """Training and test rows; without test rows a fraction of each client and of each class is held out."""
        if test is not None:
            return [rows, test]
        labels = rows.texts(self.columns[0]) if self.kind == "classification" else None
        held = held_out_rows(len(rows), fraction, rows.column(client, "task.client"), labels)
        return [rows.take(np.flatnonzero(held == part)) for part in (False, True)]

    def source(self, parts: Sequence[Columns], inputs: Sequence[Tensor], client: str = "", **more: Any) -> Source:
        """The dataset of training and test rows.

        Args:
            parts: training and test rows, with the targets.
            inputs: their inputs; bytes are images.
            client: the column of clients; test rows need none.
            more: further arguments of `Source`.
        """
        made = [Images if x.dtype == torch.uint8 else Arrays for x in inputs]
        train, test = (make(x, self.encode(part)) for make, x, part in zip(made, inputs, parts, strict=True))
        owners = [parts[0].column(client, "task.client")]
        owners.append(parts[1].column(client, "task.client") if client in parts[1].cells else None)
        more |= {"loss": KINDS[self.kind].loss, "metrics": KINDS[self.kind].metrics, "class_names": self.names}
        return Source.by_user(train, test, len(self.names), owners, **more)

    def encode(self, rows: Columns) -> Tensor:
        """(rows,) or (rows, labels) int64, or (rows,) or (rows, numbers) float32."""
        if self.kind == "classification":
            return positions(self._classes(rows), self.names)
        values = self._numbers(rows)
        if self.kind == "multi-label":
            return torch.from_numpy(values.astype(np.int64))
        scaled = torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))
        return scaled[:, 0] if len(self.columns) == 1 else scaled

    def _classes(self, rows: Columns) -> list[str]:
        """The name of the class of each row; numbers are compared by value."""
        numbers, texts = _complete(rows, self.columns[0]), rows.texts(self.columns[0])
        if numbers is not None and not set(texts) <= set(self.names):
            texts = list(map(number_text, numbers.tolist()))
        if unknown := set(texts) - set(self.names):
            i, known = next(i for i, text in enumerate(texts) if text in unknown), visible(", ".join(self.names), 80)
            raise DataError(f"{rows.row(i)}: class {visible(texts[i], 40)!r} does not occur in {self.listed} ({known})")
        return texts

    def _numbers(self, rows: Columns) -> np.ndarray:
        """(rows, columns) target numbers; a text, or of multi-label targets neither 0 nor 1, is an error."""
        binary = self.kind == "multi-label"
        expected, found = f"{'0 or 1' if binary else 'a number'} ({self.kind})", []
        for name in self.columns:
            _complete(rows, name)
            found.append(rows.need_numbers(name, expected, "the target column"))
            rows.refuse(name, binary & ~np.isin(found[-1], (0, 1)), expected, "the label column")
        return np.stack(found, 1)

    def note(self) -> str:
        """What the targets are, for readers of results."""
        how = " (derived from its values; task.target_kind states it)" if self.derived else ""
        scale = "; ".join(f"(y - {m:g}) / {s:g}" for m, s in zip(self.mean[:3], self.std[:3], strict=True))
        what = KINDS[self.kind].words.format(len(self.names)) + how + f", standardized: {scale}" * bool(scale)
        return f"Target{'s' * (self.kind == 'multi-label')} {listed(self.columns, 3)}: {what}."


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
