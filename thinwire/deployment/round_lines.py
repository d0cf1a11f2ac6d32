"""The lines of rounds in `server.log` and `flwr log`: one a round, for an operator."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.core.units import human_seconds
from thinwire.experiments.config import Experiment
from thinwire.experiments.progress import RunningTotals
from thinwire.runtime.job import RoundRecord


class RoundLines:
    """Writes a line after each round; rounds of an earlier process are counted, but not written again.

    Args:
        experiment: the experiment.
        log: receives the lines.
    """

    def __init__(self, experiment: Experiment, log: Callable[[str], None]) -> None:
        self.rounds, self.log = experiment.rounds, log
        self.totals = RunningTotals(experiment.accounting)
        self.earlier = 0  # rounds of earlier processes that were not shown yet
        self.last = 0  # the newest round

    def start_after(self, done: int) -> None:
        """Note how many rounds are done already."""
        self.earlier = self.last = done
        what = f"resumed after round {done} of {self.rounds}" if done else f"started, {self.rounds} rounds"
        self.log(f"{what}; waiting for clients")

    def after(self, record: RoundRecord) -> bool:
        """Write the line of a round, unless an earlier process trained it; returns whether it was written."""
        text = self.totals.text(record)
        if self.earlier:
            self.earlier -= 1
            return False
        self.last = record.round
        self.log(f"round {record.round}/{self.rounds}  {text}  {outcome(record)}  {human_seconds(record.seconds)}")
        if record.alarm:
            self.log(f"round {record.round}/{self.rounds}  {record.alarm}")
        return True

    def stopped(self) -> str:
        """Write that the server was stopped; returns the line."""
        line = f"stopped by SIGTERM after round {self.last} of {self.rounds}; the same command continues the run"
        self.log(line)
        return line


def outcome(record: RoundRecord) -> str:
    """How many clients were accepted, and how many were not.

    >>> outcome(RoundRecord(3, 0.1, 0.9, 0.2, 10, 10, 0, 2, 0.1, refused=1, absent=2))
    '2 clients, 1 refused, 2 absent'
    """
    counts = record._asdict()
    others = (f"{counts[name]} {name}" for name in ("refused", "bounded", "absent", "late") if counts.get(name))
    return ", ".join((f"{record.clients} clients", *others))
