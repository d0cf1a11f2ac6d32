"""Who writes to a run directory: one process at a time, and whether that process is still there.

The directory itself is locked, since its files are replaced; the system releases the lock when the process ends, also
after `kill -9`. `process.json` has the machine and the process that wrote last; it is removed when the run is finished.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from thinwire.errors import CheckpointError
from thinwire.experiments.files import read_json, write_atomically

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
    note = {"host": platform.node(), "pid": os.getpid()}
    write_atomically(path / PROCESS, (json.dumps(note) + "\n").encode())


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
