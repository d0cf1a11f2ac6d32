"""Datasets of the library `datasets` of Hugging Face: images, numbers, categories or token ids.

    thinwire run fedavg --on huggingface --set task.name=my-folder --set task.target=label

The name is a folder of `Dataset.save_to_disk`, a folder of data files, or a dataset on the hub. Code of a dataset is
never run. Texts belong to the task `text-classification`. Named datasets such as `mnist` are downloaded from the hub,
too, where no folder has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.core.registry import register
from thinwire.core.text import visible
from thinwire.data.arrays import inputs_of, source_of
from thinwire.data.columns import MISSING, Columns, Names, objects
from thinwire.data.examples import Source
from thinwire.data.files import no_data, one_line, root
from thinwire.data.images import read_images, shape_of
from thinwire.data.table import TargetCode, from_columns
from thinwire.errors import ConfigError, DataError

TEST_SPLITS = ("test", "validation", "valid", "dev")
PARTITION = "partition of flwr-datasets"  # the column of its number
_LISTS = ("Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D", "list")


@register("dataset", "huggingface", doc="A dataset of Hugging Face, of a folder or the hub: task.name, task.target.")
def from_datasets(
    name: Any = "",
    test: Any = None,
    *,
    config: str = "",
    target: str | Names = "",
    features: Names = (),
    drop: Names = (),
    client: str = "",
    target_kind: str = "",
    size: int | tuple[int, ...] | Sequence[int] = 0,
    channels: int = 0,
    standardize: bool = True,
    test_fraction: float = 0.2,
    data_dir: Path | None = None,
) -> Source:
    """A dataset from a `datasets.Dataset`, or a `DatasetDict` with the splits `train` and `test`.

    Args:
        name: the training rows, or all splits; or a folder, or owner/name on the hub; or a `FederatedDataset` or a
            partitioner of flwr-datasets, each partition of which is a client.
        test: the test rows; by default the split `test` or `validation`, or a fraction of the training rows.
        config: of a dataset on the hub, the name of its configuration.
        target: the column to predict, or several; by default the only column of class labels, or `label`.
        features: the columns that are inputs: one of images, one of lists of numbers of one length, or any of numbers
            and texts; by default all others.
        drop: columns that are not used.
        client: the column that names the client of a row; "" for none.
        target_kind: classification, multi-label or regression; by default derived.
        size: of images, as in `from_image_folder`.
        channels: of images, as in `from_image_folder`.
        standardize: of images and lists, as in `from_arrays`.
        test_fraction: as in `from_table`.
        data_dir: the folder of all datasets, in which a folder may be.
    """
    where = name if isinstance(name, str) else "the dataset"
    dataset = load_named(name, config, data_dir) if isinstance(name, str) else name
    if hasattr(dataset, "load_partition"):
        dataset, client = _pooled(dataset), client or PARTITION
    train, found, _ = train_and_test(dataset)
    test = found if test is None else test
    for one in (train, train if test is None else test):
        if not all(hasattr(one, name) for name in ("features", "column_names", "__len__")):
            raise ConfigError(f"{where} must be a datasets.Dataset or DatasetDict in memory, not {type(one).__name__}")
    targets = _targets(train, target, where)
    inputs = [name for name in features or train.column_names if name not in {*targets, client, *drop}]
    kinds = {name: type(train.features[name]).__name__ for name in inputs if name in train.features}
    alone = any(kind in ("Image", *_LISTS) for kind in kinds.values())
    if alone and len(kinds) != 1:
        listed = visible(", ".join(f"{name} ({kind})" for name, kind in kinds.items()), 200)
        raise DataError(f"{where}: the inputs are {listed}; images and lists are used alone: write task.features")
    names = [*targets, *([client] if client else []), *([] if alone else inputs)]
    tested = [name for name in names if name != PARTITION]
    rows, given = _columns(train, names, where), None if test is None else _columns(test, tested, where)
    code, feature = TargetCode.of(rows, targets, target_kind), train.features[targets[0]]
    if code.kind == "classification" and type(feature).__name__ == "ClassLabel":  # classes keep their order
        code = replace(code, names=tuple(feature.names))
    parts = code.split(rows, given, client, test_fraction)
    if not alone:
        return from_columns(parts, code, client, inputs)
    column, made = inputs[0], list[Tensor]()
    shape = shape_of(train[0][column], size, channels) if kinds[column] == "Image" else None
    for data, part in zip((train, train if test is None else test), parts, strict=True):
        values = ((data[at][column], f"{part.row(i)}, column {column!r}") for i, at in enumerate(part.rows.tolist()))
        if shape:
            made.append(read_images(values, len(part), shape))
        else:
            lists = [one for one, _ in values]
            made.append(inputs_of(lists, len(lists), f"{where}: the column {column!r}", tokens=True))
    return source_of(code, parts, made, client, standardize)


def _pooled(federated: Any) -> dict[str, Any]:
    """The rows of all partitions of flwr-datasets, with the column `PARTITION`, and the test split if it has one."""
    from datasets import concatenate_datasets

    try:
        rules = getattr(federated, "partitioners", {"train": federated})  # which downloads
        first = "train" if "train" in rules else next(iter(rules))
        parts = [rules[first].load_partition(i) for i in range(rules[first].num_partitions)]
        if not all(map(len, parts)):
            raise ValueError("one has no examples; write fewer partitions")
    except Exception as fault:  # of any type: too many partitions, a wrong column, network
        raise DataError(f"flwr-datasets cannot load the partitions ({one_line(fault)})") from None
    found = {first: concatenate_datasets([p.add_column(PARTITION, [i] * len(p)) for i, p in enumerate(parts)])}
    for split in TEST_SPLITS if hasattr(federated, "load_split") else ():
        with suppress(ValueError):  # it has no such split
            found.setdefault(split, federated.load_split(split))
    return found


def load_named(name: str, config: str, data_dir: Path | None) -> Any:
    """A dataset of a folder or the hub."""
    if not name:
        raise ConfigError("task.name is missing; write --set task.name=FOLDER, or owner/name on the Hugging Face hub")
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
    """Columns of a split; class labels by name."""
    if not len(data):
        raise DataError(f"{where}: a split has no rows")
    cells = {}
    for name in names:
        Columns(where, dict.fromkeys(data.column_names, np.zeros(0))).need(name, "as stated by the options")
        classes, values = getattr(data.features[name], "names", None), data[name][:]
        if classes is not None:
            values = [None if one is None or one < 0 else classes[one] for one in values]
        cells[name] = objects(None if isinstance(one, str) and one in MISSING else one for one in values)
    return Columns(where, cells, row_numbers=np.arange(len(data)))


def download_images(task: str, name: str, image: str, target: str, layout: str = "", client: str = "") -> Source:
    """A named dataset of images from the hub, as they are stored.

    Args:
        task: its name here.
        name: its name on the hub.
        image: the column of images.
        target: the column of classes.
        layout: files that are read instead, for the error without a connection; "" for none.
        client: the column of clients, "" for none.
    """
    try:
        found = from_datasets(name, features=(image,), target=target, client=client, standardize=False)
    except DataError as fault:
        if not layout:
            raise
        raise no_data(f"{task}: download of {name} failed ({one_line(fault)})", layout) from None
    return replace(found, note=f"Downloaded from the Hugging Face hub ({name}).")
