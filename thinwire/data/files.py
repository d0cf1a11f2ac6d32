"""Data files: where they are, and reading of untrusted ones with a size limit and errors of one line.

Files are below the folder of --data-dir or THINWIRE_DATA. Sizes in a file header are compared with the size of the
file. They never decide how much memory is allocated.
"""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError, DataError

VARIABLE = "THINWIRE_DATA"
_PIECE = 1 << 20


def root(data_dir: Path | None) -> Path | None:
    """The folder of all datasets, or None if none is given."""
    given, how = (data_dir, "--data-dir") if data_dir is not None else (os.environ.get(VARIABLE), VARIABLE)
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise DataError(f"{path}: no such folder, but {how} names it; expected the folder of the datasets")
    return path


def find(data_dir: Path | None, *names: str) -> Path | None:
    """The first of these folders that exists, or None."""
    base = root(data_dir)
    return next((base / name for name in names if (base / name).is_dir()), None) if base else None


def folder_of(data_dir: Path | None, task: str, layout: str, *names: str) -> Path:
    """The first of these folders that exists; without one, an error with the files that would be read."""
    found = find(data_dir, *names)
    if found is None:
        raise no_data(task, layout)
    return found


def pick(folder: Path, *names: str) -> Path:
    """The first of these files that exists in a folder: alternative names of one file."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: no file {' or '.join(names)}")


def own_path(data_dir: Path | None, given: str | Path, option: str) -> Path:
    """The path of a file or folder of the user: as given, or below the folder of all datasets."""
    if not given or not isinstance(given, str | Path):
        raise ConfigError(f"{option} is missing or no path; write for example --set {option}=PATH")
    path = Path(given).expanduser()
    base = None if path.exists() else root(data_dir)
    if base is not None and (base / path).exists():
        return base / path
    if not path.exists():
        raise DataError(f"{path}: no such file or folder ({option})")
    return path


def no_data(task: str, layout: str) -> DataError:
    """The error for a dataset that is not there, with the files that would be read."""
    return DataError(
        f"{task}: no data found; put {layout} into a folder and give that folder with --data-dir or {VARIABLE}"
    )


def read_bytes(path: Path, limit: int) -> bytes:
    """The bytes of a file, decompressed if its name ends in .gz or .xz; more than `limit` are an error."""
    parts: list[bytes] = []
    total = 0
    opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opened(path, "rb") as stream:
            while piece := stream.read(_PIECE):
                total += len(piece)
                if total > limit:
                    raise DataError(f"{path}: has more than {limit} bytes, the expected maximum")
                parts.append(piece)
    except EOFError:
        raise DataError(
            f"{path}: the compressed stream ends too early, after {total} bytes; copy the file again"
        ) from None
    except (OSError, zlib.error, lzma.LZMAError) as fault:
        raise DataError(f"{path}: cannot be read ({one_line(fault)})") from None
    return b"".join(parts)


def read_text(path: Path, limit: int) -> str:
    """The text of a UTF-8 file, without a byte-order mark."""
    data = read_bytes(path, limit)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        row = data[: fault.start].count(b"\n") + 1
        raise DataError(f"{path}: row {row} is not UTF-8 text; save the file with the encoding UTF-8") from None


def class_tensor(values: np.ndarray, classes: int, path: Path | str) -> Tensor:
    """Class labels (n,) as int64; values that are not from 0 to `classes` - 1 are an error."""
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise DataError(f"{path}: example {wrong[0]} has label {values[wrong[0]]}, expected 0 to {classes - 1}")
    return torch.from_numpy(values.astype(np.int64))


def one_line(fault: BaseException) -> str:
    """The message of an error of another library, in one line of at most 160 characters."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if len(text) <= 160 else text[:157] + "..."
