"""Progress of a run: a bar in a terminal or a notebook, about twenty lines otherwise, or nothing.

The bar is written to stderr. `rich` and `IPython` are imported when a bar is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from thinwire.core.text import html_text, human_bytes, percent, visible

if TYPE_CHECKING:
    from rich.console import Console

    from thinwire.federation.job import RoundRecord

FILE_WIDTH = 160  # columns of output to a file or pipe; rich would assume 80 and truncate tables

Show = Callable[["RoundRecord"], None]
Style = Literal["notebook", "terminal", "lines", "nothing"]


def style_of(progress: bool | None) -> Style:
    """How progress is shown here: True for always, False for never, None for where someone sees it."""
    if progress is False:
        return "nothing"
    if in_notebook():
        return "notebook"
    if sys.stderr is not None and sys.stderr.isatty():
        return "terminal"
    return "lines" if progress else "nothing"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython  # type: ignore

    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(get_ipython()).__mro__)


@contextmanager
def shown(
    label: str, rounds: int, style: Style, accounting: str = "honest", console: Console | None = None
) -> Iterator[Show]:
    """Show the progress of a run; yields a function to call after each round.

    Args:
        label: the name of the run.
        rounds: number of rounds.
        style: how.
        accounting: whether the bytes shown include catch-up downloads (`honest`) or not (`ideal`).
        console: where a terminal and lines are written; stderr by default.
    """
    label = visible(label, 200)
    if style == "nothing":
        yield lambda record: None
        return
    totals = RunningTotals(accounting)
    if style == "notebook":
        yield _notebook(label, rounds, totals)
    elif style == "terminal":
        with _bar(label, rounds, totals, console or console_of(stderr=True)) as on_round:
            yield on_round
    else:
        yield _lines(label, rounds, totals, console or console_of(stderr=True))


def console_of(stderr: bool = False) -> Console:
    """A console that prints text literally: brackets are not markup."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


class RunningTotals:
    """Bytes so far and the newest accuracy, R2 or test loss, as text."""

    def __init__(self, accounting: str) -> None:
        self.accounting, self.bytes = accounting, 0
        self.rounds: list[tuple[int, int]] = []  # number and bytes of each
        self.quality = f"accuracy {percent(None)}"

    def text(self, record: RoundRecord) -> str:
        """Add one round; returns the state after it."""
        from thinwire.metrics.objective import shown as shown_of  # imported late: it imports torch

        while self.rounds and self.rounds[-1][0] >= record.round:  # the run went back; the record has these bytes
            self.bytes -= self.rounds.pop()[1]
        more = record.bytes_catchup + record.bytes_abandoned if self.accounting == "honest" else 0
        self.rounds.append((record.round, record.bytes_up + record.bytes_down + more))
        self.bytes += self.rounds[-1][1]
        if (found := shown_of(record._asdict())) is not None:
            self.quality = " ".join(found)
        epsilon = "" if record.epsilon is None else f"  epsilon {record.epsilon:.4g}"
        sent = f"{human_bytes(self.bytes)} {self.accounting}"
        clock = "" if record.clock is None else f"  clock {record.clock:.5g} s"
        return f"loss {record.loss:.4f}  {self.quality}  {sent}{clock}{epsilon}"


def _lines(label: str, rounds: int, totals: RunningTotals, console: Console) -> Show:
    """About twenty lines for the whole run, and one for each alarm."""
    step = max(1, rounds // 20)

    def on_round(record: RoundRecord) -> None:
        text = totals.text(record)
        if record.alarm:
            console.print(f"{label}  round {record.round}/{rounds}  {record.alarm}", soft_wrap=True, markup=False)
        if record.round % step == 0 or record.round in (1, rounds):
            console.print(f"{label}  round {record.round}/{rounds}  {text}", soft_wrap=True)

    return on_round


@contextmanager
def _bar(label: str, rounds: int, totals: RunningTotals, console: Console) -> Iterator[Show]:
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

        def on_round(record: RoundRecord) -> None:
            bars.update(bar, completed=record.round, state=totals.text(record))
            if record.alarm:
                bars.console.print(f"{label}  round {record.round}  {record.alarm}", soft_wrap=True, markup=False)

        yield on_round


def _notebook(label: str, rounds: int, totals: RunningTotals) -> Show:
    """A bar in the output of a cell, which is replaced after each round."""
    from IPython.display import HTML, display  # type: ignore

    def page(done: int, text: str) -> HTML:
        bar = f'<progress value="{done}" max="{rounds}"></progress>'
        return HTML(f"{html_text(label)} {bar} {done}/{rounds} {html_text(text)}")

    cell = display(page(0, "starting"), display_id=True)

    def on_round(record: RoundRecord) -> None:
        cell.update(page(record.round, totals.text(record)))

    return on_round
