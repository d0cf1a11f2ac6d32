"""Files of a run: atomic writes, JSON that may be damaged, and the lock of a directory.

A crash at any moment leaves the old file or the new one. Errors of the system (no space, no permission, a name that is
too long) contain the path that was given.

One process at a time writes to a run directory. It holds the lock of the file `.lock`, which is never replaced. Other
machines see it, if the file system has such locks; the lock of a directory is often one of a machine alone. The system
releases it when the process ends, also after `kill -9`. `process.json` has the machine and the process that wrote last;
it is removed when the run is finished.
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
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from thinwire.core.text import visible
from thinwire.errors import CheckpointError, InUse

try:
    import fcntl
except ImportError:  # this system has no such lock
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
INVALID = (ValueError, KeyError, TypeError, AttributeError)  # of values that `unpack` refuses


type_hints = functools.cache(get_type_hints)  # of a function or a class; resolving their names takes time


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
        if hasattr(os, "O_DIRECTORY"):  # the renamed entry, too, where the system supports it
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def append(path: Path, data: bytes) -> None:
    """Append to a file."""
    with naming(path), path.open("ab") as file:
        file.write(data)


def append_json(path: Path, *values: Any) -> None:
    """Append values to a file, each as a line of JSON."""
    append(path, json_lines(*values).encode())


def json_lines(*values: Any) -> str:
    """Values as text, each as a line of JSON."""
    return "".join(json.dumps(value) + "\n" for value in values)


def write_all(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write several files below a folder; if one fails, a folder that did not exist is removed. Returns their paths."""
    new = not folder.exists()
    try:
        for name, data in files.items():
            path = folder / name
            with naming(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
            path.chmod(0o644)  # temporary files are readable by their owner only
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return [folder / name for name in files]


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
    """The object in a JSON file; one that is too deep, not UTF-8 or no object is a CheckpointError."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({why_unreadable(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} cannot be read (it holds no JSON object)")
    return value


def write_json(file: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(file, (json.dumps(value, indent=1) + "\n").encode())


def read_lines(source: Path | bytes, parse: Callable[[Any], T]) -> list[T]:
    """The parsed lines of JSON up to the first that is incomplete, or that `parse` refuses with one of `INVALID`.

    Args:
        source: a file, which need not exist, or its contents.
        parse: makes a record of a value of JSON.
    """
    data = source if isinstance(source, bytes) else source.read_bytes() if source.is_file() else b""
    found: list[T] = []
    with suppress(*INVALID, RecursionError):
        for line in data.split(b"\n")[:-1]:  # the last one may still be written
            found.append(parse(json.loads(line)))
    return found


def why_unreadable(error: BaseException) -> str:
    """The reason why a text could not be parsed, in a few words.

    >>> why_unreadable(RecursionError()), why_unreadable(UnicodeDecodeError("utf-8", b"x", 0, 1, "invalid"))
    ('it is nested too deeply', 'it is not UTF-8')
    """
    known = {RecursionError: "it is nested too deeply", UnicodeDecodeError: "it is not UTF-8"}
    return known.get(type(error)) or visible(getattr(error, "strerror", None) or str(error), 200)


def unpack(kind: Any, value: Any, tensors: Mapping[str, Any] = {}) -> Any:
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
        hints = type_hints(kind)
        return kind(**{name: unpack(hints[name], one, tensors) for name, one in value.items()})
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is ... else args
        return tuple(unpack(of, one, tensors) for of, one in zip(kinds, value, strict=True))
    if origin in (dict, Mapping):
        return {args[0](key): unpack(args[1], one, tensors) for key, one in value.items()}
    if kind is bytes or bytes in args:
        return bytes(tensors[value].numpy())
    if type(None) in args:
        return None if value is None else unpack(args[0], value, tensors)
    if kind not in (int, float, bool, str) and origin is not Literal:
        return tensors[value]
    sound = value in args if origin is Literal else type(value) in ((int, float) if kind is float else (kind,))
    sound = sound and (kind is not int or 0 <= value < 1 << 60) and (kind is not float or math.isfinite(value))
    if not sound:
        raise ValueError(f"it holds {visible(repr(value), 40)}, expected {getattr(kind, '__name__', kind)}")
    return value


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
    except CheckpointError as error:
        raise CheckpointError(f"{error}{hint}") from error
    if value.pop("checksum", None) != _checksum(value):
        raise CheckpointError(f"{file} is damaged: its checksum does not match{hint}")
    return value


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


PROCESS = "process.json"
LOCK = ".lock"
TRIES = 5  # `held` holds the lock for a moment
PAUSE = 0.02  # seconds between two tries

Writer = Literal["running", "gone", "unknown"]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a directory, which is made if needed, against other processes; one that stays empty is removed again."""
    if fcntl is None:
        yield
        return
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    message = f"another process is writing to {path}; wait for it or stop it"
    with naming(path / LOCK):
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in range(TRIES):
            try:
                with naming(path / LOCK):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == TRIES - 1:
                    raise InUse(message) from error
                time.sleep(PAUSE)
        if not os.fstat(handle).st_nlink:  # its directory was removed
            raise InUse(message)
        yield
    except BaseException:
        with suppress(OSError):
            if made and os.listdir(path) == [LOCK]:
                shutil.rmtree(path)
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
    if fcntl is None or note.get("host") != platform.node():
        return "unknown"
    return "running" if held(path) else "gone"


def held(path: Path) -> bool:
    """Whether another process has the lock of a directory."""
    with suppress(FileNotFoundError), (path / LOCK).open("rb") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
