"""Progress, warnings and errors on the terminal: a progress bar in a terminal, plain lines in a file or pipe.

Names and paths are printed literally: brackets are not markup, and control characters are escaped.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from thinwire.core.text import visible
from thinwire.core.units import human_bytes

if TYPE_CHECKING:
    from thinwire.experiments.grid import Progress
    from thinwire.runtime.job import RoundRecord

FILE_WIDTH = 160  # columns of output to a file or pipe; rich would assume 80 and truncate tables


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


out, err = _console(), _console(stderr=True)


@contextmanager
def progress(
    label: str, rounds: int, quiet: bool = False, accounting: str = "honest"
) -> Iterator[Callable[[RoundRecord], None]]:
    """Show the progress of a run; yields a function to call after each round.

    Args:
        label: name of the run.
        rounds: number of rounds.
        quiet: show nothing.
        accounting: whether the bytes shown include catch-up downloads (`honest`) or not (`ideal`).
    """
    label = visible(label, 200)
    if quiet:
        yield lambda record: None
    elif err.is_terminal:
        with _bar(label, rounds, _Totals(accounting)) as on_round:
            yield on_round
    else:
        yield _lines(label, rounds, _Totals(accounting))


class _Totals:
    """Bytes so far and the newest accuracy, R2 or test loss, as text."""

    def __init__(self, accounting: str) -> None:
        self.accounting, self.bytes = accounting, 0
        self.rounds: list[tuple[int, int]] = []  # number and bytes of each
        self.shown = ("accuracy", "-")

    def text(self, record: RoundRecord) -> str:
        """Add one round; returns the state after it."""
        from thinwire.metrics.objective import shown  # imported late: it imports torch

        while self.rounds and self.rounds[-1][0] >= record.round:  # the run went back; the record has these bytes
            self.bytes -= self.rounds.pop()[1]
        more = record.bytes_catchup + record.bytes_abandoned if self.accounting == "honest" else 0
        self.rounds.append((record.round, record.bytes_up + record.bytes_down + more))
        self.bytes += self.rounds[-1][1]
        self.shown = shown(record._asdict()) or self.shown
        epsilon = "" if record.epsilon is None else f"  epsilon {record.epsilon:.4g}"
        sent = f"{human_bytes(self.bytes)} {self.accounting}"
        return f"loss {record.loss:.4f}  {' '.join(self.shown)}  {sent}{epsilon}"


def _lines(label: str, rounds: int, totals: _Totals) -> Callable[[RoundRecord], None]:
    """About twenty lines for the whole run, and one for each alarm."""
    step = max(1, rounds // 20)

    def on_round(record: RoundRecord) -> None:
        text = totals.text(record)
        if record.alarm:
            err.print(f"{label}  round {record.round}/{rounds}  {record.alarm}", soft_wrap=True, markup=False)
        if record.round % step == 0 or record.round in (1, rounds):
            err.print(f"{label}  round {record.round}/{rounds}  {text}", soft_wrap=True)

    return on_round


@contextmanager
def _bar(label: str, rounds: int, totals: _Totals) -> Iterator[Callable[[RoundRecord], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bars:
        bar = bars.add_task(label, total=rounds, state="starting")

        def on_round(record: RoundRecord) -> None:
            bars.update(bar, completed=record.round, state=totals.text(record))
            if record.alarm:
                bars.console.print(f"{label}  round {record.round}  {record.alarm}", soft_wrap=True, markup=False)

        yield on_round


def print_run(progress: Progress, quiet: bool = False) -> None:
    """Print one line for a finished run of a grid; if quiet, only for a run that failed."""
    if quiet and not progress.trouble:
        return
    left = "" if progress.seconds_left is None else f", about {progress.seconds_left:.0f} s left"
    result = progress.trouble or "done"
    err.print(visible(f"{progress.done}/{progress.todo} {progress.name} {result}{left}"), soft_wrap=True)


def print_written(file: Path) -> None:
    """Print the name of a file that was written."""
    print(visible(f"wrote {file}"), file=sys.stderr)


def print_error(error: BaseException) -> None:
    """Print an error as one line."""
    print(f"thinwire: {visible(_message(error))}", file=sys.stderr)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line; replaces `warnings.showwarning`."""
    print(f"thinwire: note: {visible(str(message))}", file=sys.stderr)


_HINTS = {
    errno.ENOSPC: "; free some space, then repeat the command",
    errno.EDQUOT: "; free some space, then repeat the command",
    errno.EFBIG: "; raise the limit on file sizes, or write to another folder",
    errno.ENAMETOOLONG: "; use a shorter name",
    errno.EACCES: "; use a folder that you can read and write",
    errno.EPERM: "; use a folder that you can read and write",
    errno.EROFS: "; use a folder that you can read and write",
}


def _message(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    file = visible(f"{os.fsdecode(error.filename)}: " if error.filename else "", 300)
    return f"{file}{error.strerror}{_HINTS.get(error.errno, '')}"
