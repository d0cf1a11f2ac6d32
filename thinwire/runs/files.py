"""Atomic writes, and reading of JSON that may be damaged: a crash at any moment leaves the old file or the new one.

Errors of the system (no space, no permission, a name that is too long) contain the path that was given.

Who writes to a run directory: one process at a time, and whether that process is still there.

The directory itself is locked, since its files are replaced; the system releases the lock when the process ends, also
after `kill -9`. `process.json` has the machine and the process that wrote last; it is removed when the run is finished.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from thinwire.core.text import visible
from thinwire.errors import CheckpointError

T = TypeVar("T")
INVALID = (ValueError, KeyError, TypeError, AttributeError)  # of values that `unpack` refuses
MAX_JSON_BYTES = 1 << 30  # a checkpoint of a million clients has a tenth of it


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


def _read(file: Path) -> bytes:
    if (size := file.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{file} has {size:,} bytes, expected at most {MAX_JSON_BYTES:,}")
    return file.read_bytes()


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; one that is too long, too deep, not UTF-8 or no object is a CheckpointError."""
    try:
        value = json.loads(_read(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({why_unreadable(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} cannot be read (it holds no JSON object)")
    return value


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_lines(file: Path, parse: Callable[[bytes], T]) -> list[T]:
    """The parsed lines of a file up to the first that is incomplete or not valid; empty if there is no file."""
    return parse_lines(_read(file) if file.is_file() else b"", parse)


def parse_lines(data: bytes, parse: Callable[[bytes], T]) -> list[T]:
    """The complete lines of some data up to the first that `parse` refuses with one of `INVALID`."""
    found: list[T] = []
    with suppress(*INVALID, RecursionError):
        for line in data.split(b"\n")[:-1]:  # the last one may still be written
            found.append(parse(line))
    return found


def read_as(kind: type[T], file: Path) -> T | None:
    """The record in a JSON file (see `unpack`); None if there is no file, or it is not valid."""
    try:
        found: T = unpack(kind, json.loads(_read(file)))
        return found
    except (OSError, CheckpointError, RecursionError, *INVALID):
        return None


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


def unpack(kind: Any, value: Any, tensors: Mapping[str, Any] | None = None) -> Any:
    """A value of JSON as a type, field by field; raises one of `INVALID`.

    Counts must be 0 or more, and numbers finite. A tensor, or bytes, is named by its key in `tensors`.

    >>> unpack(tuple[int, ...], [1, 2]), unpack(dict[str, float | None], {"a": None, "b": 0.5})
    ((1, 2), {'a': None, 'b': 0.5})
    >>> unpack(int, -1)
    Traceback (most recent call last):
    ValueError: it holds -1, expected int
    """
    origin, args = get_origin(kind), get_args(kind)
    if (origin is None and hasattr(kind, "_fields")) or dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: unpack(hints[name], one, tensors) for name, one in value.items()})
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is ... else args
        return tuple(unpack(of, one, tensors) for of, one in zip(kinds, value, strict=True))
    if origin in (dict, Mapping):
        return {args[0](key): unpack(args[1], one, tensors) for key, one in value.items()}
    if kind is bytes or bytes in args:
        return bytes((tensors or {})[value].numpy())
    if type(None) in args:
        return None if value is None else unpack(args[0], value, tensors)
    if kind not in (int, float, bool, str) and origin is not Literal:
        return (tensors or {})[value]
    sound = value in args if origin is Literal else type(value) in ((int, float) if kind is float else (kind,))
    sound = sound and (kind is not int or 0 <= value < 1 << 60) and (kind is not float or math.isfinite(value))
    if not sound:
        raise ValueError(f"it holds {visible(repr(value), 40)}, expected {getattr(kind, '__name__', kind)}")
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


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


PROCESS = "process.json"
TRIES = 5  # `writer` holds the lock for a moment
PAUSE = 0.02  # seconds between two tries

Writer = Literal["running", "gone", "unknown"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a directory, which is made if needed, against other processes; one that stays empty is removed again."""
    try:
        import fcntl
    except ImportError:  # this system has no such lock
        yield
        return
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY)
    try:
        for attempt in range(TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if attempt == TRIES - 1:
                    message = f"another process is writing to {path}; wait for it or stop it"
                    raise CheckpointError(message) from error
                time.sleep(PAUSE)
        yield
    except BaseException:
        if made:
            with suppress(OSError):  # it holds something
                path.rmdir()
        raise
    finally:
        os.close(handle)


def note_process(path: Path) -> None:
    """Write the machine and the process that write to a directory."""
    write_json(path / PROCESS, {"host": platform.node(), "pid": os.getpid()})


def writer(path: Path) -> Writer:
    """Whether the process that wrote to a directory last still does; unknown if it ran on another machine."""
    try:
        note = read_json(path / PROCESS)
    except CheckpointError:
        return "unknown"
    if note.get("host") != platform.node():
        return "unknown"
    try:
        import fcntl

        handle = os.open(path, os.O_RDONLY)
    except (ImportError, OSError):
        return "unknown"
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return "gone"
    except OSError:
        return "running"
    finally:
        os.close(handle)
