"""`thinwire watch`: follow a run that another process trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.options import AsJson
from thinwire.core.text import visible
from thinwire.core.units import human_bytes, human_seconds, percent

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


def status_line(status: Standing) -> str:
    """Format the state of a run as one line."""
    from thinwire.experiments.collapse import BROKEN

    parts = [f"{status.method} on {status.task}", f"round {status.round}/{status.rounds}"]
    if status.state != "starting":
        parts += ["loss -" if status.loss is None else f"loss {status.loss:.4f}"]
        parts += [f"accuracy {percent(status.accuracy)} (best {percent(status.best_accuracy)})"]
        lost = f" ({human_bytes(status.bytes_abandoned)} abandoned)" if status.bytes_abandoned else ""
        parts += [f"{human_bytes(status.bytes_total)} sent{lost}"]
    if status.bytes_per_round is not None:
        parts += [f"{human_bytes(status.bytes_per_round)} per round"]
    if status.seconds_per_round is not None:
        parts += [f"{human_seconds(status.seconds_per_round)} per round"]
    if status.status in BROKEN:
        parts += [f"{status.status}: {status.status_why}"]
    if status.state == "finished":
        parts += ["finished"]
    elif status.state == "stopped":
        parts += [f"stopped: its process is gone; {status.resume}"]
    elif status.eta_seconds is not None:
        parts += [f"{human_seconds(status.eta_seconds)} left"]
    idle, pace = status.idle_seconds, status.seconds_per_round or 0.0
    if status.state not in ("finished", "stopped") and idle is not None and idle > max(60.0, 10 * pace):
        parts += [f"no new round for {human_seconds(idle)}; if it was stopped, {status.resume}"]
    return visible("  ".join(parts))


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
