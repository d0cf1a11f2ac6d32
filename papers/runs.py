"""Run the runs of grids, several in parallel; finished runs are used again, killed ones are continued.

With a budget of seconds, grids are run one after the other, and of each the search, then all rows on the first seed,
then all rows on the second, and so on: a table is complete on one seed before any row has three. At the end of the
budget the runs in progress save a checkpoint; the next call continues them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.archive import Archive, Runs
from papers.grid import Grid, Line, summary, training_failed
from thinwire.cli.terminal import err
from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.runs.collapse import is_broken
from thinwire.runs.config import digest
from thinwire.runs.execute import default_folder
from thinwire.runs.jobs import SPENT, Jobs, why


def read_seconds(text: str) -> float:
    """Parse a duration such as 30m, 2h or 90s, above 0.

    >>> read_seconds("30m"), read_seconds("1.5 h"), read_seconds("90")
    (1800.0, 5400.0, 90.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?\s*", text)
    if not match or not float(match[1]) > 0:
        raise ConfigError(f"a duration is written as 30m, 2h or 90s, above 0, not {visible(text, 40)!r}")
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[match[2] or "s"]


class Progress(NamedTuple):
    """Progress of the runs of a grid, after one of them ended."""

    done: int
    todo: int
    name: str  # of the run that ended
    trouble: str  # why it did not finish, or how training failed; "" if all went well
    seconds_left: float | None  # estimated from the rounds that are left


OnRun = Callable[[Progress], None]


def print_run(progress: Progress, quiet: bool = False) -> None:
    """Print one line for a run that ended; if quiet, only for a run that failed."""
    if quiet and not progress.trouble:
        return
    left = "" if progress.seconds_left is None else f", about {progress.seconds_left:.0f} s left"
    text = f"{progress.done}/{progress.todo} {progress.name} {progress.trouble or 'done'}{left}"
    err.print(visible(text), soft_wrap=True)


def run_grids(
    grids: Sequence[Grid],
    out: Path,
    jobs: int = 1,
    data_dir: Path | None = None,
    on_run: OnRun = lambda progress: None,
    budget: float | None = None,
    archive: Archive | None = None,
) -> None:
    """Run all unfinished runs of some grids: every search first, then the lines of the tables.

    Args:
        grids: the grids; with a budget, in the order in which they are run.
        out: the folder of the run directories.
        jobs: runs at a time (`thinwire/runs/jobs.py`).
        data_dir: the folder of datasets.
        on_run: is called when a run has ended.
        budget: seconds after which no run is started and those in progress are interrupted; None for no limit.
        archive: finished runs that are not run again, though their directories are not there.
    """
    until = None if budget is None else time.time() + budget  # a wall clock: it is the same in all processes
    groups = [grids] if until is None else [[grid] for grid in grids]
    with Jobs(jobs, grids[0].device if grids else "cpu") as places:
        work = _Work(out, places, data_dir, on_run, until, Runs(out, archive or Archive()))
        for group in groups:
            work.run(group)


class _Work(NamedTuple):
    """Where runs are written, where they are made, and until when."""

    out: Path
    jobs: Jobs
    data_dir: Path | None
    on_run: OnRun
    until: float | None
    known: Runs

    def run(self, grids: Sequence[Grid]) -> None:
        """The searches of some grids, then the lines of their tables."""
        tried: set[str] = set()
        while not self.spent and (
            todo := set(self.unfinished(trials := [line for grid in grids for line in grid.trials(self.known)])) - tried
        ):
            tried |= todo  # what they find may call for values beyond an edge
            likely = self.unfinished(self.final(grids))  # about as many rounds as the final lines
            self.run_lines(trials, later=sum(e.rounds for e in likely.values()))
        before: set[str] = set()
        while not self.spent and (todo := set(self.unfinished(lines := self.final(grids))) - before):
            before |= todo  # a run that failed changes which lines are final
            self.run_lines(lines)

    def final(self, grids: Sequence[Grid]) -> list[Line]:
        """The lines of the tables, by what the searches found so far."""
        return [line for grid in grids for line in grid.final(self.known)]

    @property
    def spent(self) -> bool:
        """Whether the budget is over."""
        return self.until is not None and time.time() >= self.until

    def unfinished(self, lines: Sequence[Line]) -> dict[str, Settings]:
        """Runs to start or continue, by digest; a run that failed would fail again. With a budget, seed by seed."""
        runs = [(place, e) for line in lines for place, e in enumerate(line.runs)]
        if self.until is not None:
            runs.sort(key=lambda one: one[0])
        return {digest(e): e for _, e in runs if not summary(e, self.known) and not training_failed(e, self.known)}

    def run_lines(self, lines: Sequence[Line], later: int = 0) -> None:
        """Run the unfinished runs of some lines; `later` is the number of rounds after them, for the estimated time."""
        todo = self.unfinished(lines)
        began, total = time.perf_counter(), later + sum(e.rounds for e in todo.values())
        done = rounds = 0

        def report(experiment: Settings, trouble: str) -> None:
            nonlocal done, rounds
            done, rounds = done + 1, rounds + experiment.rounds
            left = (time.perf_counter() - began) * (total - rounds) / rounds
            self.on_run(Progress(done, len(todo), default_folder(experiment, self.out).name, trouble, left))

        how: dict[str, Any] = {"data_dir": self.data_dir, "until": self.until}
        for experiment, error in self.jobs.results(todo.values(), self.out, **how):
            if str(error) != SPENT or default_folder(experiment, self.out).exists():  # of those that have begun
                report(experiment, self.trouble(experiment, error))

    def trouble(self, experiment: Settings, error: Exception | None) -> str:
        """Why a run did not finish or how training failed; "" if all went well."""
        if error:
            return why(error)
        found = self.known.recorded(experiment).summary or {}
        return f"{found['status']}: {found['status_why']}" if is_broken(found) else ""
