"""Atomic writes, and reading of JSON that may be damaged: a crash at any moment leaves the old file or the new one.

Errors of the system (no space, no permission, a name that is too long) contain the path that was given.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import CheckpointError

LONGEST_JSON = 1 << 30  # bytes; a checkpoint of a million clients has a tenth of it


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the path of system errors inside the block; the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file in the same folder, flush it to disk, and rename it to `path`."""
    with naming(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append to a file; if that fails, the file keeps its old length."""
    with naming(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def write_all(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write several files below a folder, which is created; if one fails, the new ones are removed."""
    written: list[Path] = []
    made: list[Path] = []
    try:
        for name, data in files.items():
            path = folder / name
            missing = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
            with naming(path.parent):
                for parent in reversed(missing):
                    parent.mkdir()
                    made.append(parent)
            new = not path.exists()
            write_atomically(path, data)
            written += [path] if new else []
            path.chmod(0o644)  # temporary files are readable by their owner only
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for parent in reversed(made):
            with suppress(OSError):
                parent.rmdir()
        raise
    return [folder / name for name in files]


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder (renames, removals) to disk, where the system supports it."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_HINTS = {
    errno.ENOSPC: "; free some space, then repeat the command",
    errno.EDQUOT: "; free some space, then repeat the command",
    errno.EFBIG: "; raise the limit on file sizes, or write to another folder",
    errno.ENAMETOOLONG: "; use a shorter name",
    errno.EACCES: "; use a folder that you can read and write",
    errno.EPERM: "; use a folder that you can read and write",
    errno.EROFS: "; use a folder that you can read and write",
}


def message_of(error: BaseException) -> str:
    """An error as one line; one of the system has its file and what to do.

    >>> message_of(OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"))
    'run/metrics.jsonl: No space left on device; free some space, then repeat the command'
    """
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    file = visible(f"{os.fsdecode(error.filename)}: " if error.filename else "", 300)
    return f"{file}{error.strerror}{_HINTS.get(error.errno, '')}"


# -- JSON that may be damaged ----------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; one that is too long, too deep, not UTF-8 or no object is a CheckpointError."""
    try:
        if (size := file.stat().st_size) > LONGEST_JSON:
            raise CheckpointError(f"{file} has {size:,} bytes, expected at most {LONGEST_JSON:,}")
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({why_unreadable(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} cannot be read (it holds no JSON object)")
    return value


def why_unreadable(error: BaseException) -> str:
    """The reason why a text could not be parsed, in a few words.

    >>> why_unreadable(RecursionError()), why_unreadable(UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid"))
    ('it is nested too deeply', 'it is not UTF-8')
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if "integer string conversion" in str(error):
        return "it holds a number of thousands of digits"
    return visible(str(error), 200)


def with_checksum(value: dict[str, Any]) -> bytes:
    """An object as JSON, with a key `checksum` over its other keys."""
    return (json.dumps({**value, "checksum": _checksum(value)}, indent=1) + "\n").encode()


def read_checked(file: Path, hint: str = "") -> dict[str, Any]:
    """The object that `with_checksum` wrote, without its checksum.

    Args:
        file: the file.
        hint: what to do if it is damaged; appended to the error message.
    """
    try:
        value = read_json(file)
        right = value.pop("checksum", None) == _checksum(value)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{hint}") from error
    except RecursionError as error:
        raise CheckpointError(f"{file} cannot be read ({why_unreadable(error)}){hint}") from error
    if not right:
        raise CheckpointError(f"{file} is damaged: its checksum does not match{hint}")
    return value


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
