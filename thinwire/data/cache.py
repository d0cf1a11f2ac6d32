"""Cache of decoded data, such as images and token ids, that take seconds to decode from their files.

One uncompressed .npz per dataset, in THINWIRE_CACHE or ~/.cache/thinwire. Its name contains a digest of the source
files, so a changed file is decoded again. It is written to a temporary file, then renamed, and read without pickle. A
cache that cannot be written is not an error.

Measurements of this machine are cached there too (`measured_once`): all processes use those of the first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

from thinwire.errors import DataError

_HEAD = 1 << 16


def folder() -> Path:
    """The cache folder."""
    return Path(os.environ.get("THINWIRE_CACHE") or "~/.cache/thinwire").expanduser()


def cached(name: str, files: Iterable[Path], make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that `make` returns, from the cache if they were made from the same files before.

    Args:
        name: name of the dataset, with a version that changes when `make` does.
        files: all files that `make` reads.
        make: decodes the files; its errors are passed on, and nothing is cached.
    """
    path = folder() / f"{name}-{digest_of(files)}.npz"
    if (found := load(path)) is not None:
        return found
    made = make()
    with contextlib.suppress(OSError):
        _save(path, made)
    return made


def measured_once(
    name: str, make: Callable[[], dict[str, np.ndarray]], fits: Callable[[dict[str, np.ndarray]], bool]
) -> dict[str, np.ndarray]:
    """The arrays that `make` returned in the first process of this machine; other processes wait and use the same.

    Raises OSError, before or after `make`, where the cache cannot be written: processes would use different arrays.

    Args:
        name: name of the arrays.
        make: makes them; its errors are passed on, and the next process calls it again.
        fits: whether cached arrays have the expected names and shapes; if not, they are made again.
    """
    path = folder() / f"{name}.npz"
    if (found := load(path)) is not None and fits(found):
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("ab") as lock:
        _wait_for(lock)  # the operating system releases the lock when the process ends, even by a crash
        if (found := load(path)) is None or not fits(found):
            found = make()
            _save(path, found)
    return found


def _wait_for(lock: IO[bytes]) -> None:
    """Lock a file exclusively; does nothing where the platform or the file system has no locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)


def digest_of(files: Iterable[Path]) -> str:
    """Twelve hexadecimal digits from the name, size, modification time and first 64 KiB of each file."""
    digest = hashlib.sha256()
    for file in files:
        try:
            stat = file.stat()
            with open(file, "rb") as stream:
                head = stream.read(_HEAD)
        except OSError as fault:
            raise DataError(f"{file}: cannot be read ({fault.strerror})") from None
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        digest.update(hashlib.sha256(head).digest())
    return digest.hexdigest()[:12]


def load(path: Path) -> dict[str, np.ndarray] | None:
    """The arrays of a file, or None if it is missing or damaged (zip files have a checksum for each array)."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile):
        return None


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".draft")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # numpy 1.26 has no allow_pickle here
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
