"""Download from the hub, with a fake `datasets` library: tests use no network."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from thinwire.core.registry import entries, lookup
from thinwire.errors import DataError


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch) -> None:
    monkeypatch.delenv("THINWIRE_DATA", raising=False)


def fake_hub(monkeypatch, tables: dict) -> None:
    """Install a `datasets` module with these tables: {(name, config): {split: {column: values}}}."""

    def load_dataset(name, config=None):
        if (name, config) not in tables:
            raise ConnectionError(f"Couldn't reach\n{name} on the Hub")
        return tables[name, config]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def both(first: str, second: str, **columns) -> dict:
    return {first: columns, second: columns}


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "20newsgroups", "sst2", "rte"])
def test_without_the_library_the_error_names_the_files_and_the_package(monkeypatch, tmp_path, name) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for folder in (None, tmp_path):
        with pytest.raises(DataError) as caught:
            lookup("dataset", name).make(folder)
        line = str(caught.value)
        assert "pip install 'thinwire[data]'" in line
        assert "--data-dir or THINWIRE_DATA" in line
        assert "\n" not in line


def test_without_a_network_the_error_is_one_line(monkeypatch) -> None:
    fake_hub(monkeypatch, {})
    with pytest.raises(DataError) as caught:
        lookup("dataset", "mnist").make(None)
    assert "download of ylecun/mnist failed (Couldn't reach ylecun/mnist on the Hub)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_are_downloaded(monkeypatch) -> None:
    gray = [np.full((28, 28), i, np.uint8) for i in range(3)]
    color = [np.zeros((32, 32, 3), np.uint8) for _ in range(2)]
    color[1][:, :, 0] = 255
    fake_hub(
        monkeypatch,
        {
            ("ylecun/mnist", None): both("train", "test", image=gray, label=[3, 1, 2]),
            ("uoft-cs/cifar100", None): both("train", "test", img=color, fine_label=[99, 0], coarse_label=[1, 1]),
        },
    )
    source = lookup("dataset", "mnist").make(None)
    assert source.train.pixels[:, 0, 5, 5].tolist() == [0, 1, 2]
    assert source.test.targets.tolist() == [3, 1, 2]
    assert "ylecun/mnist" in source.note
    x, y = lookup("dataset", "cifar100").make(None).train.gather(torch.tensor([1, 0]))
    assert x[0, 0].min() == 1
    assert x[0, 1:].max() == 0
    assert y.tolist() == [0, 99]


def test_texts_are_downloaded(monkeypatch) -> None:
    pairs = both("train", "validation", sentence1=["a b", "c"], sentence2=["a", "d"], label=[0, 1])
    news = both("train", "test", text=["engine oil", "the pope"], label=[7, 15])
    fake_hub(monkeypatch, {("nyu-mll/glue", "rte"): pairs, ("SetFit/20_newsgroups", None): news})
    assert lookup("dataset", "rte").make(None).train.gather(torch.tensor([0]))[0].shape == (1, 128)
    assert lookup("dataset", "20newsgroups").make(None).test.targets.tolist() == [7, 15]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [np.zeros((32, 32), np.uint8)], "label": [0]}, "expected uint8 (28, 28)"),
        ({"image": [np.zeros((28, 28), np.uint8)], "label": [10]}, "label 10"),
        ({"image": [np.zeros((28, 28), np.uint8)], "label": [None]}, "labels are object"),
        ({"photo": []}, "download of ylecun/mnist failed"),
    ],
)
def test_downloaded_data_is_checked(monkeypatch, columns, message) -> None:
    fake_hub(monkeypatch, {("ylecun/mnist", None): both("train", "test", **columns)})
    with pytest.raises(DataError) as caught:
        lookup("dataset", "mnist").make(None)
    assert message in str(caught.value)


def test_values_that_are_not_text_are_an_error(monkeypatch) -> None:
    fake_hub(monkeypatch, {("nyu-mll/glue", "sst2"): both("train", "validation", sentence=[None], label=[0])})
    with pytest.raises(DataError, match="not text"):
        lookup("dataset", "sst2").make(None)


def test_every_registered_task_has_a_description_and_a_paper() -> None:
    table = entries("dataset")
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "shakespeare", "20newsgroups"} <= set(table)
    assert {"sst2", "rte", "cola", "mrpc", "femnist", "sent140", "shakespeare-leaf"} <= set(table)
    own = {"table", "image-folder", "arrays", "huggingface", "causal-lm"}  # formats of one's own data have no paper
    assert all(entry.doc and (entry.paper or entry.name in own) and "\n" not in entry.doc for entry in table.values())


def test_listing_tasks_imports_no_heavy_library() -> None:
    code = (
        "import sys; from thinwire.core.registry import entries; entries('dataset'); entries('partition');"
        "print([m for m in ('sklearn', 'PIL', 'datasets', 'scipy', 'torchvision') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
