"""Going back: a deployment to the state before a round that clients destroyed, or any run by hand.

A deployment whose next state is not fit (`Unfit`) goes back to the checkpoint before the round in which clients were
far off, and leaves these clients out for some rounds. `thinwire resume --from` goes back by hand (`roll_back`). Clients
go back to their own states of that round; those of a deployment that are ahead of the server receive the whole state.

Abandoned rounds are left out of the records; their bytes are in `bytes_abandoned` of the record that follows, so that
sums over records are what was sent. `retries.json` lists the times. A process that is killed at any moment and resumed
goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.files import locked, read_checked
from thinwire.runs.records import rounds_in
from thinwire.runs.run_directory import RETRIES, RunFolder

MAX_ROLLBACKS = 20
ROLLED_BACK = "rolled back"


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `rolled back`; of runs of earlier versions also `diverged`, `collapsed` or `at chance`
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate there
    bytes_abandoned: int  # of the abandoned rounds, with what the failed one sent
    left_out: Sequence[int] = ()  # clients of a deployment that are left out of the next cohorts


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / RETRIES
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} holds no retries that this version reads; `--overwrite` runs from the start"
        ) from error


def bytes_of(records: Iterable[Mapping[str, Any]]) -> int:
    """The bytes that were sent in some rounds."""
    return sum(one[f"bytes_{way}"] for one in records for way in ("up", "down", "catchup"))


def roll_back(path: Path, number: int) -> Retry:
    """Go back to the checkpoint of a round; nothing is changed if there is none. A finished run is unfinished again.

    Args:
        path: the run directory.
        number: the round; 0 for the start.
    """
    folder = RunFolder.open(path)
    with locked(path):
        newest, rounds = folder.load("cpu"), rounds_in(folder.checkpoints)
        if number not in (0, *rounds):
            listed = ", ".join(map(str, rounds[:10])) or "none"
            raise CheckpointError(
                f"{path} has no checkpoint of round {number}; it has {listed}: name one of them, and keep more of them "
                "with --set checkpoint.keep=20"
            )
        if newest is None or number == newest.state.round:
            raise CheckpointError(f"{path} is at round {number}, there is nothing to go back from")
        if folder.table.get("method", {}).get("privacy", {}).get("kind", "none") != "none":
            raise ConfigError(f"{path} has differential privacy, which rounds that are given up spend, too")
        start = folder.load("cpu", number) if number else None
        retries, version = read_retries(path), start.state.server.public.version if start else 0
        records = newest.lines
        lost, lr = bytes_of(records[number:]), records[number].get("lr") or 0.0
        retries.append(Retry(len(records), ROLLED_BACK, "rolled back by hand", number, version, lr, lost))
        folder.clear_results()
        folder.go_back(number, retries)
        folder.rewind(start, len(retries))
    return retries[-1]
