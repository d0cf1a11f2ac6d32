"""Targets of any kind from columns of values: class labels, several labels of 0 or 1, or numbers.

    classification   one column; texts, or whole numbers with few different values
    multi-label      several columns of 0 and 1
    regression       one or several columns of numbers, standardized: (y - mean) / std of the training rows

>>> rows = Columns("t.csv", {"species": ["dog", "cat", "dog"], "grams": ["900", "410", "870.5"]})
>>> code = TargetCode.of(rows, ("species",))
>>> code.kind, code.names, code.encode(rows)
('classification', ('cat', 'dog'), tensor([1, 0, 1]))
>>> TargetCode.of(rows, ("grams",)).kind
'regression'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.core.text import visible
from thinwire.data.columns import Columns, number_text
from thinwire.errors import ConfigError, DataError

TargetKind = Literal["classification", "multi-label", "regression"]
FEW = 20  # whole numbers with at most so many different values are classes
MOST_CLASSES = 10_000
POOLED = (
    "Statistics (means, standard deviations, categories) come from the pooled training examples; a real federation "
    "would have to estimate them."
)

_LOSSES = {"classification": "cross-entropy", "multi-label": "bce", "regression": "mse"}
_METRICS: dict[str, tuple[str, ...]] = {"multi-label": ("multilabel-f1",), "regression": ("r2",)}


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
        for name in columns:
            rows.need(name, "task.target")
            _check_complete(rows, name)
        numbers = [rows.numbers(name) for name in columns]
        chosen = kind or _derived(numbers)
        if chosen == "classification":
            return cls._classes(rows, columns, numbers[0])
        for name, values in zip(columns, numbers, strict=True):
            _check_numbers(rows, name, values, chosen)
        return cls("multi-label" if chosen == "multi-label" else "regression", tuple(columns), tuple(columns))

    @classmethod
    def _classes(cls, rows: Columns, columns: Sequence[str], numbers: np.ndarray | None) -> TargetCode:
        if len(columns) > 1:
            raise ConfigError(
                f"task.target names {len(columns)} columns, but a classification has one; write one column, or "
                "task.target_kind = 'multi-label' for columns of 0 and 1"
            )
        if numbers is None:
            names = sorted({str(text) for text in rows.texts(columns[0])})
        else:
            names = [number_text(value) for value in np.unique(numbers).tolist()]
        if len(names) < 2:
            only = visible(names[0], 40)
            raise DataError(
                f"{rows.where}: the target column {columns[0]!r} has one class only, {only!r}; expected two or more"
            )
        if len(names) > min(MOST_CLASSES, max(len(rows) // 2, FEW)):
            raise DataError(
                f"{rows.where}: the target column {columns[0]!r} has {len(names):,} different texts in {len(rows):,} "
                f"rows, such as {visible(names[0], 40)!r}: too many for classes; name another column: task.target"
            )
        return cls("classification", tuple(columns), tuple(names), numbers is not None)

    def fitted(self, train: Columns) -> TargetCode:
        """The code with mean and standard deviation of the training rows, for regression."""
        if self.kind != "regression":
            return self
        values = np.stack([_known(train.numbers(name)) for name in self.columns], 1)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, std = values.mean(0), values.std(0)
        for name, one in zip(self.columns, std.tolist(), strict=True):
            if not 0 < one < np.inf:
                raise DataError(
                    f"{train.where}: the target column {name!r} has a standard deviation of {one:g}, expected above 0"
                )
        return replace(self, mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    @property
    def outputs(self) -> int:
        """The number of outputs of a model: classes, labels or numbers."""
        return len(self.names)

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return _LOSSES[self.kind]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics besides loss and accuracy."""
        return _METRICS.get(self.kind, ())

    def encode(self, rows: Columns) -> Tensor:
        """(rows,) or (rows, labels) int64, or (rows,) or (rows, numbers) float32."""
        for name in self.columns:
            rows.need(name, "task.target")
            _check_complete(rows, name)
        numbers = [rows.numbers(name) for name in self.columns]
        if self.kind == "classification":
            return self._labels(rows, numbers[0])
        for name, values in zip(self.columns, numbers, strict=True):
            _check_numbers(rows, name, values, self.kind)
        table = np.stack([_known(values) for values in numbers], 1)
        if self.kind == "multi-label":
            return torch.from_numpy(table.astype(np.int64))
        scaled = torch.from_numpy(((table - self.mean) / self.std).astype(np.float32))
        return scaled[:, 0] if len(self.columns) == 1 else scaled

    def _labels(self, rows: Columns, numbers: np.ndarray | None) -> Tensor:
        if self.numeric and numbers is not None:
            texts = [number_text(value) for value in numbers.tolist()]
        else:
            texts = [str(text) for text in rows.texts(self.columns[0])]
        position = {name: i for i, name in enumerate(self.names)}
        for i, text in enumerate(texts):
            if text not in position:
                known = visible(", ".join(self.names), 80)
                raise DataError(f"{rows.row(i)}: class {visible(text, 40)!r} does not occur in {self.listed} ({known})")
        return torch.tensor([position[text] for text in texts])

    def note(self, derived: bool) -> str:
        """What the targets are, for readers of results."""
        named = ", ".join(visible(name, 40) for name in self.columns[:3])
        named += f" and {len(self.columns) - 3} more" if len(self.columns) > 3 else ""
        how = " (derived from its values; task.target_kind states it)" if derived else ""
        if self.kind == "classification":
            return f"Target {named}: classification with {self.outputs} classes{how}."
        if self.kind == "multi-label":
            return f"Targets {named}: multi-label classification with {self.outputs} labels{how}."
        scale = "; ".join(f"(y - {m:g}) / {s:g}" for m, s in zip(self.mean[:3], self.std[:3], strict=True))
        return f"Target {named}: regression{how}, standardized: {scale}."


