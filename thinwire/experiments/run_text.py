"""A run for readers: four lines, a table of HTML for notebooks, and a pandas frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.frames import data_frame
from thinwire.core.text import html_text, human_bytes, visible
from thinwire.metrics.objective import Objective
from thinwire.runtime.job import RoundRecord


class Facts(NamedTuple):
    """What is told about a run.

    Args:
        summary: its totals.
        records: one record a round.
        planned: the number of rounds in its configuration.
        objective: what runs are ranked by.
        best: the best record, and what it was chosen by.
        path: its directory, if there is one.
    """

    summary: Mapping[str, Any]
    records: Sequence[RoundRecord]
    planned: int
    objective: Objective
    best: tuple[RoundRecord | None, Objective]
    path: Path | None = None

    def lines(self) -> list[tuple[str, str]]:
        """At most four pairs of a name and its value.

        >>> record = RoundRecord(1, 0.5, 0.9, 0.4, 1000, 1000, 0, 1, 0.1)
        >>> totals = {"method": "mapo", "task": "digits", "ended_by": "patience"}
        >>> for line in Facts(totals, [record], 20, Objective(), (record, Objective())).lines():
        ...     print(*line)
        mapo on digits 1 of 20 rounds, ended by patience
        test accuracy 90.00 % (best 90.00 % in round 1); training loss 0.5000
        sent 2 kB: 1 kB up, 1 kB down, 0 B catch-up
        """
        found = self.summary
        status = found.get("status", "finished")
        why = (
            f"{status}: {found.get('status_why', '')}"
            if status != "finished"
            else f"ended by {found.get('ended_by', '-')}"
        )
        head = f"{found.get('method', 'run')} on {found.get('task', 'a task')}"
        lines = [(head, f"{len(self.records)} of {self.planned} rounds, {why}")]
        if self.records:
            lines.append((self.objective.label, f"{self._quality()}; training loss {self.records[-1].loss:.4f}"))
        sizes = [sum(getattr(record, f"bytes_{way}") for record in self.records) for way in ("up", "down", "catchup")]
        lost = found.get("bytes_abandoned", 0)
        parts = [f"{human_bytes(size)} {way}" for size, way in zip(sizes, ("up", "down", "catch-up"), strict=True)]
        parts += [f"{human_bytes(lost)} abandoned"] if lost else []
        lines.append(("sent", f"{human_bytes(sum(sizes) + lost)}: {', '.join(parts)}"))
        return [*lines, *([("directory", str(self.path))] if self.path else [])]

    def _quality(self) -> str:
        """The last value of the objective, and the best round."""
        values = [self.objective.value(record._asdict()) for record in self.records]
        final = next((value for value in reversed(values) if value is not None), None)
        best, by = self.best
        if best is None:
            return self.objective.text(final)
        value = self.objective.text(self.objective.value(best._asdict()))
        if by != self.objective:
            return f"{self.objective.text(final)}; {value} in round {best.round}, the best by {by.label}"
        return f"{self.objective.text(final)} (best {value} in round {best.round})"


def as_text(facts: Facts) -> str:
    """At most four lines."""
    (head, first), *rest = facts.lines()
    return visible(f"Run {head}: {first}", 300) + "".join(
        f"\n  {visible(f'{key} {value}', 300)}" for key, value in rest
    )


def as_html(facts: Facts) -> str:
    """A small table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{html_text(key)}</th><td style='text-align:left'>{html_text(value)}</td></tr>"
        for key, value in facts.lines()
    )
    return f"<table>{rows}</table>"


def as_frame(records: Sequence[RoundRecord]) -> Any:
    """A `pandas.DataFrame` with one row a round.

    A metric is a column of its name; a value over clients is one of its name after `clients_`.
    """
    rows = []
    for record in records:
        row = record._asdict()
        metrics, clients = row.pop("metrics"), row.pop("clients_eval")
        del row["sites_eval"], row["layers"]  # not numbers of the whole round
        rows.append({**row, **metrics, **{f"clients_{key}": value for key, value in (clients or {}).items()}})
    return data_frame(rows).set_index("round")
