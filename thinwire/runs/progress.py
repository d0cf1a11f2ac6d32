"""Progress of a run: a bar in a terminal, about twenty lines otherwise, or nothing.

The bar is written to stderr. `rich` is imported when something is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from thinwire.core.text import human_bytes, percent, visible
from thinwire.runs.records import honest_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.federation.job import RoundRecord

FILE_WIDTH = 160  # columns of output to a file or pipe; rich would assume 80 and truncate tables

Show = Callable[["RoundRecord"], None]
Style = Literal["terminal", "lines", "nothing"]


def style_of(progress: bool | None) -> Style:
    """How progress is shown here: True for always, False for never, None for where someone sees it."""
    if progress is not False and sys.stderr is not None and sys.stderr.isatty():
        return "terminal"
    return "lines" if progress or (progress is None and "ipykernel" in sys.modules) else "nothing"


@contextmanager
def shown(label: str, rounds: int, style: Style) -> Iterator[Show]:
    """Show the progress of a run; yields a function to call after each round.

    Args:
        label: the name of the run.
        rounds: number of rounds.
        style: how.
    """
    if style == "nothing":
        yield lambda record: None
        return
    label, totals, console = visible(label, 200), RunningTotals(), console_of(stderr=True)
    step = max(1, rounds // 20)

    def show_line(record: RoundRecord) -> None:
        text = totals.text(record)
        for one in (record.alarm, text if record.round % step == 0 or record.round in (1, rounds) else None):
            if one:
                console.print(f"{label}  round {record.round}/{rounds}  {one}", soft_wrap=True)

    if style == "lines":
        yield show_line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(label, total=rounds, state="starting")

        def show_bar(record: RoundRecord) -> None:
            bars.update(bar, completed=record.round, state=totals.text(record))
            if record.alarm:
                console.print(f"{label}  round {record.round}  {record.alarm}", soft_wrap=True)

        yield show_bar


def console_of(stderr: bool = False) -> Console:
    """A console that prints text literally: brackets are not markup."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


class RunningTotals:
    """Bytes so far and the newest accuracy, R2 or test loss, as text."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []  # number and bytes of each
        self.quality = f"accuracy {percent(None)}"

    def text(self, record: RoundRecord) -> str:
        """Add one round; returns the state after it."""
        from thinwire.metrics.objective import shown as shown_of  # imported late: it imports torch

        while self.rounds and self.rounds[-1][0] >= record.round:  # the run went back; the record has these bytes
            self.rounds.pop()
        before = self.rounds[-1][1] if self.rounds else 0
        self.rounds.append((record.round, before + honest_bytes(record._asdict())))
        if (found := shown_of(record._asdict())) is not None:
            self.quality = " ".join(found)
        epsilon = "" if record.epsilon is None else f"  epsilon {record.epsilon:.4g}"
        clock = "" if record.clock is None else f"  clock {record.clock:.5g} s"
        return f"loss {record.loss:.4f}  {self.quality}  {human_bytes(self.rounds[-1][1])} sent{clock}{epsilon}"
