"""Datasets of the library `datasets` of Hugging Face: images, numbers, categories or token ids.

    thinwire run fedavg --on huggingface --set task.name=my-folder --set task.target=label

The name is a folder of `Dataset.save_to_disk`, a folder of data files, or a dataset on the hub. Code of a dataset is
never run. Texts belong to the task `text-classification`. Named datasets such as `mnist` are downloaded from the hub,
too, where no folder has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.arrays import examples_of, inputs_of, source_of
from thinwire.data.columns import Columns, columns_of
from thinwire.data.examples import Images, Source
from thinwire.data.files import no_data, one_line, root
from thinwire.data.images import read_images, shape_of
from thinwire.data.table import TargetCode, clients_of, divided, from_columns
from thinwire.errors import ConfigError, DataError

TEST_SPLITS = ("test", "validation", "valid", "dev")
_LISTS = ("Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D", "list")


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
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> Source:
    """A dataset by name; the options are those of `from_datasets`."""
    options = {key: value for key, value in locals().items() if key not in ("data_dir", "name", "config")}
    if not name:
        raise ConfigError("task.name is missing; write --set task.name=FOLDER, or owner/name on the Hugging Face hub")
    return from_datasets(load_named(name, config, data_dir), where=name, **options)


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
    test_fraction: float = 0.2,
    split_seed: int = 0,
    where: str = "the dataset",
) -> Source:
    """A dataset from a `datasets.Dataset`, or a `DatasetDict` with the splits `train` and `test`.

    Args:
        dataset: the training rows, or all splits.
        test: the test rows; by default the split `test` or `validation`, or a fraction of the training rows.
        target: the column to predict, or several; by default the only column of class labels, or `label`.
        features: the columns that are inputs: one of images, one of lists of numbers of one length, or any of numbers
            and texts; by default all others.
        drop: columns that are not used.
        client: the column that names the client of a row; "" for none.
        target_kind: classification, multi-label or regression; by default derived.
        size: of images, as in `from_image_folder`.
        channels: of images, as in `from_image_folder`.
        test_fraction: as in `from_table`.
        split_seed: as in `from_table`.
        where: what error messages call the data.
    """
    train, found, _ = train_and_test(dataset)
    test = found if test is None else test
    if not hasattr(train, "features") or not hasattr(train, "column_names") or not hasattr(train, "__len__"):
        raise ConfigError(f"{where} must be a datasets.Dataset or DatasetDict in memory, not {type(dataset).__name__}")
    targets = _targets(train, target, where)
    inputs = [name for name in features or train.column_names if name not in {*targets, client, *drop}]
    kinds = {name: _kind(train.features[name]) for name in inputs if name in train.features}
    alone = "image" in kinds.values() or "list" in kinds.values()
    if alone and len(kinds) != 1:
        listed = visible(", ".join(f"{name} ({kind})" for name, kind in kinds.items()), 200)
        raise DataError(f"{where}: the inputs are {listed}; images and lists are used alone: write task.features")
    read = [*targets, *([client] if client else []), *([] if alone else inputs)]
    rows, others = (None if one is None else _columns(one, read, where) for one in (train, test))
    assert rows is not None
    code, feature = TargetCode.of(rows, targets, target_kind), train.features[targets[0]]
    if code.kind == "classification" and type(feature).__name__ == "ClassLabel":  # classes keep their order
        code = TargetCode("classification", targets, tuple(feature.names))
    data = train if others is None else test
    if others is None:
        rows, others = divided(rows, code, client, test_fraction, split_seed)
    code = code.fitted(rows)
    if not alone:
        note = f"{len(rows):,} rows for training, {len(others):,} for testing. {code.note(not target_kind)}"
        return from_columns(rows, others, code, client=client, features=inputs, note=note)
    pairs = ((train, rows), (data, others))
    first = train[0][name := inputs[0]]
    x: list[Any]
    if kinds[name] == "image":
        shape = shape_of(first, size, channels)
        x = [read_images(_images(one, name, part), len(part), shape) for one, part in pairs]
    else:
        lists = [[one[at][name] for at in part.rows.tolist()] for one, part in pairs]
        x = [inputs_of(one, len(one), f"{where}: the column {name!r}", tokens=np.ndim(first) == 1) for one in lists]
    examples = [examples_of(one, code.encode(part)) for one, (_, part) in zip(x, pairs, strict=True)]
    owners = [clients_of(part, client) for _, part in pairs]
    return source_of(examples[0], examples[1], code, owners, derived=not target_kind)


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


def train_and_test(dataset: Any) -> tuple[Any, Any, tuple[str, str]]:
    """The training and the test split of a `DatasetDict`, and their names; of a `Dataset` itself and None."""
    if not hasattr(dataset, "keys") or hasattr(dataset, "features"):
        return dataset, None, ("", "")
    splits = list(dataset.keys())
    first = "train" if "train" in splits else splits[0]
    other = next((name for name in TEST_SPLITS if name in splits and name != first), "")
    return dataset[first], dataset[other] if other else None, (first, other)


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
    cells = []
    for name in names:
        Columns(where, dict.fromkeys(data.column_names, ())).need(name, "as stated by the options")
        feature, values = data.features[name], data[name][:]
        if type(feature).__name__ == "ClassLabel":
            values = [None if one is None or one < 0 else feature.names[one] for one in values]
        usable = _kind(feature) == "cell"
        cells.append((name, np.array([*values, None], object)[:-1] if usable else np.empty(len(data), "V1")))
    return columns_of(cells, where, np.arange(len(data)))


def _kind(feature: Any) -> str:
    """What a column holds: `image`, `list` (of numbers) or `cell` (a number or a text); otherwise its type."""
    name = type(feature).__name__
    if name in _LISTS:
        return "list"
    return {"Image": "image", "Value": "cell", "ClassLabel": "cell"}.get(name, name)


def _images(data: Any, column: str, rows: Columns) -> Iterable[tuple[Any, str]]:
    """The images of some rows, decoded one by one, with their names."""
    for i, at in enumerate(rows.rows.tolist()):
        image = data[at][column]
        if image is None:
            raise DataError(f"{rows.row(i)} has no image in the column {column!r}")
        yield image, rows.row(i)


def download_images(task: str, name: str, columns: tuple[str, str], layout: str, shape: tuple[int, int, int]) -> Source:
    """A named dataset of images of this shape from the hub; `layout`: the files that would be read instead."""
    try:
        found = from_datasets(load_named(name, "", None), features=columns[:1], target=columns[1], where=name)
    except DataError as fault:
        raise no_data(f"{task}: download of {name} failed ({one_line(fault)})", layout) from None
    train, test = found.train, found.test
    if not (isinstance(train, Images) and isinstance(test, Images) and train.pixels.shape[1:] == shape):
        raise DataError(f"{name}: expected images of {shape}")
    train, test = (Images(one.pixels, one.targets) for one in (train, test))
    return Source(train, test, found.classes, note=f"Downloaded from the Hugging Face hub ({name}).")
