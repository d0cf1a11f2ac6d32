"""A table of a site: one row for each example, in a file of the same name at all sites.

number      (x - mean) / std      both named in the app, or, with None, computed from the site's own rows
category    one input for each text that the app names, and one for all other texts
class       its position in the list of the app; a site need not have examples of all classes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.data.columns import Columns, as_number
from thinwire.data.features import CategoryColumn, Features, NumberColumn
from thinwire.data.sites.base import Pair, SiteData
from thinwire.data.table_files import read_table
from thinwire.data.targets import TargetCode
from thinwire.errors import ConfigError, DataError

Scale = tuple[float, float]  # mean and standard deviation
_APP = "named in task.py"


@dataclass(frozen=True)
class SiteTable(SiteData):
    """A table in a CSV or parquet file of each site.

    Args:
        file: the name of the file in the folder of a site.
        target: the column to predict.
        classes: the classes of all sites, in the order of the model's outputs; empty for a regression.
        numbers: columns of numbers, and the mean and standard deviation by which each is scaled: constants that are the
            same at all sites; None for those of the site's own rows.
        categories: columns of texts, and the texts that have an input of their own.
        missing: columns of numbers in which cells may be empty: an empty one becomes the mean, and a second input is 1.
        target_scale: of a regression, mean and standard deviation by which the target is scaled.

    >>> table = SiteTable("visits.csv", "stay", ("short", "long"), {"age": (60.0, 20.0)}, {"ward": ("A", "B")})
    >>> table.shapes, table.outputs
    ({'inputs': 4}, 2)
    """

    file: str
    target: str
    classes: tuple[str, ...] = ()
    numbers: Mapping[str, Scale | None] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    target_scale: Scale = (0.0, 1.0)

    def __post_init__(self) -> None:
        if not self.numbers and not self.categories:
            raise ConfigError("SiteTable has no inputs; name columns in numbers or categories")
        check_classes(self.classes, regression=True)
        for name in self.missing:
            if name not in self.numbers:
                raise ConfigError(f"missing names {name!r}, which is not in numbers")
        for name, scale in (*self.numbers.items(), (self.target, self.target_scale)):
            if scale is not None and not (len(scale) == 2 and np.isfinite(scale).all() and scale[1] > 0):
                raise ConfigError(
                    f"the scale of column {name!r} must be a mean and a standard deviation above 0, not {scale!r}"
                )

    @property
    def outputs(self) -> int:
        """The number of classes; 1 for a regression."""
        return len(self.classes) or 1

    @property
    def shapes(self) -> Mapping[str, int]:
        """The number of inputs."""
        numbers = len(self.numbers) + len(self.missing)
        return {"inputs": numbers + sum(len(texts) + 1 for texts in self.categories.values())}

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
        """Where the scales come from."""
        own = [name for name, scale in self.numbers.items() if scale is None]
        if not own:
            return "Numbers are scaled by constants of the app."
        return f"Numbers are scaled by constants of the app, but by the site's own rows: {', '.join(own)}."

    def is_site(self, folder: Path) -> bool:
        """Whether the folder has the file."""
        return (folder / self.file).is_file()

    def read(self, folder: Path) -> Pair:
        """The rows of the file."""
        rows = read_table(folder / self.file)
        for name in (*self.numbers, *self.categories):
            rows.need(name, f"an input {_APP}")
        return self._features(rows).encode(rows), self._targets(rows)

    def blank(self, rows: int) -> Pair:
        """Rows of zeros."""
        targets = torch.zeros(rows, dtype=torch.int64 if self.classes else torch.float32)
        return torch.zeros(rows, self.shapes["inputs"]), targets

    def _features(self, rows: Columns) -> Features:
        texts = [CategoryColumn(name, tuple(known)) for name, known in self.categories.items()]
        return Features((*(self._number(name, rows) for name in self.numbers), *texts))

    def _number(self, name: str, rows: Columns) -> NumberColumn:
        values, scale, empty = rows.numbers(name), self.numbers[name], name in self.missing
        if values is not None and not empty and len(absent := np.flatnonzero(np.isnan(values))):
            raise DataError(
                f"{rows.row(int(absent[0]))} has no value in the column {name!r}; fill it in, or write "
                f"missing=({name!r},) in task.py at all sites"
            )
        if scale is not None or values is None:  # a text is an error of `encode`
            return NumberColumn(name, *(scale or (0.0, 1.0)), empty)
        if np.isnan(values).all():
            raise DataError(f"{rows.where}: column {name!r} has no values to compute its scale; name one in task.py")
        return replace(NumberColumn.of(name, values, rows), missing=empty)

    def _targets(self, rows: Columns) -> Tensor:
        if self.classes:
            return class_targets(rows, self.target, self.classes)
        rows.need(self.target, f"the target {_APP}")
        mean, std = self.target_scale
        return TargetCode("regression", (self.target,), (self.target,), mean=(mean,), std=(std,)).encode(rows)


def check_classes(classes: Sequence[str], regression: bool = False) -> None:
    """Raise ConfigError if a list of classes is no list of two or more different texts."""
    if regression and not classes:
        return
    if isinstance(classes, str) or len(set(classes)) < max(2, len(classes)) or not all(map(_is_text, classes)):
        raise ConfigError(f'classes must be two or more different texts, such as ("no", "yes"), not {classes!r}')


def class_targets(rows: Columns, target: str, classes: tuple[str, ...]) -> Tensor:
    """(rows,) int64: the position of each row's class in the list of the app."""
    rows.need(target, f"the target {_APP}")
    numeric = all(as_number(name) is not None for name in classes)
    return TargetCode("classification", (target,), classes, numeric, listed="the classes of task.py").encode(rows)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
