"""Folders of images of one's own: layouts, sizes, and one line for every bad file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import thinwire as tw
from tests.own_files import write_digits


def test_folders_of_classes(tmp_path):
    source = tw.data.from_image_folder(write_digits(tmp_path / "d"))
    assert (len(source.train), len(source.test), source.classes) == (160, 40, 10)
    assert source.class_names == tuple(f"digit {i}" for i in range(10))
    assert source.train.pixels.dtype == torch.uint8
    assert source.model == {"channels": 1, "height": 8, "width": 8, "size": 8, "inputs": 64}
    assert set(source.test.targets.tolist()) == set(range(10))
    # the pixels are those of the files
    every = torch.cat([source.train.pixels, source.test.pixels]).long().sum()
    assert int(every) == int((load_digits().images[:200] * 15).astype(np.uint8).astype(np.int64).sum())
    values = source.train.pixels.double() / 255
    assert source.mean == pytest.approx([float(values.mean())])
    assert source.std == pytest.approx([float(values.std(correction=0))])


def test_train_and_test_folders_and_clients(tmp_path):
    folder = write_digits(tmp_path / "d", clients=3, split=True)
    source = tw.data.from_image_folder(folder, client_folders=True)
    assert (len(source.train), len(source.test)) == (160, 40)
    assert source.user_names == ("phone 0", "phone 1", "phone 2")
    assert "the folder test" in source.note
    task = tw.data.make_task(source, "cnn", partition="natural", clients=0, scale="standard")
    assert sorted(task.client_names) == ["phone 0", "phone 1", "phone 2"]
    x, _ = task.train.gather(torch.arange(160))
    assert abs(float(x.mean())) < 1e-5
    assert task.model(x[:2]).shape == (2, 10)
    with pytest.raises(tw.DataError, match=r"write task.client_folders = true"):
        tw.data.from_image_folder(folder)


def test_sizes_and_colors(tmp_path):
    for name, shape in (("a/1.png", (6, 9)), ("a/2.jpg", (6, 9, 3)), ("b/1.jpeg", (6, 9, 3)), ("b/2.PNG", (12, 18, 4))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.full(shape, 100, np.uint8)).save(tmp_path / name)
    (tmp_path / "a/notes.txt").write_text("no image")
    with pytest.raises(tw.DataError, match=r"task.channels = 3"):
        tw.data.from_image_folder(tmp_path, test_fraction=0.5)
    with pytest.raises(
        tw.DataError, match=r"2.PNG: the image has 12 x 18 pixels, but the first one 6 x 9; write task.size"
    ):
        tw.data.from_image_folder(tmp_path, test_fraction=0.5, channels=3)
    source = tw.data.from_image_folder(tmp_path, test_fraction=0.5, channels=3, size=[6, 9])
    assert source.train.pixels.shape == (2, 3, 6, 9)
    assert "resized" in source.note
    assert tw.data.from_image_folder(tmp_path, test_fraction=0.5, channels=3, size=7).model["size"] == 7


def test_bad_folders_are_one_line(tmp_path):
    folder = write_digits(tmp_path / "d", 40)
    (folder / "digit 3/x.png").write_bytes(b"no image")
    with pytest.raises(tw.DataError, match=r"x.png: cannot be read as PNG or JPEG"):
        tw.data.from_image_folder(folder, test_fraction=0.1)
    whole = (folder / "digit 3/3.png").read_bytes()
    (folder / "digit 3/x.png").write_bytes(whole[: len(whole) - 30])
    with pytest.raises(tw.DataError, match=r"x.png: cannot be"):
        tw.data.from_image_folder(folder, test_fraction=0.1)
    # a header that claims 60,000 x 60,000 pixels
    (folder / "digit 3/x.png").write_bytes(whole[:16] + (60_000).to_bytes(4, "big") * 2 + whole[24:])
    with pytest.raises(tw.DataError, match=r"x.png: "):
        tw.data.from_image_folder(folder, test_fraction=0.1)
    (folder / "digit 3/x.png").rename(folder / "x.png")
    with pytest.raises(tw.DataError, match="this image is in no class"):
        tw.data.from_image_folder(folder)
    (folder / "x.png").unlink()
    (folder / "none").mkdir()
    with pytest.raises(tw.DataError, match=r"none: no image \(.png, .jpg, .jpeg\) in this class"):
        tw.data.from_image_folder(folder)
    with pytest.raises(tw.DataError, match="no folders, expected one for each class"):
        tw.data.from_image_folder(folder / "none")
    with pytest.raises(tw.DataError, match="no such file or folder"):
        tw.data.from_image_folder(tmp_path / "nowhere")
    (tmp_path / "one/a").mkdir(parents=True)
    for i in range(4):
        Image.new("L", (4, 4)).save(tmp_path / f"one/a/{i}.png")
    with pytest.raises(tw.DataError, match="one class only, 'a'"):
        tw.data.from_image_folder(tmp_path / "one", test_fraction=0.5)
