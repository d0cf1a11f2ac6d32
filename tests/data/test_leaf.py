"""Datasets in the layout of LEAF, with synthetic records."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.core.key import Key
from thinwire.data.leaf import femnist, sent140, shakespeare_leaf
from thinwire.data.partition import Natural
from thinwire.errors import DataError


def write(folder: Path, split: str, name: str, data: dict) -> None:
    path = folder / split / name
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"users": list(data), "num_samples": [len(d["y"]) for d in data.values()], "user_data": data}
    path.write_text(json.dumps(found))


def image(value: int) -> list[float]:
    return [value / 255] * 783 + [1.0]


def tweet(text: str) -> list[str]:
    return ["1467810369", "Mon Apr 06", "NO_QUERY", "user", text, "training"]


WINDOW = "abcdefgh" * 10


@pytest.mark.parametrize("base", ["femnist/data", "leaf/data/femnist/data"])
def test_femnist_images_are_the_original_bytes(tmp_path, base) -> None:
    folder = tmp_path / base
    write(folder, "train", "all_data_0.json", {"w1": {"x": [image(0), image(77)], "y": [61, 0]}})
    write(folder, "train", "all_data_1.json", {"w2": {"x": [image(254)], "y": [5]}, "w3": {"x": [], "y": []}})
    write(folder, "test", "all_data_0.json", {"w2": {"x": [image(3)], "y": [1]}, "w9": {"x": [image(4)], "y": [2]}})
    source = femnist(tmp_path)
    assert source.train.pixels.shape == (3, 1, 28, 28)
    assert source.train.pixels[:, 0, 0, 0].tolist() == [0, 77, 254]
    assert source.train.pixels[:, 0, -1, -1].tolist() == [255] * 3
    assert source.train.targets.tolist() == [61, 0, 5]
    assert source.users.tolist() == [0, 0, 1]
    assert source.test_users.tolist() == [1, 2]
    assert source.classes == 62
    clients = Natural().assign(source.train.targets.numpy(), 2, Key(0), source.users.numpy())
    assert clients.sizes().tolist() == [2, 1]


def test_tweets_become_rows_of_forty_words_by_user(tmp_path) -> None:
    folder = tmp_path / "sent140/data"
    write(folder, "train", "a.json", {"u": {"x": [tweet("Good good day"), tweet("")], "y": [1, "4"]}})
    write(folder, "test", "a.json", {"u": {"x": ["a good plain text"], "y": ["0"]}})
    source = sent140(tmp_path)
    x, y = source.train.gather(torch.arange(2))
    assert x.shape == (2, 40)
    assert x[0, :4].tolist() == [3, 3, 4, 0]
    assert y.tolist() == [1, 1]
    assert source.test.gather(torch.tensor([0]))[0][0, :5].tolist() == [1, 3, 1, 1, 0]
    assert source.test.targets.tolist() == [0]
    assert source.users.tolist() == [0, 0]


def test_shakespeare_has_the_train_test_split_of_leaf(tmp_path) -> None:
    folder = tmp_path / "shakespeare/data"
    write(folder, "train", "a.json", {"ROMEO": {"x": [WINDOW, WINDOW[1:] + "x"], "y": ["x", "y"]}})
    write(folder, "test", "a.json", {"JULIET": {"x": [WINDOW], "y": ["z"]}})
    source = shakespeare_leaf(tmp_path)
    assert (len(source.train), len(source.test), source.classes) == (2, 1, 80)
    assert len(source.train.codes) == 82 + 81
    assert source.users.tolist() == [0, 0]
    assert source.test_users.tolist() == [1]


GOOD = {"w": {"x": [image(1)], "y": [1]}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"x": [image(1)[:-1]], "y": [1]}, "not rows of 784 values"),
        ({"x": [[["deep"]] * 784], "y": [1]}, "not rows of 784 values"),
        ({"x": [image(1), [1]], "y": [1, 1]}, "not rows of 784 values"),
        ({"x": [[float("nan")] * 784], "y": [1]}, "outside 0 to 1"),
        ({"x": [[2] * 784], "y": [1]}, "outside 0 to 1"),
        ({"x": [image(1)], "y": [62]}, "label 62, expected 0 to 61"),
        ({"x": [image(1)], "y": [-1]}, "not an integer"),
        ({"x": [image(1)], "y": [10**4000]}, "expected 0 to 61"),
        ({"x": [image(1)], "y": [True]}, "not an integer"),
        ({"x": [], "y": []}, "no examples"),
    ],
)
def test_an_invalid_image_or_label_is_an_error_of_one_line(tmp_path, record, message) -> None:
    write(tmp_path / "femnist/data", "train", "a.json", {"w": record})
    write(tmp_path / "femnist/data", "test", "a.json", GOOD)
    with pytest.raises(DataError) as caught:
        femnist(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_row_without_text_is_an_error(tmp_path) -> None:
    write(tmp_path / "sent140/data", "train", "a.json", {"u": {"x": [[1, 2, 3, 4, 5]], "y": [1]}})
    write(tmp_path / "sent140/data", "test", "a.json", {"u": {"x": ["good"], "y": [1]}})
    with pytest.raises(DataError, match="neither text nor a row"):
        sent140(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"x": ["a" * 80], "y": []}, "lists 'x' and 'y' of the same length"),
        ({"x": ["a" * 79], "y": ["b"]}, "is not 80 characters and one more"),
        ({"x": ["a" * 80], "y": [3]}, "is not 80 characters and one more"),
        ({"x": [], "y": []}, "the files have no examples"),
    ],
)
def test_windows_of_another_form_are_an_error(tmp_path, record, message) -> None:
    write(tmp_path / "shakespeare/data", "train", "a.json", {"A": record})
    with pytest.raises(DataError, match=message):
        shakespeare_leaf(tmp_path)


def test_a_folder_without_test_files_is_an_error(tmp_path) -> None:
    write(tmp_path / "femnist/data", "train", "a.json", GOOD)
    with pytest.raises(DataError, match=r"no \.json file"):
        femnist(tmp_path)


@pytest.mark.parametrize("load", [femnist, sent140, shakespeare_leaf])
def test_without_files_the_error_names_them(tmp_path, load) -> None:
    with pytest.raises(DataError, match=r"data/train/\*\.json") as caught:
        load(tmp_path)
    assert "THINWIRE_DATA" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pixels_in_json_are_exact() -> None:
    values = np.arange(256)
    decoded = np.array(json.loads(json.dumps((values / 255).tolist())))
    assert (np.rint(decoded * 255) == values).all()
