"""Arrays, clients and Hugging Face datasets of one's own, tasks made of them, and who has what."""

from __future__ import annotations

import io
import zipfile
from datetime import datetime
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_wine
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import thinwire as tw
from thinwire.data.partition import IID
from thinwire.data.task import describe_partition, pool_clients
from thinwire.reports.figures import partition_figure, save

DIGITS = load_digits()
PIXELS = (DIGITS.images * 15).astype(np.uint8)


# -- arrays ----------------------------------------------------------------------------------------------------------


def test_kinds_of_arrays():
    images = tw.data.from_arrays(PIXELS, DIGITS.target, client=np.arange(1797) % 3)
    assert images.train.pixels.shape == (1438, 1, 8, 8)
    assert (images.classes, images.user_names) == (10, ("0", "1", "2"))
    last = tw.data.from_arrays(np.stack([PIXELS] * 3, -1), torch.tensor(DIGITS.target))
    assert last.model["channels"] == 3
    numbers = tw.data.from_arrays(DIGITS.data, np.array(list("abcdefghij"))[DIGITS.target])
    assert (numbers.train.inputs.dtype, numbers.class_names[:2]) == (torch.float32, ("a", "b"))
    values = tw.data.from_arrays(torch.tensor(DIGITS.data), torch.tensor(DIGITS.target).float())
    assert (values.loss, values.classes) == ("mse", 1)
    labels = tw.data.from_arrays(DIGITS.data, DIGITS.data[:, 20:23] > 8)
    assert (labels.loss, labels.train.targets.shape) == ("bce", (1438, 3))
    tested = tw.data.from_arrays(DIGITS.data[:90], DIGITS.target[:90], test=(DIGITS.data[90:], DIGITS.target[90:]))
    assert (len(tested.train), len(tested.test)) == (90, 1707)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((4, 2)), [0, 1, 0], "x has 4 examples, but y has 3"),
        (np.zeros((4, 2)), [0, 0, 0, 0], "one class only"),
        (np.zeros((4, 2)), [0.5, 1, np.nan, 2], "example 2 has no value"),
        (np.array([[0.0], [np.inf]] * 2), [0, 1] * 2, "example 1 has a value that is not finite"),
        (np.array(["a", "b"]), [0, 1], "expected numbers"),
        ([[1], [1, 2]], [0, 1], "rows that differ in length"),
        (np.zeros((4, 2)), np.zeros((4, 2, 2)), "expected one target"),
    ],
)
def test_bad_arrays_are_one_line(x, y, message):
    with pytest.raises(tw.DataError, match=message):
        tw.data.from_arrays(x, y)


def test_npz_is_read_without_pickle_and_by_its_true_size(tmp_path):
    file = tmp_path / "d.npz"
    make = tw.data.arrays.arrays
    np.savez_compressed(file, x=np.asfortranarray(DIGITS.data), y=DIGITS.target, client=DIGITS.target % 3)
    source = make(file=str(file))
    torch.testing.assert_close(
        source.train.inputs, tw.data.from_arrays(DIGITS.data, DIGITS.target, client=DIGITS.target % 3).train.inputs
    )
    np.savez(file, x=[0, 1], targets=[0, 1])
    with pytest.raises(tw.DataError, match=r"d\.npz: no array 'y'; the file has x, targets"):
        make(file=str(file))
    np.savez(file, x=np.array([{}, {}]), y=[0, 1])
    with pytest.raises(tw.DataError, match=r"array 'x' cannot be read \(Object arrays"):
        make(file=str(file))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(100))
        archive.writestr("y.npy", b"not an array")
    with pytest.raises(tw.DataError, match="array 'x' cannot be read"):
        make(file=str(file))
    file.write_bytes(b"PK damaged")
    with pytest.raises(tw.DataError, match=r"cannot be read as .npz"):
        make(file=str(file))


# -- clients ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(torch.ones(10, 3), torch.arange(10) % 2, strict=True))


