"""Decoded data kept between runs: pictures and word numbers that take seconds to make from their files.

One uncompressed .npz a data set, in THINWIRE_CACHE or ~/.cache/thinwire. Its name holds a digest of the files that it
was made from, so a changed file is decoded anew. It is written beside its place and moved there when it is complete,
and read without pickle; a cache that cannot be written is no error.

What was measured on this machine is kept there too (`agree_on`): the first process that measures decides for all.
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
    """Where decoded data is kept."""
    return Path(os.environ.get("THINWIRE_CACHE") or "~/.cache/thinwire").expanduser()


def remember(
    name: str,
    files: Iterable[Path],
    make: Callable[[], dict[str, np.ndarray]],
    fits: Callable[[dict[str, np.ndarray]], bool],
) -> dict[str, np.ndarray]:
    """What `make` returns, from the cache if it was made from the same files before.

    Args:
        name: of the data set, with a version that changes when `make` does.
        files: all that `make` reads.
        make: decodes the files; what it raises passes through, and nothing is kept.
        fits: whether arrays that were kept have the right names and shapes; they are made again if not.
    """
    path = folder() / f"{name}-{_digest(files)}.npz"
    if (kept := load(path)) is not None and fits(kept):
        return kept
    made = make()
    with contextlib.suppress(OSError):
        _save(path, made)
    return made


def agree_on(
    name: str, make: Callable[[], dict[str, np.ndarray]], fits: Callable[[dict[str, np.ndarray]], bool]
) -> dict[str, np.ndarray]:
    """What the first process returned from `make` that asked on this machine; others wait for it and take the same.

    Raises OSError where it cannot be kept, before or after `make`: then nobody would agree.

    Args:
        name: of what is agreed on.
        make: makes it; what it raises passes through, and the next process makes it.
        fits: whether arrays that were kept have the right names and shapes; they are made again if not.
    """
    path = folder() / f"{name}.npz"
    if (kept := load(path)) is not None and fits(kept):
        return kept
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("ab") as lock:
        _wait_for(lock)  # the system lifts the lock when the process ends, however it ends
        if (kept := load(path)) is None or not fits(kept):
            kept = make()
            _save(path, kept)
    return kept


def _wait_for(lock: IO[bytes]) -> None:
    """Hold a file, or wait until nobody does; nothing where the system or the file system has no locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)


def _digest(files: Iterable[Path]) -> str:
    """Twelve hexadecimal digits from the name, size, time and first 64 KiB of each file."""
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
    """The arrays in a file, or None where it is missing or damaged (zip keeps a checksum of each)."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as kept:
            return {name: kept[name] for name in kept.files}
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
