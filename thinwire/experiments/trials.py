"""Runs of a search, each in its own directory: finished ones are used again, and all together have a byte budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import Diverged
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.records import Record, read_run
from thinwire.experiments.run_directory import RunFolder
from thinwire.runtime.job import RoundRecord


class Spent(Exception):
    """The byte budget is used up; `lost` and `rounds` are the bytes and the rounds of the run that was ended."""

    def __init__(self, lost: int, rounds: int = 0) -> None:
        super().__init__(lost, rounds)
        self.lost, self.rounds = lost, rounds


class Ran(NamedTuple):
    """A finished run of a search; one that diverged has the totals until then."""

    path: Path
    summary: dict[str, Any]

    @property
    def bytes(self) -> int:
        """The bytes of all its messages."""
        return int(self.summary["bytes_total_honest"])

    @property
    def rounds(self) -> int:
        """The rounds that it trained."""
        return int(self.summary["rounds"])

    def records(self) -> list[Record]:
        """Its records, one a round."""
        return read_run(self.path).records


class Trials:
    """Runs the experiments of a search.

    Args:
        out: the folder of the run directories.
        data_dir: the folder of datasets.
        budget: bytes that all runs together may send; None for no limit.
    """

    def __init__(self, out: Path, data_dir: Path | None = None, budget: int | None = None) -> None:
        self.out, self.data_dir, self.budget, self.spent = out, data_dir, budget, 0

    def run(self, experiment: Experiment) -> Ran:
        """Run an experiment, or continue it, or read it if it is finished; raises `Spent` if the budget ends it."""
        sent = 0

        def watch(record: RoundRecord) -> None:
            nonlocal sent
            sent += record.bytes_up + record.bytes_down + record.bytes_catchup
            self._within(sent, record.round)

        path = default_folder(experiment, self.out)
        try:
            summary = execute(experiment, path, data_dir=self.data_dir, resume=True, on_round=watch)
        except Diverged:
            summary = RunFolder(path, experiment).summary() or {}
        ran = Ran(path, summary)
        self._within(ran.bytes, ran.rounds)
        self.spent += ran.bytes
        return ran

    def _within(self, sent: int, rounds: int) -> None:
        if self.budget is not None and self.spent + sent > self.budget:
            raise Spent(sent, rounds)
