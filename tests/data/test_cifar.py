"""CIFAR-10 and CIFAR-100 from binary files and from JPEG sheets; damaged files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.data import cache
from thinwire.data.named_images import cifar10
from thinwire.errors import DataError

BATCHES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def records(count: int, header: int, classes: int) -> np.ndarray:
    rows = np.zeros((count, header + 3072), np.uint8)
    rows[:, header - 1] = np.arange(count) % classes
    rows[:, header] = np.arange(count) % 251  # the first red pixel
    rows[:, -1] = 255  # the last blue one
    return rows


@pytest.fixture(scope="module")
def binary(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("binary")
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(records(10_000, 1, 10).tobytes())
    for name in BATCHES[1:]:
        os.link(folder / "data_batch_1.bin", folder / f"{name}.bin")
    return root


@pytest.fixture
def one_sheet(tmp_path_factory) -> Path:
    """A sheet in which image i has the gray value i // 100 + i % 100."""
    image = pytest.importorskip("PIL.Image")
    path = tmp_path_factory.getbasetemp() / "sheet.jpg"
    if not path.exists():
        gray = (np.arange(100)[:, None] + np.arange(100)).astype(np.uint8)
        sheet = np.repeat(np.repeat(gray, 32, axis=0), 32, axis=1)
        image.fromarray(np.stack([sheet] * 3, axis=-1)).save(path, quality=100, subsampling=0)
    return path


def write_sheets(root: Path, one_sheet: Path) -> Path:
    folder = root / "cifar10"
    folder.mkdir()
    for name in BATCHES:
        os.link(one_sheet, folder / f"{name}.jpg")
    (folder / "labels.bin").write_bytes((np.arange(60_000) % 10).astype(np.uint8).tobytes())
    return folder


def test_the_official_binary_files_are_read(binary) -> None:
    source = cifar10(binary)
    assert (len(source.train), len(source.test)) == (50_000, 10_000)
    x, y = source.train.gather(torch.tensor([13, 10_013]))
    assert x.shape == (2, 3, 32, 32)
    assert x[:, 0, 0, 0].tolist() == pytest.approx([13 / 255] * 2)
    assert x[:, 2, 31, 31].tolist() == [1.0, 1.0]
    assert y.tolist() == [3, 3]
    assert source.note == ""


def test_a_truncated_or_mislabeled_binary_file_is_an_error(tmp_path, binary) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in BATCHES:
        os.link(binary / "cifar-10-batches-bin" / f"{name}.bin", folder / f"{name}.bin")
    (folder / "test_batch.bin").unlink()
    (folder / "test_batch.bin").write_bytes(records(10_000, 1, 10).tobytes()[:-1])
    with pytest.raises(DataError, match=r"test_batch.bin: 30729999 bytes, expected 30730000"):
        cifar10(tmp_path)
    (folder / "test_batch.bin").write_bytes(records(10_000, 1, 11).tobytes())
    with pytest.raises(DataError, match=r"test_batch.bin: example 10 has label 10, expected 0 to 9"):
        cifar10(tmp_path)


def test_pickles_are_never_opened(tmp_path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(DataError, match="pickle"):
        cifar10(tmp_path)


def test_sheets_are_read_row_by_row_and_noted_as_lossy(tmp_path, one_sheet) -> None:
    write_sheets(tmp_path, one_sheet)
    source = cifar10(tmp_path)
    means = source.train.pixels.float().mean(dim=(1, 2, 3))
    where = torch.arange(50_000) % 10_000
    assert (means - (where // 100 + where % 100)).abs().max() < 2
    assert source.test.targets[:3].tolist() == [0, 1, 2]
    assert "lossy" in source.note
    assert "41.7 dB" in source.note


def test_the_second_load_uses_the_cache(tmp_path, one_sheet, monkeypatch) -> None:
    write_sheets(tmp_path, one_sheet)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    first = cifar10(tmp_path)
    monkeypatch.setattr("thinwire.data.named_images._sheet", lambda path: pytest.fail("decoded again"))
    assert torch.equal(cifar10(tmp_path).train.pixels, first.train.pixels)


def test_a_damaged_sheet_is_an_error_and_not_cached(tmp_path, one_sheet, monkeypatch) -> None:
    folder = write_sheets(tmp_path, one_sheet)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    bad = folder / "test_batch.jpg"
    bad.unlink()
    bad.write_bytes(one_sheet.read_bytes()[:40_000])
    with pytest.raises(DataError, match="cannot be read as PNG or JPEG"):
        cifar10(tmp_path)
    bad.write_bytes(b"GIF89a" + bytes(100))
    with pytest.raises(DataError, match="cannot be read as PNG or JPEG"):
        cifar10(tmp_path)
    assert not list(cache.folder().glob("*"))


def test_a_sheet_of_another_size_is_an_error(tmp_path, one_sheet) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = write_sheets(tmp_path, one_sheet)
    (folder / "data_batch_1.jpg").unlink()
    image.new("L", (3200, 3200)).save(folder / "data_batch_1.jpg")
    with pytest.raises(DataError, match=r"\(3200, 3200\) L, expected 3200x3200 RGB"):
        cifar10(tmp_path)


def test_a_sheet_with_an_enormous_size_in_its_header_is_an_error_without_a_warning(tmp_path, one_sheet) -> None:
    folder = write_sheets(tmp_path, one_sheet)
    data = bytearray(one_sheet.read_bytes())
    header = data.index(b"\xff\xc0")  # marker, length (2), precision (1), height (2), width (2)
    for side, message in (
        (12_000, "cannot be read as PNG or JPEG"),
        (4_000, r"\(4000, 4000\) RGB, expected 3200x3200 RGB"),
    ):
        data[header + 5 : header + 9] = side.to_bytes(2, "big") * 2
        (folder / "data_batch_1.jpg").unlink()
        (folder / "data_batch_1.jpg").write_bytes(data)
        with pytest.raises(DataError, match=message):
            cifar10(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"), [(bytes(59_999), "59999 bytes, expected 60000"), (b"\x0a" + bytes(59_999), "label 10")]
)
def test_invalid_labels_of_sheets_are_an_error(tmp_path, one_sheet, labels, message) -> None:
    (write_sheets(tmp_path, one_sheet) / "labels.bin").write_bytes(labels)
    with pytest.raises(DataError, match=message):
        cifar10(tmp_path)


def test_without_pillow_the_error_message_names_the_package(tmp_path, one_sheet, monkeypatch) -> None:
    write_sheets(tmp_path, one_sheet)
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'thinwire\[data\]'"):
        cifar10(tmp_path)
