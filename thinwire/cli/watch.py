"""`thinwire watch`: follow a run that another process trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.options import AsJson

if TYPE_CHECKING:
    from thinwire.experiments.watch import Standing


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory; it is only read.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two reads of the files.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Follow the progress of a run in another terminal or on a mounted disk, until it ends.

    The exit code is 1 if the process of the run is gone and the run is not finished.

    Example: thinwire watch runs/fedavg-digits-s0-1a2b3c
    """
    from thinwire.cli.tables import print_json
    from thinwire.experiments.watch import follow, standing

    if once and as_json:
        print_json(standing(run).as_json())
        return
    try:
        show = _print_json_lines if as_json else _show_live
        last = show([standing(run)] if once else follow(run, every))
    except KeyboardInterrupt:
        sys.exit(130)
    if last == "stopped" and not once:
        sys.exit(1)


def _print_json_lines(statuses: Iterable[Standing]) -> str:
    """Print one line of JSON per state; returns the last state."""
    last = ""
    for status in statuses:
        last = status.state
        print(json.dumps(status.as_json()), flush=True)
    return last


def _show_live(statuses: Iterable[Standing]) -> str:
    """Show a bar in a terminal, and one line per change otherwise; returns the last state."""
    from thinwire.cli.terminal import out
    from thinwire.experiments.watch import status_line

    if not out.is_terminal:
        last = None
        for status in statuses:
            if last is None or (status.round, status.state) != (last.round, last.state):
                out.print(status_line(status), soft_wrap=True)
            last = status
        return last.state if last else ""
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    with Live(console=out, refresh_per_second=4) as live:
        for status in statuses:
            view = Table.grid()
            view.add_row(ProgressBar(total=max(1, status.rounds), completed=status.round, width=48))
            view.add_row(Text(status_line(status)))
            live.update(view)
    return status.state
