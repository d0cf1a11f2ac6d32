"""MNIST and Fashion-MNIST from IDX files; damaged files."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from thinwire.data.named_images import fashion_mnist, mnist, read_idx
from thinwire.errors import DataError


def idx3(pixels: np.ndarray) -> bytes:
    return struct.pack(">4I", 2051, *pixels.shape) + pixels.tobytes()


def idx1(labels: np.ndarray) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + labels.astype(np.uint8).tobytes()


PIXELS = (np.arange(7 * 784) % 256).astype(np.uint8).reshape(7, 28, 28)
LABELS = np.arange(7)


def write_set(folder: Path, compressed: bool = True) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        for name, data in ((f"{split}-images-idx3-ubyte", idx3(PIXELS)), (f"{split}-labels-idx1-ubyte", idx1(LABELS))):
            (folder / (name + ".gz" * compressed)).write_bytes(gzip.compress(data) if compressed else data)
    return folder


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    ("load", "layout"),
    [(mnist, "mnist"), (mnist, "MNIST/raw"), (fashion_mnist, "fashion-mnist"), (fashion_mnist, "FashionMNIST/raw")],
)
def test_idx_files_are_read_in_both_layouts_compressed_or_not(tmp_path, load, layout, compressed) -> None:
    write_set(tmp_path / layout, compressed)
    source = load(tmp_path)
    x, y = source.train.gather(torch.arange(7))
    assert x.shape == (7, 1, 28, 28)
    np.testing.assert_allclose(x[:, 0].numpy(), PIXELS / 255, atol=1e-7)
    assert y.tolist() == LABELS.tolist()
    assert len(source.test) == 7


def test_the_folder_in_the_environment_variable_is_the_default(tmp_path, monkeypatch) -> None:
    write_set(tmp_path / "mnist")
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    assert len(mnist(None).train) == 7


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "train-images-idx3-ubyte",
            b"\0\0\0\1" + idx3(PIXELS)[4:],
            "5504 bytes that are no IDX file; expected the header 2051, count, 28, 28",
        ),
        ("train-images-idx3-ubyte", idx3(PIXELS)[:-1], "5503 bytes that are no IDX file"),
        ("train-images-idx3-ubyte", idx3(PIXELS) + b"x", "5505 bytes that are no IDX file"),
        ("train-images-idx3-ubyte", b"\0\0", "2 bytes that are no IDX file"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 2051, 0, 28, 28), "no IDX file"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 2051, 2**32 - 1, 28, 28), "no IDX file"),
        ("train-images-idx3-ubyte", struct.pack(">4I", 2051, 7, 2**31, 2**31), "no IDX file"),
        ("train-labels-idx1-ubyte", idx1(LABELS + 4), "example 6 has label 10, expected 0 to 9"),
        ("train-labels-idx1-ubyte", idx1(LABELS[:5]), "5 labels, expected 7"),
        (
            "train-labels-idx1-ubyte",
            idx3(PIXELS),
            "no IDX file; expected the header 2049, count, nothing more, then 1 bytes",
        ),
    ],
)
def test_an_invalid_file_is_an_error_of_one_line_that_names_it(tmp_path, name, data, message) -> None:
    folder = write_set(tmp_path / "mnist", compressed=False)
    (folder / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        mnist(tmp_path)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_file_is_an_error(tmp_path) -> None:
    folder = write_set(tmp_path / "mnist")
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="ends too early"):
        mnist(tmp_path)


def test_decompression_stops_at_the_size_limit(tmp_path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * 3_000_000))
    with pytest.raises(DataError, match="more than 100008 bytes"):
        read_idx(path, ())


def test_a_missing_file_is_named(tmp_path) -> None:
    folder = write_set(tmp_path / "mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        mnist(tmp_path)


def test_a_missing_data_folder_is_named(tmp_path, monkeypatch) -> None:
    with pytest.raises(DataError, match="--data-dir names it"):
        mnist(tmp_path / "nowhere")
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="THINWIRE_DATA names it"):
        mnist(None)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.booleans())
def test_any_damage_gives_a_data_error_or_an_array(tmp_path_factory, data, compressed) -> None:
    good = bytearray(gzip.compress(idx3(PIXELS[:2]))) if compressed else bytearray(idx3(PIXELS[:2]))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(good)))
    path = tmp_path_factory.getbasetemp() / f"damaged{'.gz' if compressed else ''}"
    path.write_bytes(bytes(good[:cut]))
    try:
        assert read_idx(path, (28, 28)).shape == (2, 28, 28)
    except DataError as caught:
        line = str(caught)
    else:
        line = ""
    assert "\n" not in line
