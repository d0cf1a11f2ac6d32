"""Which round of a run is the best so far, and how many evaluations ago: for early stopping and the best model.

    without validation examples   by the objective of the run, on the test set
    with them                     by the objective on these, averaged over clients: the test set then has no part in
                                  the choice

>>> curve = [{"round": i, "accuracy": a, "test_loss": 1.0} for i, a in ((1, 0.3), (2, 0.5), (3, 0.4))]
>>> lead = Lead(Objective()).along(curve)
>>> lead.round, lead.value, lead.since
(2, 0.5, 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from thinwire.metrics.objective import Objective


@dataclass(frozen=True)
class ValidationObjective(Objective):
    """An objective of clients on their validation examples, averaged over clients.

    >>> record = {"accuracy": 0.9, "client_accuracy": 0.8, "client_loss": 0.5}
    >>> ValidationObjective().value(record), ValidationObjective("loss", False).value(record)
    (0.8, 0.5)
    """

    @property
    def label(self) -> str:
        """Its name in tables and on axes."""
        return f"validation {self.name}"

    @property
    def key(self) -> str:
        """Where records have its value."""
        return self.validation_key


def selected_by(objective: Objective, validated: bool) -> Objective:
    """What the best round of a run is chosen by.

    Args:
        objective: the objective of the run.
        validated: whether clients have validation examples.
    """
    return ValidationObjective(objective.name, objective.higher_is_better) if validated else objective


def recorded_objective(summary: Mapping[str, Any] | None) -> Objective | None:
    """The objective in a summary, which may come from a damaged file; None if it has none."""
    entry = (summary or {}).get("objective")
    if isinstance(entry, dict) and isinstance(name := entry.get("name"), str) and name:
        return Objective(name, entry.get("higher_is_better") is not False)
    return None


def is_improving(objective: Objective, records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the mean of the last fifth of the evaluations is a point, or 1 %, better than that of the fifth before.

    >>> is_improving(Objective(), [{"accuracy": i / 20} for i in range(20)])
    True
    >>> is_improving(Objective(), [{"accuracy": 0.9}] * 20)
    False
    """
    values = [value for one in records if (value := objective.value(one)) is not None]
    n = len(values) // 5
    if not n:
        return False
    now, before = fmean(values[-n:]), fmean(values[-2 * n : -n])
    enough = 0.01 if objective.name == "accuracy" else 0.01 * abs(before)
    return objective.better(now, before) and abs(now - before) > enough


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
