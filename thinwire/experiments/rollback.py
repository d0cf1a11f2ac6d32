"""Go back to a checkpoint by hand: what `thinwire rollback` does.

Rounds after it are given up: their records move to `retries.json`, and their bytes count as `bytes_abandoned` in the
record that follows. A finished run is no longer finished. Clients of a deployment that are ahead of the server receive
the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import CheckpointError, ConfigError
from thinwire.experiments.records import BEST, ROLLED_BACK, SUMS, rounds_in
from thinwire.experiments.retry import Retry, Store
from thinwire.experiments.run_directory import RunFolder


class RolledBack(NamedTuple):
    """What going back did: the round that the run is at, rounds and bytes that were given up, clients left out."""

    round: int
    abandoned: int
    bytes: int
    left_out: tuple[int, ...]


def roll_back(path: Path, number: int, left_out: Sequence[int] = ()) -> RolledBack:
    """Go back to the checkpoint of a round; nothing is changed if there is none.

    Args:
        path: the run directory.
        number: the round; 0 for the start.
        left_out: clients of a deployment that are left out of the next cohorts.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        _check(folder, number, left_out)
        for name in ("summary.json", SUMS, "model.safetensors", BEST, "diverged.json"):  # no longer finished
            (path / name).unlink(missing_ok=True)
        store = Store(folder)
        records = folder.rewind(rounds_in(folder.checkpoints)[-1])
        lr = (records[number].lr if number < len(records) else None) or 0.0
        what, back = (len(records), ROLLED_BACK, "rolled back by hand"), (number, store.version(number) or 0, lr)
        retry = Retry.of(what, back, records, left_out=left_out)
        store.go_back(retry)
    return RolledBack(number, len(retry.records), retry.bytes, tuple(retry.left_out))


def _check(folder: RunFolder, number: int, left_out: Sequence[int]) -> None:
    """Raise an error for a round without a checkpoint, and for clients that cannot be left out."""
    rounds = rounds_in(folder.checkpoints)
    if not rounds:
        raise CheckpointError(f"{folder.path} has no checkpoint to go back to")
    if number != 0 and number not in rounds:
        listed = ", ".join(map(str, rounds[:10]))
        raise CheckpointError(
            f"{folder.path} has no checkpoint of round {number}; it has {listed}: name one of them, and keep more of "
            "them with --set checkpoint.keep=20"
        )
    if number == rounds[-1] and not left_out:
        raise CheckpointError(f"{folder.path} is at round {number}, there is nothing to go back from")
    if folder.table.get("method", {}).get("privacy", {}).get("kind", "none") != "none":
        raise ConfigError(f"{folder.path} has differential privacy, which rounds that are given up spend, too")
    clients = folder.table.get("task", {}).get("clients", 0)
    if left_out and not (folder.path / "deployment.json").is_file():
        raise ConfigError(f"{folder.path} was not deployed: clients of a simulation cannot be left out")
    if wrong := [one for one in left_out if not 0 <= one < clients]:
        raise ConfigError(f"there is no client {wrong[0]} to leave out; clients are 0 to {clients - 1}")
