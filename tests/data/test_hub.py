"""Download from the hub, with a fake `datasets` library: tests use no network."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from thinwire.core.registry import entries, lookup
from thinwire.errors import DataError


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)


class Split:
    """A split of images and labels with the parts of `datasets.Dataset` that are used."""

    def __init__(self, images, labels, classes, names=("image", "label")):
        self.columns, self.column_names = dict(zip(names, (images, labels), strict=True)), list(names)
        kinds = type("Image", (), {})(), type("ClassLabel", (), {"names": [str(i) for i in range(classes)]})()
        self.features = dict(zip(names, kinds, strict=True))

    def __len__(self):
        return len(self.columns[self.column_names[1]])

    def __getitem__(self, at):
        return self.columns[at] if isinstance(at, str) else {name: one[at] for name, one in self.columns.items()}


def fake_hub(monkeypatch, tables: dict) -> None:
    """Install a `datasets` module with these datasets, by name."""

    def load_dataset(name, config=None):
        if name not in tables:
            raise ConnectionError(f"Couldn't reach\n{name} on the Hub")
        return tables[name]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def both(*given, **more) -> dict:
    return {"train": Split(*given, **more), "test": Split(*given, **more)}


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "20newsgroups"])
def test_without_the_library_the_error_names_the_files_and_the_package(monkeypatch, tmp_path, name) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for folder in (None, tmp_path):
        with pytest.raises(DataError) as caught:
            lookup("dataset", name).make(folder)
        line = str(caught.value)
        assert ("pip install 'thinwire[data]'" in line) == (name != "20newsgroups")
        assert "--data-dir or THINWIRE_DATA" in line
        assert "\n" not in line


def test_without_a_network_the_error_is_one_line(monkeypatch) -> None:
    fake_hub(monkeypatch, {})
    with pytest.raises(DataError) as caught:
        lookup("dataset", "mnist").make(None)
    assert "Couldn't reach ylecun/mnist on the Hub" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_are_downloaded_and_checked(monkeypatch) -> None:
    gray = [Image.fromarray(np.full((28, 28), i, np.uint8)) for i in range(3)]
    color = np.zeros((2, 32, 32, 3), np.uint8)
    color[1, :, :, 0] = 255
    photos = [Image.fromarray(one) for one in color]
    tables = {
        "ylecun/mnist": both(gray, [3, 1, 2], 10),
        "uoft-cs/cifar100": both(photos, [99, 0], 100, names=("img", "fine_label")),
    }
    fake_hub(monkeypatch, tables)
    source = lookup("dataset", "mnist").make(None)
    assert source.train.pixels[:, 0, 5, 5].tolist() == [0, 1, 2]
    assert (source.test.targets.tolist(), source.classes) == ([3, 1, 2], 10)
    assert "ylecun/mnist" in source.note
    source = lookup("dataset", "cifar100").make(None)
    x, y = source.train.gather(torch.tensor([1, 0]))
    assert x[0, 0].min() == 1 > 0 == x[0, 1:].max()
    assert len(source.mean) == 3
    assert y.tolist() == [0, 99]
    tables["ylecun/mnist"] = both(gray, [0, 1, None], 10)
    with pytest.raises(DataError, match="has no value in the target column 'label'"):
        lookup("dataset", "mnist").make(None)


def test_writers_of_femnist_are_users(monkeypatch) -> None:
    images = [Image.fromarray(np.full((28, 28), i, np.uint8)) for i in range(10)]
    rows = Split(images, [61, 0] * 5, 62, names=("image", "character"))
    for name in ("writer_id", "hsf_id"):
        rows.columns[name], rows.features[name] = ["w1", "w2"] * 5, type("Value", (), {})()
        rows.column_names.append(name)
    fake_hub(monkeypatch, {"flwrlabs/femnist": {"train": rows}})
    source = lookup("dataset", "femnist").make(None)
    assert (source.classes, source.user_names, len(source.train), len(source.mean)) == (62, ("w1", "w2"), 8, 1)


def test_every_registered_task_has_a_description_and_a_paper() -> None:
    table = entries("dataset")
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "shakespeare", "20newsgroups"} <= set(table)
    assert {"20newsgroups", "femnist"} <= set(table)
    own = {"table", "image-folder", "arrays", "huggingface", "causal-lm"}  # formats of one's own data have no paper
    assert all(entry.doc and (entry.paper or entry.name in own) and "\n" not in entry.doc for entry in table.values())


def test_listing_tasks_imports_no_heavy_library() -> None:
    code = (
        "import sys; from thinwire.core.registry import entries; entries('dataset'); entries('partition');"
        "print([m for m in ('sklearn', 'PIL', 'datasets', 'scipy', 'torchvision') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
