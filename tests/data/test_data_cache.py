"""The cache of decoded data."""

import os
from pathlib import Path

import pytest
import torch

from thinwire.data import cache
from thinwire.errors import DataError


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(b"first")
    return path


class Maker:
    """Decodes a file and counts its calls."""

    def __init__(self, path: Path) -> None:
        self.path, self.times = path, 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.times += 1
        return {"a": torch.tensor(list(self.path.read_bytes()), dtype=torch.uint8), "b": torch.arange(3)}

    def cached(self) -> dict[str, torch.Tensor]:
        return cache.cached("example-v1", [self.path], self)


def test_the_same_file_is_decoded_once(source) -> None:
    make = Maker(source)
    first, second = make.cached(), make.cached()
    assert make.times == 1
    for name in ("a", "b"):
        assert torch.equal(first[name], second[name])
        assert first[name].dtype == second[name].dtype


def test_a_changed_file_is_decoded_again(source) -> None:
    make = Maker(source)
    make.cached()
    source.write_bytes(b"other")
    assert make.cached()["a"].numpy().tobytes() == b"other"
    os.utime(source, ns=(1, 1))
    make.cached()
    assert make.times == 3


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b""])
def test_a_damaged_cache_file_is_replaced(source, damage) -> None:
    make = Maker(source)
    make.cached()
    (file,) = cache.folder().glob("example-v1-*.pt")
    file.write_bytes(damage(file.read_bytes()))
    assert make.cached()["a"].numpy().tobytes() == b"first"
    assert make.times == 2


def test_a_pickle_in_the_cache_is_not_opened(source) -> None:
    make = Maker(source)
    make.cached()
    (file,) = cache.folder().glob("example-v1-*.pt")
    torch.save({"a": Path("object"), "b": torch.arange(3)}, file)
    assert make.cached()["a"].numpy().tobytes() == b"first"
    assert make.times == 2


def test_a_failed_decode_is_not_cached(source) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        cache.cached("example-v1", [source], fail)
    assert not list(cache.folder().glob("*"))


def test_an_interrupted_write_leaves_no_file(source, monkeypatch) -> None:
    def stop(*args, **kwargs) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        Maker(source).cached()
    assert not list(cache.folder().glob("*"))


def test_a_cache_that_cannot_be_written_is_not_an_error(source, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("THINWIRE_CACHE", str(tmp_path / "file" / "cache"))
    assert Maker(source).cached()["a"].numpy().tobytes() == b"first"


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin: cannot be read"):
        Maker(tmp_path / "absent.bin").cached()
