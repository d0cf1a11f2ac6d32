"""Arrays in .npz files of numpy, read without pickle; the size of an array is checked before memory is allocated."""

from __future__ import annotations

import difflib
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from thinwire.core.text import visible
from thinwire.data.reading import one_line
from thinwire.errors import DataError

LIMIT = 1 << 33  # bytes of one array
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def names_in(path: Path) -> list[str]:
    """The names of the arrays in a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except (zipfile.BadZipFile, OSError, ValueError) as fault:
        raise DataError(f"{path}: cannot be read as .npz of numpy.savez ({one_line(fault)})") from None


def read_array(path: Path, name: str, option: str) -> np.ndarray:
    """One array of a file; `option` is the setting that names it."""
    known = names_in(path)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        listed = visible(", ".join(known), 200) or "nothing"
        raise DataError(f"{path}: no array {visible(name, 80)!r} ({option}); the file has {listed}.{guess}")
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, f"{name}.npy", f"{path}: array {name!r}")
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, zlib.error, NotImplementedError, RuntimeError) as fault:
        raise DataError(f"{path}: array {name!r} cannot be read ({one_line(fault)})") from None


def _read(archive: zipfile.ZipFile, member: str, where: str) -> np.ndarray:
    """The array in a member of the archive."""
    stored = archive.getinfo(member).file_size
    if stored > LIMIT:
        raise DataError(f"{where} has {stored:,} bytes, more than {LIMIT:,}")
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)  # type: ignore[arg-type]
        if version not in _HEADERS:
            raise DataError(f"{where} has format {version}, expected an array of numbers or texts")
        shape, fortran, dtype = _HEADERS[version](stream)  # type: ignore[arg-type]
        if dtype.hasobject or dtype.names:
            raise DataError(f"{where} holds {dtype}, expected numbers or texts (Python objects are not read)")
        expected = math.prod(shape) * dtype.itemsize
        data = stream.read(min(expected, stored) + 1)
    if len(data) != expected:
        raise DataError(f"{where} states {expected:,} bytes, but has {len(data):,}; copy the file again")
    flat = np.frombuffer(bytearray(data), dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
