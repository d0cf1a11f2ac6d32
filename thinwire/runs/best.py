"""The best round of a run, and its model: in memory, in every checkpoint, and at the end in `best.safetensors`.

A run that is resumed or goes back continues after a checkpoint, which holds the best model until then: the best model
of a run that was killed is that of an uninterrupted run.

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.tree import Tree
from thinwire.errors import CheckpointError
from thinwire.federation.job import Job, RoundRecord
from thinwire.metrics.objective import Objective
from thinwire.runs.checkpoint import load_best, tensor_bytes


class BestModel:
    """The weights and buffers of the best round so far.

    Args:
        objective: what rounds are compared by.
        checkpoints: the folder of checkpoints; None to keep the model in memory only.
    """

    def __init__(self, objective: Objective, checkpoints: Path | None = None) -> None:
        self.lead = Lead(objective)
        self.checkpoints = checkpoints
        self.kept: dict[int, Tree] = {}  # by round: the best one, and the best one of the last good state

    @property
    def weights(self) -> Tree | None:
        """The best model; None before the first evaluation."""
        return self.kept.get(self.lead.round)

    def go_back(self, records: Sequence[RoundRecord]) -> None:
        """Continue after these records; models of later rounds are dropped, since those rounds may differ this time."""
        self.lead = Lead(self.lead.objective).along(record._asdict() for record in records)
        self.kept = {number: model for number, model in self.kept.items() if number <= len(records)}
        if self.lead.round and self.lead.round not in self.kept:
            found = load_best(self.checkpoints, len(records)) if self.checkpoints else None
            if not found:
                raise CheckpointError(f"the best model, of round {self.lead.round}, was not kept; run it again")
            self.kept[self.lead.round] = found

    def after(self, record: RoundRecord, weights: Callable[[], Tree], good: int = 0) -> None:
        """Add a record; its model is kept if it is the best so far.

        Args:
            record: the record.
            weights: makes its model.
            good: the round of a state to which the run may go back without reading the disk.
        """
        self.lead = self.lead.after(record._asdict())
        if self.lead.round == record.round:
            needed = max((number for number in self.kept if number <= good), default=0)
            self.kept = {number: model for number, model in self.kept.items() if number == needed}
            self.kept[record.round] = weights()

    def as_bytes(self) -> bytes:
        """The best model as the contents of a file."""
        return tensor_bytes(self.weights or {}, round=str(self.lead.round))


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


def recorded_objective(summary: Mapping[str, Any] | None) -> Objective | None:
    """The objective in a summary, which may come from a damaged file; None if it has none."""
    entry = (summary or {}).get("objective")
    if isinstance(entry, dict) and isinstance(name := entry.get("name"), str) and name:
        return Objective(name, entry.get("higher_is_better") is not False)
    return None


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
