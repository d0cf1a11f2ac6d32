"""The confirming run of a search: what it recommends is run in full, beside the setting that the search started from.

    recommended   the result of the search, if its full run did not fail and the start setting is not better
                  else the start setting, if its full run did not fail
                  else nothing

Both runs have the seed and the validation examples of the search, so that a run of the last rung is used again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from thinwire.core.units import human_bytes, percent
from thinwire.experiments.successive_halving import Measure, Measured, Trial, ranked
from thinwire.experiments.trials import Spent


class Confirmation(NamedTuple):
    """The full runs after a search.

    Args:
        value: what is recommended; None if neither run trains.
        rounds: of each run.
        found: the run of the result of the search; None if the budget ended it.
        start: the run of the start setting; None if the budget ended it, and if both are the same.
        is_start: whether the start setting is recommended.
        lost: bytes of a run that the budget ended.
    """

    value: Any
    rounds: int
    found: Measured | None
    start: Measured | None = None
    is_start: bool = False
    lost: int = 0

    @property
    def text(self) -> str:
        """The outcome in one sentence."""
        over = f"over {self.rounds} rounds"
        if self.found is None:
            return f"not confirmed {over}: the budget was spent before"
        found = outcome(self.found)
        if self.start is None:
            other = "which is the start setting" if self.is_start else "the start setting was not run: no budget left"
            verb = "confirmed" if self.value is not None else "not confirmed"
            return f"{verb} {over}: {found}, {other}"
        both = f"{over}: {found}, the start setting {outcome(self.start)}"
        if self.value is None:
            return f"neither trains {both}"
        if not self.is_start:
            return f"confirmed {both}"
        failed = self.found.status != "finished"
        return f"{'the result fails' if failed else 'the result is worse than the start setting'} {both}"


def outcome(measured: Measured) -> str:
    """The criterion of a run and its bytes, or how it failed.

    >>> outcome(Measured(0.9, 0.3, 10, 5)), outcome(Measured(None, 0.25, 10, 5, by="loss"))
    ('90.00 % (10 B)', 'loss 0.25 (10 B)')
    >>> outcome(Measured(0.1, 2.3, 10, 5, "at chance"))
    'at chance'
    """
    if measured.status != "finished":
        return "at chance" if measured.status == "at chance so far" else measured.status
    value = f"loss {measured.loss:.4g}" if measured.by == "loss" else percent(measured.accuracy)
    return f"{value} ({human_bytes(measured.bytes)})"


def confirm(measure: Measure, found: Any, start: Any, rounds: int) -> Confirmation:
    """Run the result of a search and the start setting in full.

    Args:
        measure: runs a candidate for a number of rounds.
        found: the result of the search.
        start: the start setting.
        rounds: of the whole run.

    >>> def measure(value, rounds):  # 2 was the best of shorter runs
    ...     return Measured({1: 0.9, 2: 0.8}[value], 0.5, bytes=10, rounds=rounds)
    >>> print(confirm(measure, 2, 1, 60).text)
    the result is worse than the start setting over 60 rounds: 80.00 % (10 B), the start setting 90.00 % (10 B)
    """
    try:
        result = measure(found, rounds)
    except Spent as error:
        return Confirmation(found, rounds, None, is_start=found == start, lost=error.lost)
    works = result.status == "finished"
    if found == start:
        return Confirmation(found if works else None, rounds, result, is_start=True)
    try:
        before = measure(start, rounds)
    except Spent as error:
        return Confirmation(found if works else None, rounds, result, lost=error.lost)
    fit = [trial for trial in (Trial(found, result), Trial(start, before)) if trial.measured.status == "finished"]
    if not fit:
        return Confirmation(None, rounds, result, before)
    best = ranked(fit)[0].value
    return Confirmation(best, rounds, result, before, is_start=best == start)
