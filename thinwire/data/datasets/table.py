"""A table of your own: one row for each example, a target column, perhaps a column that names the client.

thinwire run fedavg --on table --set task.file=patients.csv --set task.target=outcome --set task.client=hospital
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.registry import register
from thinwire.data.columns import Columns, from_frame
from thinwire.data.examples import Arrays, Source
from thinwire.data.features import Features
from thinwire.data.folder import own_path
from thinwire.data.hold_out import held_out_rows
from thinwire.data.reading import numbered
from thinwire.data.table_files import read_table
from thinwire.data.targets import POOLED, TargetCode
from thinwire.errors import ConfigError, DataError


@register("dataset", "table", doc="A CSV or parquet file of your own: task.file, task.target, task.client.")
def table(
    data_dir: Path | None = None,
    file: str = "",
    target: str | tuple[str, ...] = "",
    client: str = "",
    features: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    target_kind: str = "",
    test_fraction: float = 0.2,
    test_file: str = "",
    delimiter: str = "",
    split_seed: int = 0,
) -> Source:
    """A table in a file; the options are those of `from_table`."""
    path = own_path(data_dir, file, "task.file")
    return from_table(
        path,
        target,
        client=client,
        features=features,
        drop=drop,
        target_kind=target_kind,
        test_fraction=test_fraction,
        test_file=own_path(data_dir, test_file, "task.test_file") if test_file else None,
        delimiter=delimiter,
        split_seed=split_seed,
    )


def from_table(
    file: Any,
    target: str | Sequence[str],
    *,
    client: str = "",
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    target_kind: str = "",
    test_fraction: float = 0.2,
    test_file: Any = None,
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
    rows = _columns(file, delimiter)
    code = TargetCode.of(rows, (target,) if isinstance(target, str) and target else tuple(target), target_kind)
    if test_file is None:
        parts = divided(rows, code, client, test_fraction, split_seed)
    else:
        parts = (rows, _columns(test_file, delimiter))
    drawn = "" if test_file is not None else " (drawn once, independent of the seed)"
    note = f"{len(parts[0]):,} rows for training, {len(parts[1]):,} for testing{drawn}. "
    note += code.fitted(parts[0]).note(derived=not target_kind)
    return from_columns(*parts, code, client=client, features=features, drop=drop, note=note)


def divided(rows: Columns, code: TargetCode, client: str, fraction: float, seed: int) -> tuple[Columns, Columns]:
    """Training and test rows: a fraction of each client and of each class is held out."""
    labels = [str(text) for text in rows.texts(code.columns[0])] if code.kind == "classification" else None
    test = held_out_rows(len(rows), fraction, _ids(clients_of(rows, client)), _ids(labels), seed)
    return rows.take(np.flatnonzero(~test)), rows.take(np.flatnonzero(test))


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
    parts = (train_rows, test_rows)
    code = code.fitted(train_rows)
    encoding = Features.of(train_rows, _inputs(train_rows, code.columns, client, features, drop))
    train, test_set = (Arrays(encoding.encode(part), code.encode(part)) for part in parts)
    users, test_users, user_names = _users(*parts, client)
    return Source(
        train,
        test_set,
        code.outputs,
        users,
        test_users,
        note=f"{note} {encoding.note()} {POOLED}",
        model={"inputs": encoding.width},
        loss=code.loss,
        metrics=code.metrics,
        class_names=code.names,
        user_names=user_names,
    )


def _columns(file: Any, delimiter: str) -> Columns:
    """The columns of a file or a DataFrame."""
    if isinstance(file, str | Path):
        return read_table(Path(file).expanduser(), delimiter)
    if hasattr(file, "columns") and hasattr(file, "__getitem__"):
        found = from_frame(file)
        if not len(found):
            raise DataError("the data frame has no rows")
        return found
    raise ConfigError(f"a table is a file (.csv, .parquet) or a pandas DataFrame, not {type(file).__name__}")


def _inputs(
    rows: Columns, targets: Sequence[str], client: str, features: Sequence[str], drop: Sequence[str]
) -> list[str]:
    """The columns that are inputs."""
    for option, names in (("task.features", features), ("task.drop", drop)):
        for name in names:
            if option == "task.features" or name not in rows.names:
                rows.need(name, option)
    taken = {*targets, client}
    if features and (both := [name for name in features if name in taken]):
        raise ConfigError(f"task.features has {both[0]!r}, which is the target or the client; leave it out")
    chosen = [name for name in features or rows.names if name not in taken and name not in drop]
    for name in chosen:
        rows.need(name, "an input")
    return chosen


def clients_of(rows: Columns, client: str) -> list[str] | None:
    """The client of each row; None without a client column."""
    if not client:
        return None
    rows.need(client, "task.client")
    texts = rows.texts(client)
    for i, text in enumerate(texts):
        if text is None:
            raise DataError(f"{rows.row(i)} names no client in the column {client!r}; fill it in, or delete the row")
    return [str(text) for text in texts]


def _ids(texts: list[str] | None) -> np.ndarray | None:
    return None if texts is None else np.unique(np.array(texts, object), return_inverse=True)[1]


def _users(train: Columns, test: Columns, client: str) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """The client of each training and test row as numbers, and the names of clients."""
    texts = clients_of(train, client)
    if texts is None:
        return None, None, ()
    other = clients_of(test, client) if client in test.cells else None
    names = numbered([*texts, *(other or ())])
    position = {name: i for i, name in enumerate(names)}
    first, second = (None if one is None else torch.tensor([position[name] for name in one]) for one in (texts, other))
    return first, second, names