def _derived(numbers: Sequence[np.ndarray | None]) -> str:
    """The kind of learning that target columns suggest."""
    if len(numbers) == 1:
        values = numbers[0]
        whole = values is not None and bool(np.all(values == np.rint(values)))
        few = values is None or (whole and len(np.unique(values)) <= FEW)
        return "classification" if few else "regression"
    binary = all(values is not None and np.isin(values, (0, 1)).all() for values in numbers)
    return "multi-label" if binary else "regression"


def _check_complete(rows: Columns, name: str) -> None:
    """Raise an error if a row has no target, or one that is not finite."""
    cells = rows.cells[name]
    absent = np.flatnonzero(np.isnan(cells)) if isinstance(cells, np.ndarray) else None
    if absent is None:
        absent = np.array([i for i, text in enumerate(rows.texts(name)) if text is None])
    if len(absent):
        raise DataError(
            f"{rows.row(int(absent[0]))} has no value in the target column {name!r}; fill it in, or delete the row"
        )
    values = rows.numbers(name)
    if values is not None and len(bad := np.flatnonzero(~np.isfinite(values))):
        raise DataError(
            f"{rows.row(int(bad[0]))}: the target column {name!r} has {values[bad[0]]}, expected a finite number"
        )


def _check_numbers(rows: Columns, name: str, values: np.ndarray | None, kind: str) -> None:
    """Raise an error if a cell is no number, or of multi-label targets neither 0 nor 1."""
    expected = "0 or 1" if kind == "multi-label" else "a number"
    if values is None:
        from thinwire.data.columns import as_number

        i, text = next((i, text) for i, text in enumerate(rows.texts(name)) if as_number(text) is None)
        given = visible(str(text), 40)
        raise DataError(f"{rows.row(i)}: the target column {name!r} has {given!r}, expected {expected} ({kind})")
    if kind == "multi-label" and len(bad := np.flatnonzero(~np.isin(values, (0, 1)))):
        given = number_text(values[bad[0]])
        raise DataError(
            f"{rows.row(int(bad[0]))}: the label column {name!r} has {given}, expected 0 or 1 (multi-label)"
        )


def _known(values: np.ndarray | None) -> np.ndarray:
    assert values is not None  # `_check_numbers` has raised otherwise
    return values
