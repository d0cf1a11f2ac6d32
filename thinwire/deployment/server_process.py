"""The process of a server that trains into a run directory: which one it is, whether it is stale, and how to stop it.

Flower starts `flwr-serverapp` below the SuperLink. If the SuperLink is killed, that process may go on for minutes: it
holds the lock of the run directory and tries to reconnect. Such a process is stale.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from thinwire.errors import CheckpointError
from thinwire.experiments.files import read_json
from thinwire.experiments.lock import PROCESS, writer

PROGRAM = "flwr-serverapp"
FAILED = "thinwire failed:"  # prefix of the server's error message in the log
HOPELESS = "thinwire: the same command would fail again"  # the line after it, if the settings are wrong


def server_process(path: Path) -> int | None:
    """The id of the process of Flower that writes to a run directory on this machine; None if there is none."""
    if writer(path) != "running":
        return None
    try:
        found = read_json(path / PROCESS).get("pid")
    except CheckpointError:
        return None
    return found if isinstance(found, int) and any(PROGRAM in word for word in _command(found)) else None


def is_stale(process: int) -> bool:
    """Whether the process that started a server is gone."""
    words = _command(process)
    try:
        parent = int(words[words.index("--parent-pid") + 1])
    except (ValueError, IndexError):
        return False
    return not _exists(parent)


def stop_server(path: Path, process: int, seconds: float) -> bool:
    """Send SIGTERM to a server, which then ends its round in order; SIGKILL if it writes after so many seconds.

    Args:
        path: its run directory.
        process: its id.
        seconds: how long to wait; 0 for SIGKILL at once.

    Returns:
        Whether it ended in order.
    """
    if seconds:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        if _ended(path, process, seconds):
            return True
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    _ended(path, process, 10.0)
    return False


def _ended(path: Path, process: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server_process(path) != process:
            return True
        time.sleep(0.1)
    return False


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _command(process: int) -> list[str]:
    """The command line of a process; empty if it is gone, or of another user."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []
