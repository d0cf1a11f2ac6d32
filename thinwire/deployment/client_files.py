"""Where a node stores the states of its clients: files, or the context that Flower keeps for a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinwire.errors import CheckpointError, WireError
from thinwire.experiments.files import write_atomically
from thinwire.flower.client import Client
from thinwire.flower.client_store import ClientStore


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
    if not re.fullmatch(r"[0-9a-f]{16}", run):  # it is used as the name of a folder
        raise WireError(f"the name of the run must be 16 hexadecimal digits, not {run[:40]!r}")
    states = Path(str(folder)) / run
    states.mkdir(parents=True, exist_ok=True)
    with (states / f"client-{number}.lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # a repeated request waits for the first
        except ImportError:
            pass
        yield ClientFile(context, number, states / f"client-{number}.kept")