def test_clients_in_every_form():
    x, y = torch.ones(10, 3), torch.arange(10) % 2
    pairs = TensorDataset(x, y)
    forms = [(x.numpy().astype(float), y.numpy()), pairs, DataLoader(pairs, 3), DataLoader(pairs, batch_size=None)]
    pool, clients = pool_clients([(x, y), *forms, Stream(), DataLoader(Stream(), 4)])
    assert clients.sizes().tolist() == [10] * 7
    assert (pool.inputs.dtype, pool.targets.tolist()) == (torch.float32, y.tolist() * 7)
    pool, _ = pool_clients([({"a": x.numpy(), "b": x}, y.numpy())])
    assert pool.inputs["a"].dtype == torch.float32
    for bad, message in (
        ((x.numpy(), np.array(list("ab"))), "numpy array of numbers"),
        ("text", "a torch Dataset or a DataLoader, not str"),
        (DataLoader(pairs, 3, drop_last=True), "drop_last=False"),
        (DataLoader(TensorDataset(x[:0], y[:0])), "client 0 has no examples"),
    ):
        with pytest.raises(tw.ConfigError, match=message):
            pool_clients([bad])


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_make_task():
    source = tw.data.from_arrays(DIGITS.data / 16, DIGITS.target, client=np.arange(1797) % 4)
    own = nn.Linear(64, 10)
    task = tw.data.make_task(
        source, own, clients=7, seed=3, loss="cross-entropy", metrics=["f1"], validation_fraction=0.2
    )
    assert task.model is own
    assert (len(task.clients), len(task.client_tests), list(task.metrics)) == (7, 7, ["f1"])
    made = tw.data.make_task(source, lambda inputs, classes: nn.Linear(inputs, classes), partition=IID(), clients=2)
    assert (made.model.in_features, made.model.out_features) == (64, 10)
    again = tw.data.make_task(source, lambda inputs, classes: nn.Linear(inputs, classes), partition=IID(), clients=2)
    assert torch.equal(made.model.weight, again.model.weight)
    assert tw.data.make_task(source, "mlp", partition="natural", clients=0).client_names == ("0", "1", "2", "3")
    for model, message in ((7, "a module, a function"), (lambda: 3, "returned int"), ("mpl", "did you mean 'mlp'")):
        with pytest.raises(tw.ConfigError, match=message):
            tw.data.make_task(source, model)
    with pytest.raises(tw.ConfigError, match="has no images"):
        tw.data.make_task(source, own, scale="standard")


# -- who has what ----------------------------------------------------------------------------------------------------


def test_description_of_a_partition_counts_examples():
    source = tw.data.from_arrays(DIGITS.data, DIGITS.target, client=DIGITS.target // 5)
    task = tw.data.make_task(source, "mlp", partition="natural", clients=0)
    found = describe_partition(task)
    targets = source.train.targets.numpy()
    assert found.counts.sum() == 1438
    for i in range(2):
        assert found.counts[i].tolist() == np.bincount(targets[task.clients.client(i)], minlength=10).tolist()
    assert found.label_skew == pytest.approx(0.5, abs=0.01)  # half of the classes each
    assert found.size_skew < 0.01
    row = found.rows()[0]
    assert row["examples"] == sum(row["classes"].values())
    equal = describe_partition(tw.data.make_task(source, "mlp", clients=3))
    assert equal.label_skew < 0.1
    numbers = tw.data.from_arrays(DIGITS.data, DIGITS.data.sum(1))
    described = describe_partition(tw.data.make_task(numbers, "mlp", clients=3))
    assert described.counts.shape == (3, 10)
    assert described.counts.shape == (3, 10)
    labels = tw.data.from_arrays(DIGITS.data, DIGITS.data[:, 20:23] > 8)
    described = describe_partition(tw.data.make_task(labels, "mlp", clients=4))
    assert described.counts.sum(0).tolist() == labels.train.targets.sum(0).tolist()


@pytest.mark.parametrize("clients", [3, 1000])
def test_charts_are_well_formed_and_small(tmp_path, clients):
    source = tw.data.from_arrays(DIGITS.data, np.array([f"<{i}>" for i in range(10)])[DIGITS.target])
    found = describe_partition(tw.data.make_task(source, "mlp", clients=clients))
    save(partition_figure(found, "a & b"), tmp_path / "c.svg")
    drawing = (tmp_path / "c.svg").read_text()
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    assert len(drawing) < 500_000
    assert "&lt;3&gt;" in drawing
    save(partition_figure(found, "a & b"), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(tw.ConfigError, match=r"write --plot .*c.svg"):
        save(partition_figure(found, "x"), tmp_path / "c.html")


def test_chart_of_many_classes_groups_the_smallest():
    labels = np.arange(1797) % 60
    found = describe_partition(tw.data.make_task(tw.data.from_arrays(DIGITS.data, labels), "mlp", clients=3))
    assert "41 other classes" in partition_figure(found, "x")._repr_svg_()


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def test_datasets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = [f"d{i}" for i in range(10)]
    columns = {"image": [Image.fromarray(one) for one in PIXELS[:60]], "label": DIGITS.target[:60].tolist()}
    columns["who"] = [f"u{i % 2}" for i in range(60)]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names), "who": datasets.Value("string")}
    images = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    source = tw.data.from_datasets(images, client="who")
    assert (len(source.train), len(source.test), source.class_names) == (48, 12, tuple(names))
    assert source.user_names == ("u0", "u1")
    every = torch.cat([source.train.pixels, source.test.pixels]).long().sum()
    assert int(every) == int(PIXELS[:60].astype(np.int64).sum())
    images.save_to_disk(str(tmp_path / "saved"))
    loaded = tw.data.from_datasets(name=str(tmp_path / "saved"), client="who")
    assert torch.equal(loaded.train.pixels, source.train.pixels)
    wine = load_wine()
    table = datasets.Dataset.from_dict({"ash": wine.data[:, 2], "hue": wine.data[:, 10], "kind": wine.target})
    assert tw.data.from_datasets(table, target="kind").model == {"inputs": 2}
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [4, 5]] * 10, "label": [0, 1] * 10})
    both = datasets.DatasetDict({"train": ids, "test": ids.select([0, 1])})
    tokens = tw.data.from_datasets(both)
    assert (tokens.train.inputs.shape, tokens.model) == ((20, 2), {"length": 2, "vocab": 6})
    with pytest.raises(tw.DataError, match="did you mean 'kind'"):
        tw.data.from_datasets(table, target="kindd")
    with pytest.raises(tw.DataError, match="no target column is named"):
        tw.data.from_datasets(table)
    with pytest.raises(tw.DataError, match=r"cannot load it|no such folder"):
        tw.data.from_datasets(name="./nowhere")


