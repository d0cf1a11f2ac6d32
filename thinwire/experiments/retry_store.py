"""What a run keeps in order to go back: the last good state, and the list of its retries; in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thinwire.errors import CheckpointError
from thinwire.experiments.checkpoint import save_checkpoint
from thinwire.experiments.files import read_checked, with_checksum, write_atomically
from thinwire.experiments.records import ROLLED_BACK, checkpoint_file, lines_at, rounds_in
from thinwire.experiments.run_directory import RunFolder
from thinwire.runtime.job import RunState

DAMAGED = 1 << 30  # more retries than any run has


class Retry(NamedTuple):
    """One time that a run went back."""

    round: int  # the round that failed
    status: str  # `diverged`, `collapsed` or `at chance`; or `rolled back`: in a deployment, or by hand
    why: str
    from_round: int  # rounds done in the state that it went back to
    from_version: int
    lr: float  # the client learning rate from there on
    bytes_up: int  # of the abandoned rounds, with what the failed one sent
    bytes_down: int
    bytes_catchup: int
    seconds: float
    records: list[dict[str, Any]]  # of the abandoned rounds
    left_out: Sequence[int] = ()  # clients of a deployment that are left out of the next cohorts

    @property
    def halves(self) -> bool:
        """Whether the learning rate is halved from there on."""
        return self.status != ROLLED_BACK

    @property
    def bytes(self) -> int:
        """All bytes of the abandoned rounds."""
        return self.bytes_up + self.bytes_down + self.bytes_catchup

    @property
    def line(self) -> str:
        """What happened, in one line."""
        back = f"round {self.from_round}" if self.from_round else "the start"
        if self.halves:
            return f"round {self.round} {self.status}: {self.why}; back to {back} with learning rate {self.lr:.4g}"
        without = f" without clients {', '.join(map(str, self.left_out))}" if self.left_out else ""
        return f"{self.why}; back to {back}{without}"

    def as_summary(self) -> dict[str, Any]:
        """The keys of a summary."""
        kept = {key: value for key, value in self._asdict().items() if key not in ("records", "seconds")}
        if not self.left_out:
            del kept["left_out"]
        return {**kept, "bytes_abandoned": self.bytes}


class Store(Protocol):
    """Keeps the last good state of a run and the list of its retries."""

    retries: list[Retry]

    @property
    def good_round(self) -> int:
        """The round of the last good state; 0 if it is the initial one."""
        ...

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        ...

    def keep(self, state: RunState) -> None:
        """Keep a good state in place of the one before."""
        ...

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry; returns the state that it goes back to, None for the initial one."""
        ...

    def version_of(self, number: int) -> int | None:
        """The version of the state after a round, if it is stored; None if it is not."""
        ...


@dataclass
class MemoryStore:
    """The last good state in memory; states never change, so it is not copied."""

    retries: list[Retry] = field(default_factory=list)
    state: RunState | None = None

    @property
    def good_round(self) -> int:
        """The round of the last good state."""
        return self.state.round if self.state else 0

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        return self.state.server.public.version if self.state else 0

    def keep(self, state: RunState) -> None:
        """Keep a good state."""
        self.state = state

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry; returns the good state."""
        self.retries.append(retry)
        return self.state

    def version_of(self, number: int) -> int | None:
        """The version of the initial or the good state."""
        return self.good_version if number in (0, self.good_round) else None


class FolderStore:
    """The last good state in `good/` of a run directory, apart from newer checkpoints, which may be bad already."""

    def __init__(self, folder: RunFolder, device: str, before: Callable[[], None] = lambda: None) -> None:
        """Read the retries so far.

        Args:
            folder: the run directory.
            device: the device of the state that is loaded.
            before: is called before a good state is written.
        """
        self.folder, self.device, self.before = folder, device, before
        self.good = folder.path / "good"
        self.retries = read_retries(folder.path)
        folder.retries = len(self.retries)
        self._settle()

    @property
    def good_round(self) -> int:
        """The round of the last good state."""
        return max(rounds_in(self.good), default=0)

    @property
    def good_version(self) -> int:
        """The version of its public state."""
        return int(read_checked(checkpoint_file(self.good, self.good_round))["version"]) if self.good_round else 0

    def keep(self, state: RunState) -> None:
        """Write a good state, and remove the one before."""
        self.before()
        save_checkpoint(self.good, state, self.folder.config, self.folder.lines(state.round), keep=1)

    def go_back(self, retry: Retry) -> RunState | None:
        """Add a retry, remove the newer checkpoints and records; returns the good state."""
        self.retries.append(retry)
        write_retries(self.folder.path, self.retries)  # first: what follows is done again by a resumed run
        self.folder.retries = len(self.retries)
        state = self._settle()
        self.folder.forget(retry.from_round)
        return state

    def version_of(self, number: int) -> int | None:
        """The version of the initial state, or of a checkpoint."""
        if not number:
            return 0
        file = checkpoint_file(self.folder.checkpoints, number)
        return int(read_checked(file)["version"]) if file.is_file() else None

    def _settle(self) -> RunState | None:
        """Remove checkpoints of abandoned rounds; the state that the last retry started from replaces them."""
        if not self.retries:
            return None
        folder, last = self.folder.checkpoints, self.retries[-1].from_round
        for number in reversed(rounds_in(folder)):  # a checkpoint exists when its JSON exists
            file = checkpoint_file(folder, number)
            if number > last and _retries_before(file) < len(self.retries):
                file.unlink(missing_ok=True)
                file.with_suffix(".safetensors").unlink(missing_ok=True)
        if not last or max(rounds_in(folder), default=0) > last:
            return None
        if (state := self.folder.load(self.device, number=last)) is not None:
            return state
        state = self.folder.load(self.device, self.good)
        if state is None or state.round != last:
            raise CheckpointError(f"{self.good} lacks the state of round {last}; `--again` runs from the start")
        lines = lines_at(self.good, last)
        save_checkpoint(folder, state, self.folder.config, lines, self.folder.retries)
        return state


# -- on disk ---------------------------------------------------------------------------------------------------------


def write_retries(path: Path, retries: Sequence[Retry]) -> None:
    """Write the retries of a run directory."""
    write_atomically(path / "retries.json", with_checksum({"retries": [retry._asdict() for retry in retries]}))


def read_retries(path: Path) -> list[Retry]:
    """The retries of a run directory; empty if it never went back."""
    file = path / "retries.json"
    if not file.is_file():
        return []
    try:
        return [Retry(**one) for one in read_checked(file)["retries"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} holds no retries; `--again` runs from the start") from error


def _retries_before(file: Path) -> int:
    """How often a run had gone back when it wrote a checkpoint; one that is damaged is found when it is loaded."""
    try:
        return int(read_checked(file).get("retries", 0))
    except CheckpointError:
        return DAMAGED
