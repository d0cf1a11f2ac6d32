"""Reading of untrusted files: with a size limit, and errors of one line that name the file.

Sizes in a file header are compared with the size of the file. They never decide how much memory is allocated.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import DataError

_PIECE = 1 << 20


def read_bytes(path: Path, limit: int) -> bytes:
    """The bytes of a file, decompressed if its name ends in .gz or .xz; more than `limit` are an error."""
    parts: list[bytes] = []
    total = 0
    try:
        with _opened(path) as stream:
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


def _opened(path: Path) -> IO[bytes]:
    """The stream of a file, decompressed."""
    if path.suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "rb"))
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def read_text(path: Path, limit: int) -> str:
    """The text of a UTF-8 file, without a byte-order mark."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise DataError(f"{path}: byte {fault.start} is not UTF-8 text, as expected") from None


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file."""
    text = read_text(path, limit)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise DataError(f"{path}: not JSON, as expected ({one_line(fault)})") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: a JSON {type(found).__name__}, expected an object")
    return found


def class_tensor(values: np.ndarray, classes: int, path: Path | str) -> Tensor:
    """Class labels as int64; values that are not integers from 0 to `classes` - 1 are an error."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{path}: labels are {values.dtype} of shape {values.shape}, expected one integer each")
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise DataError(f"{path}: example {wrong[0]} has label {values[wrong[0]]}, expected 0 to {classes - 1}")
    return torch.from_numpy(values.astype(np.int64))


def numbered(texts: Iterable[str]) -> tuple[str, ...]:
    """The different texts in order: as numbers if all are whole numbers, otherwise alphabetical.

    >>> numbered(["10", "9", "10"]), numbered(["b", "10", "9"])
    (('9', '10'), ('10', '9', 'b'))
    """
    found = sorted(set(texts))
    if all(text.isascii() and text.isdigit() and len(text) < 20 for text in found):
        found.sort(key=int)
    return tuple(found)


def one_line(fault: BaseException) -> str:
    """The message of an error of another library, in one line of at most 160 characters."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if len(text) <= 160 else text[:157] + "..."