class Rows:
    """A split with the parts of `datasets.Dataset` that are used, where that library is not installed."""

    def __init__(self, columns, **features):
        self.columns, self.column_names = columns, list(columns)
        self.features = {name: features.get(name, type("Value", (), {})()) for name in columns}

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, at):
        return self.columns[at] if isinstance(at, str) else {name: one[at] for name, one in self.columns.items()}


def test_rows_of_another_library_as_images_lists_and_cells():
    feature = {name: type(name, (), {"names": ["b", "a", "c"]})() for name in ("ClassLabel", "Image", "List")}
    labels = {"label": [0, 1] * 30, "who": ["u", "v", "v"] * 20}
    photos = Rows({"image": [Image.fromarray(one) for one in PIXELS[:60]], **labels}, label=feature["ClassLabel"])
    photos.features["image"] = feature["Image"]
    source = tw.data.from_datasets(photos, client="who")
    assert (source.class_names, source.user_names, source.train.pixels.shape) == (
        ("b", "a", "c"),
        ("u", "v"),
        (48, 1, 8, 8),
    )
    every = torch.cat([source.train.pixels, source.test.pixels]).long().sum()
    assert int(every) == int(PIXELS[:60].astype(np.int64).sum())
    with pytest.raises(tw.DataError, match="images and lists are used alone"):
        tw.data.from_datasets(photos)
    ids = Rows({"ids": [[1, 2], [4, 5]] * 10, "label": [0, 1] * 10}, ids=feature["List"])
    tokens = tw.data.from_datasets({"train": ids, "test": ids})
    assert (tokens.train.inputs[:2].tolist(), tokens.model) == ([[1, 2], [4, 5]], {"length": 2, "vocab": 6})
    numbers = Rows({"x": [[0.5, 1.0], [1.5, 2.0]] * 10, "label": [0.5, 1.5] * 10}, x=feature["List"])
    assert tw.data.from_datasets(numbers).train.inputs.dtype == torch.float32
    numbers.columns["x"][3] = [1.0]
    with pytest.raises(tw.DataError, match="differ in length"):
        tw.data.from_datasets(numbers)
    numbers.columns["x"] = ["a"] * 20
    with pytest.raises(tw.DataError, match=r"the column 'x' holds .*, expected numbers"):
        tw.data.from_datasets(numbers)
    cells = Rows({"ash": [0.5, None, 2.0] * 6, "city": ["r", "o", "r"] * 6, "kind": [2, 0, 1] * 6, "when": [3] * 18})
    cells.columns["when"] = [datetime(2026, 1, 1)] * 18
    assert tw.data.from_datasets(cells, target="kind", drop=["when"]).model == {"inputs": 5}
    with pytest.raises(tw.DataError, match=r"column 'when' .* expected numbers or text"):
        tw.data.from_datasets(cells, target="kind")
    with pytest.raises(tw.DataError, match="did you mean 'kind'"):
        tw.data.from_datasets(cells, target="kindd")
    with pytest.raises(tw.DataError, match="no target column is named"):
        tw.data.from_datasets(cells)
    with pytest.raises(tw.ConfigError, match=r"must be a datasets.Dataset"):
        tw.data.from_datasets([1, 2])
    with pytest.raises(tw.ConfigError, match=r"task.name is missing"):
        tw.data.from_datasets()
