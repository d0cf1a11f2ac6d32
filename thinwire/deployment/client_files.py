"""Where a node stores the states of its clients: files, or the context that Flower keeps for a node.

The files of a run are in a folder of `state-dir` with the name of the run; only their owner may read them. When a run
begins, the folders of past runs are removed (`clean_states`).
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from thinwire.deployment.private_files import private, private_folder
from thinwire.errors import CheckpointError, ConfigError, WireError
from thinwire.experiments.files import write_atomically
from thinwire.flower.client import Client
from thinwire.flower.client_store import ClientStore

KEEP_RUNS, KEEP_DAYS = 10, 90  # of past runs
_RUN = re.compile("[0-9a-f]{16}")  # the name of a run


class ClientFile:
    """Storage of one client's state: a file, or the context that Flower stores for a node."""

    def __init__(self, context: Any, number: int, file: Path | None) -> None:
        self.context, self.name, self.file = context, f"client-{number}", file

    def load(self, client: Client) -> ClientStore | None:
        """The stored state; None if there is none or it is damaged: then the client requests the full state."""
        try:
            if self.file:
                return ClientStore.load(self.file.read_bytes(), client.first) if self.file.is_file() else None
            record = self.context.state.get(self.name)
            return ClientStore.load(record["kept"], client.first) if record else None
        except CheckpointError:
            return None

    def save(self, state: bytes) -> None:
        """Store the state; called before the upload is sent."""
        if self.file:
            write_atomically(self.file, state)
        else:
            from flwr.app import ConfigRecord

            self.context.state[self.name] = ConfigRecord({"kept": state})


@contextmanager
def client_file(context: Any, run: str, number: int) -> Iterator[ClientFile]:
    """The storage of a client, locked while it is used."""
    folder = context.node_config.get("state-dir")
    if not folder:
        yield ClientFile(context, number, None)
        return
    if not _RUN.fullmatch(run):  # it is used as the name of a folder
        raise WireError(f"the name of the run must be 16 hexadecimal digits, not {run[:40]!r}")
    states = Path(str(folder)) / run
    if not states.is_dir():
        private_folder(states)
        clean_states(states, _number(context, "keep-runs", KEEP_RUNS), _number(context, "keep-days", KEEP_DAYS))
    with private(), _locked(states / f"client-{number}.lock"):
        yield ClientFile(context, number, states / f"client-{number}.kept")


def clean_states(current: Path, runs: int = KEEP_RUNS, days: int = KEEP_DAYS) -> list[Path]:
    """Remove the states of past runs; returns the folders that were removed.

    Args:
        current: the folder of the run that begins, which is never removed.
        runs: number of past runs whose states are kept, the newest ones.
        days: states that no message has changed for so many days are removed too.

    A client of a removed run that is resumed nevertheless requests the full state. Folders whose names are not those
    of runs, and those of runs that are just training, are not touched.
    """
    past = [one for one in current.parent.iterdir() if one.is_dir() and _RUN.fullmatch(one.name) and one != current]
    changed = {one: _changed(one) for one in past}
    newest = sorted(past, key=lambda one: changed[one], reverse=True)
    oldest = time.time() - days * 86_400
    removed = [one for i, one in enumerate(newest) if i >= runs or changed[one] < oldest]
    return [one for one in removed if _remove(one)]


def _changed(states: Path) -> float:
    """When a folder or a file in it changed last; a folder that another process has just removed counts as new."""
    try:
        return max(file.stat().st_mtime for file in (states, *states.iterdir()))
    except OSError:
        return math.inf


def _remove(states: Path) -> bool:
    """Remove the folder of a run, unless one of its clients is training."""
    with ExitStack() as locks:
        try:
            for lock in states.glob("client-*.lock"):
                locks.enter_context(_locked(lock, wait=False))
        except BlockingIOError:
            return False
        shutil.rmtree(states, ignore_errors=True)
    return True


def _number(context: Any, key: str, default: int) -> int:
    value = context.node_config.get(key, default)
    if type(value) is not int or value < 0:
        raise ConfigError(f"{key} of --node-config must be a number from 0, not {value!r}")
    return value


@contextmanager
def _locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Lock a file; a repeated request waits for the first."""
    with file.open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        yield
