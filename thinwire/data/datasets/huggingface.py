"""Datasets of the library `datasets` of Hugging Face: images, numbers, categories or token ids.

    thinwire run fedavg --on huggingface --set task.name=my-folder --set task.target=label

The name is a folder of `Dataset.save_to_disk`, a folder of data files, or a dataset on the hub. Code of a dataset is
never run. Texts belong to the task `text-classification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.columns import Columns, from_frame
from thinwire.data.datasets.arrays import source_of
from thinwire.data.datasets.table import clients_of, divided, from_columns
from thinwire.data.examples import Arrays, Images, Source
from thinwire.data.folder import root
from thinwire.data.image_files import read_images, shape_of
from thinwire.data.reading import one_line
from thinwire.data.targets import TargetCode
from thinwire.errors import ConfigError, DataError

TEST_SPLITS = ("test", "validation", "valid", "dev")


@register("dataset", "huggingface", doc="A dataset of Hugging Face, of a folder or the hub: task.name, task.target.")
def huggingface(
    data_dir: Path | None = None,
    name: str = "",
    config: str = "",
    target: str | tuple[str, ...] = "",
    features: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    client: str = "",
    target_kind: str = "",
    size: int | tuple[int, ...] = 0,
    channels: int = 0,
    length: int = 0,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """A dataset by name; the options are those of `from_datasets`."""
    if not name:
        raise ConfigError("task.name is missing; write --set task.name=FOLDER, or owner/name on the Hugging Face hub")
    return from_datasets(
        load_named(name, config, data_dir),
        target=target,
        features=features,
        drop=drop,
        client=client,
        target_kind=target_kind,
        size=size,
        channels=channels,
        length=length,
        test_fraction=test_fraction,
        split_seed=split_seed,
        where=name,
    )


def from_datasets(
    dataset: Any,
    test: Any = None,
    *,
    target: str | Sequence[str] = "",
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    client: str = "",
    target_kind: str = "",
    size: int | Sequence[int] = 0,
    channels: int = 0,
    length: int = 0,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    where: str = "the dataset",
) -> Source:
    """A dataset from a `datasets.Dataset`, or a `DatasetDict` with the splits `train` and `test`.

    Args:
        dataset: the training rows, or all splits.
        test: the test rows; by default the split `test` or `validation`, or a fraction of the training rows.
        target: the column to predict, or several; by default the only column of class labels, or `label`.
        features: the columns that are inputs: one of images, one of lists of numbers, or any of numbers and texts;
            by default all others.
        drop: columns that are not used.
        client: the column that names the client of a row; "" for none.
        target_kind: classification, multi-label or regression; by default derived.
        size: of images, as in `from_image_folder`.
        channels: of images, as in `from_image_folder`.
        length: of lists of token ids: longer ones are cut, shorter ones filled with 0; 0 for the longest.
        test_fraction: as in `from_table`.
        split_seed: as in `from_table`.
        where: what error messages call the data.
    """
    if hasattr(dataset, "keys") and not hasattr(dataset, "features"):
        splits = list(dataset.keys())
        train = dataset["train" if "train" in splits else splits[0]]
        other = next((name for name in TEST_SPLITS if name in splits), None)
        test = dataset[other] if test is None and other else test
    else:
        train = dataset
    if not hasattr(train, "features") or not hasattr(train, "column_names") or not hasattr(train, "__len__"):
        raise ConfigError(f"{where} must be a datasets.Dataset or DatasetDict in memory, not {type(dataset).__name__}")
    targets = _targets(train, target, where)
    taken = {*targets, client, *drop}
    inputs = [name for name in features or train.column_names if name not in taken]
    pair = [_columns(one, [*targets, *([client] if client else [])], where) for one in (train, test) if one is not None]
    code = _code(train, pair[0], targets, target_kind)
    kinds = {name: _kind(train.features[name]) for name in inputs if name in train.features}
    if "image" in kinds.values() or "list" in kinds.values():
        chosen = _only_input(kinds, where)
        rows, others = _parts(pair, code, client, test_fraction, split_seed)
        data = [(train, rows), (train if test is None else test, others)]
        owners = [None if (found := clients_of(part, client)) is None else np.array(found) for _, part in data]
        fitted = code.fitted(rows)
        if kinds[chosen] == "image":
            shape = shape_of(train[0][chosen], size, channels)
            pixels = [read_images(_images(one, chosen, part, where), len(part), shape) for one, part in data]
            examples = [Images(x, fitted.encode(part)) for x, (_, part) in zip(pixels, data, strict=True)]
            return source_of(examples[0], examples[1], fitted, owners, derived=not target_kind)
        arrays = [_lists(one, chosen, part, length, where) for one, part in data]
        return _from_lists(arrays, [part for _, part in data], fitted, owners, derived=not target_kind)
    full = [
        _columns(one, [*targets, *([client] if client else []), *inputs], where)
        for one in (train, test)
        if one is not None
    ]
    rows, others = _parts(full, code, client, test_fraction, split_seed)
    note = f"{len(rows):,} rows for training, {len(others):,} for testing. {code.fitted(rows).note(not target_kind)}"
    return from_columns(rows, others, code, client=client, features=inputs, note=note)


def load_named(name: str, config: str, data_dir: Path | None) -> Any:
    """A dataset of a folder or the hub."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{name}: this needs the library datasets; pip install 'thinwire[data]'") from None
    base, given = root(data_dir), Path(name).expanduser()
    local = next((path for path in (given, *([base / given] if base else [])) if path.is_dir()), None)
    if local is None and (name.startswith(("/", ".", "~")) or len(given.parts) > 2):
        raise DataError(f"{name}: no such folder (task.name); expected a folder, or owner/name on the Hugging Face hub")
    try:
        if local is not None and any((local / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return datasets.load_from_disk(str(local))
        return datasets.load_dataset(str(local or name), config or None)
    except Exception as fault:  # the type depends on the version: network, proxy, disk, damaged file, unknown name
        raise DataError(f"{name}: the library datasets cannot load it ({one_line(fault)})") from None


def _targets(train: Any, target: str | Sequence[str], where: str) -> tuple[str, ...]:
    """The target columns; by default the only one of class labels, or `label`."""
    if target:
        return (target,) if isinstance(target, str) else tuple(target)
    labeled = [name for name, feature in train.features.items() if type(feature).__name__ == "ClassLabel"]
    found = labeled if len(labeled) == 1 else [name for name in ("label", "labels") if name in train.column_names]
    if len(found) != 1:
        listed = visible(", ".join(train.column_names), 200)
        raise DataError(f"{where}: no target column is named; write task.target; the columns are {listed}")
    return (found[0],)


def _columns(data: Any, names: Sequence[str], where: str) -> Columns:
    """Columns of a split: numbers and texts; class labels by name."""
    if not len(data):
        raise DataError(f"{where}: a split has no rows")
    cells: dict[str, Any] = {}
    for name in names:
        Columns(where, dict.fromkeys(data.column_names, ())).need(name, "as stated by the options")
        feature, values = data.features[name], data[name][:]
        if type(feature).__name__ == "ClassLabel":
            cells[name] = np.array([None if one is None or one < 0 else feature.names[one] for one in values], object)
        elif _kind(feature) == "cell":
            cells[name] = np.array([*values, None], object)[:-1]
        else:
            cells[name] = np.empty(len(data), "V1")
    found = from_frame(_Frame(cells, len(data)), where)
    return Columns(found.where, found.cells, found.unusable, np.arange(len(data)))


class _Frame:
    """Named columns with the methods of a data frame that `from_frame` uses."""

    def __init__(self, cells: dict[str, np.ndarray], rows: int) -> None:
        self.cells, self.columns, self.rows = cells, list(cells), rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, name: str) -> np.ndarray:
        return self.cells[name]


def _code(train: Any, rows: Columns, targets: tuple[str, ...], kind: str) -> TargetCode:
    """The code of the targets; class labels keep their order."""
    feature = train.features.get(targets[0])
    code = TargetCode.of(rows, targets, kind)
    if code.kind == "classification" and type(feature).__name__ == "ClassLabel":
        return TargetCode("classification", targets, tuple(feature.names))
    return code


def _kind(feature: Any) -> str:
    """What a column holds: `image`, `list` (of numbers) or `cell` (a number or a text); otherwise its type."""
    name = type(feature).__name__
    if name == "Image":
        return "image"
    if name in ("Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D") or isinstance(feature, list):
        return "list"
    return "cell" if name in ("Value", "ClassLabel") else name


def _only_input(kinds: dict[str, str], where: str) -> str:
    """The column of images or lists, which has to be the only input."""
    if len(kinds) != 1:
        listed = visible(", ".join(f"{name} ({kind})" for name, kind in kinds.items()), 200)
        raise DataError(f"{where}: the inputs are {listed}; images and lists are used alone: write task.features")
    return next(iter(kinds))


def _parts(pair: list[Columns], code: TargetCode, client: str, fraction: float, seed: int) -> tuple[Columns, Columns]:
    """Training and test rows."""
    return (pair[0], pair[1]) if len(pair) > 1 else divided(pair[0], code, client, fraction, seed)


def _indices(rows: Columns) -> list[int]:
    """The positions of rows in their split."""
    assert rows.row_numbers is not None
    return [int(i) for i in rows.row_numbers]


def _images(data: Any, column: str, rows: Columns, where: str) -> Any:
    """The images of some rows, decoded one by one, with their names."""
    for i in _indices(rows):
        image = data[i][column]
        if image is None:
            raise DataError(f"{where}: row {i} has no image in the column {column!r}")
        yield image, f"{where}: row {i}"


def _lists(data: Any, column: str, rows: Columns, length: int, where: str) -> np.ndarray:
    """The lists of some rows as an array; token ids are cut or filled to one length."""
    values = [np.asarray(data[i][column]) for i in _indices(rows)]
    bad = next((i for i, one in enumerate(values) if one.dtype.kind not in "biuf" or not one.ndim), None)
    if bad is not None:
        raise DataError(f"{rows.row(bad)}: the column {column!r} holds {values[bad].dtype}, expected a list of numbers")
    if values[0].dtype.kind == "f" or values[0].ndim > 1:
        if len({one.shape for one in values}) > 1:
            raise DataError(f"{where}: the lists in the column {column!r} differ in length; expected one length")
        return np.stack(values).astype(np.float32)
    longest = length or max(map(len, values))
    out = np.zeros((len(values), longest), np.int64)
    for i, one in enumerate(values):
        out[i, : len(one)] = one[:longest]
    return out


def _from_lists(
    arrays: list[np.ndarray], parts: list[Columns], code: TargetCode, owners: list[np.ndarray | None], *, derived: bool
) -> Source:
    """A dataset of numbers or token ids."""
    width = max(one.shape[1] for one in arrays)
    same = [one if one.ndim != 2 else np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in arrays]
    examples = [Arrays(torch.from_numpy(x), code.encode(part)) for x, part in zip(same, parts, strict=True)]
    return source_of(examples[0], examples[1], code, owners, derived=derived)
