"""The model of the best round: in memory, and on disk beside every state that a run may continue from.

    best/round-000012.safetensors   the best model as of a checkpoint; best/round-000012.json has its SHA-256
    best.safetensors                the best model of a finished run, with its round in the header

A run that is resumed or goes back continues after a checkpoint or the last good state. So before one of these is
written, the best model until then is: the best model of a run that was killed is that of an uninterrupted run.

Which round of a run is the best so far, and how many evaluations ago: for early stopping and the best model.

    without validation examples   by the objective of the run, on the test set
    with them                     by the clients' validation accuracy, or by their validation loss if the objective is
                                  not accuracy: the test set then has no part in the choice

>>> curve = [{"round": i, "accuracy": a, "test_loss": 1.0} for i, a in ((1, 0.3), (2, 0.5), (3, 0.4))]
>>> lead = Lead(Objective()).along(curve)
>>> lead.round, lead.value, lead.since
(2, 0.5, 1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load, save

from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.experiments.files import read_checked, with_checksum, write_atomically
from thinwire.experiments.records import checkpoint_file, rounds_in
from thinwire.metrics.objective import Objective
from thinwire.runtime.job import Job, RoundRecord


class BestModel:
    """The weights and buffers of the best round so far.

    Args:
        objective: what rounds are compared by.
        path: the run directory; None to keep the model in memory only.
    """

    def __init__(self, objective: Objective, path: Path | None = None) -> None:
        self.lead = Lead(objective)
        self.path = path
        self.kept: dict[int, Tree] = {}  # by round: the best one, and the best one of the last good state

    @property
    def weights(self) -> Tree | None:
        """The best model; None before the first evaluation."""
        return self.kept.get(self.lead.round)

    def go_back(self, records: Sequence[RoundRecord]) -> None:
        """Continue after these records; models of later rounds are removed, since those rounds may differ this time."""
        self.lead = Lead(self.lead.objective).along(record._asdict() for record in records)
        self.kept = {number: model for number, model in self.kept.items() if number <= len(records)}
        self._remove(number for number in self._on_disk() if number > len(records))
        if self.lead.round and self.lead.round not in self.kept:
            self.kept[self.lead.round] = self._read(self.lead.round)

    def after(self, records: Sequence[RoundRecord], weights: Callable[[], Tree], points: Iterable[int] = ()) -> None:
        """Add the last record; its model is kept if it is the best so far.

        Args:
            records: the records so far.
            weights: makes the model of the last one.
            points: the rounds after which the run may continue without reading the disk.
        """
        last = records[-1]
        self.lead = self.lead.after(last._asdict())
        if self.lead.round == last.round:
            needed = self._needed(records, points)
            self.kept = {number: model for number, model in self.kept.items() if number in needed}
            self.kept[last.round] = weights()

    def write(self) -> None:
        """Write the best model of an unfinished run, unless it is on disk."""
        if self.path is None or self.weights is None or (file := self._file(self.lead.round)).is_file():
            return
        data = self.as_bytes()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file.with_suffix(".safetensors"), data)
        note = {"round": self.lead.round, "sha256": hashlib.sha256(data).hexdigest()}
        write_atomically(file, with_checksum(note))

    def prune(self, records: Sequence[RoundRecord], points: Iterable[int]) -> None:
        """Remove the models that no state on disk needs.

        Args:
            records: the records so far.
            points: the rounds after which the run may continue.
        """
        needed = {self.lead.round, *self._needed(records, points)}
        self._remove(number for number in self._on_disk() if number not in needed)

    def _needed(self, records: Sequence[RoundRecord], points: Iterable[int]) -> set[int]:
        """The best round as of each of these rounds."""
        start = Lead(self.lead.objective)
        return {start.along(record._asdict() for record in records[:number]).round for number in points}

    def as_bytes(self) -> bytes:
        """The best model as the contents of a file."""
        blocks = {name: block.detach().cpu().contiguous().clone() for name, block in (self.weights or {}).items()}
        # one key: the order of several is random, and the bytes with it
        return bytes(save(blocks, metadata={"round": str(self.lead.round)}))

    def _on_disk(self) -> list[int]:
        return [] if self.path is None else rounds_in(self.path / "best")

    def _remove(self, rounds: Iterable[int]) -> None:
        for number in rounds:
            self._file(number).unlink(missing_ok=True)
            self._file(number).with_suffix(".safetensors").unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        assert self.path is not None
        return checkpoint_file(self.path / "best", number)

    def _read(self, number: int) -> Tree:
        """The model of an earlier round from disk."""
        if self.path is None:
            raise CheckpointError(f"the best model, of round {number}, was not kept")
        file = self._file(number)
        if file.is_file():
            sha256, tensors = read_checked(file)["sha256"], file.with_suffix(".safetensors")
            data = tensors.read_bytes() if tensors.is_file() else b""
            if hashlib.sha256(data).hexdigest() != sha256:
                raise CheckpointError(f"{tensors} is damaged: its SHA-256 is not the one in {file}; run it again")
            return dict(load(data))
        raise CheckpointError(f"{file.parent} lacks the best model, of round {number}; run it again")


@dataclass(frozen=True)
class ValidationObjective(Objective):
    """The accuracy or the loss of clients on their validation examples, averaged over clients.

    >>> record = {"accuracy": 0.9, "client_accuracy": 0.8, "client_loss": 0.5}
    >>> ValidationObjective().value(record), ValidationObjective("loss", False).value(record)
    (0.8, 0.5)
    """

    @property
    def label(self) -> str:
        """Its name in tables and on axes."""
        return f"validation {self.name}"

    def value(self, record: Mapping[str, Any]) -> float | None:
        """Its value in a record; None in rounds without evaluation."""
        own = {"accuracy": record.get("client_accuracy"), "test_loss": record.get("client_loss")}
        return super().value(own)


def selected_by(job: Job) -> Objective:
    """What the best round of a run is chosen by."""
    if job.task.client_tests is None:
        return job.ranked_by
    return by_validation(job.ranked_by)


def by_validation(objective: Objective) -> Objective:
    """What the best round of a run with validation examples is chosen by."""
    return ValidationObjective() if objective.name == "accuracy" else ValidationObjective("loss", False)


class Lead(NamedTuple):
    """The best round so far.

    Args:
        objective: what rounds are compared by.
        value: the best value; None if there is none yet.
        round: the first round that has it; 0 if there is none yet.
        since: the number of evaluations after it.
    """

    objective: Objective
    value: float | None = None
    round: int = 0
    since: int = 0

    def after(self, record: Mapping[str, Any]) -> Lead:
        """The best round after one more record; a value that is not finite is no improvement."""
        value = self.objective.value(record)
        if self.objective.better(value, self.value):
            return Lead(self.objective, value, record["round"])
        evaluated = any(record.get(key) is not None for key in ("test_loss", "client_accuracy", "client_loss"))
        return self._replace(since=self.since + 1) if evaluated else self

    def along(self, records: Iterable[Mapping[str, Any]]) -> Lead:
        """The best round after several records."""
        lead = self
        for record in records:
            lead = lead.after(record)
        return lead
