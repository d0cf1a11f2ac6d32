"""What people see: progress bars in a terminal, plain lines elsewhere, tables at the end.

Names and paths are shown as they are: brackets are no markup, and what cannot be printed stands as an escape.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, human_seconds, percent
from thinwire.experiments.collapse import BROKEN

if TYPE_CHECKING:
    from thinwire.experiments.grid import Progress
    from thinwire.experiments.watch import Standing
    from thinwire.reports.compare import MeanStd, Row
    from thinwire.runtime.job import RoundRecord

WIDE = 160  # outside a terminal nobody scrolls sideways: tables are not squeezed into the 80 columns that rich assumes


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


out, err = _console(), _console(stderr=True)


@contextmanager
def progress(
    label: str, rounds: int, quiet: bool = False, accounting: str = "honest"
) -> Iterator[Callable[[RoundRecord], None]]:
    """Show the rounds of a run as they come: a bar in a terminal, about twenty lines elsewhere."""
    if quiet:
        yield lambda record: None
        return
    total, label = 0, visible(label, 200)
    accuracy: float | None = None

    def news(record: RoundRecord) -> str:
        nonlocal total, accuracy
        total += record.bytes_up + record.bytes_down + (record.bytes_catchup if accounting == "honest" else 0)
        accuracy = accuracy if record.accuracy is None else record.accuracy
        private = "" if record.epsilon is None else f"  epsilon {record.epsilon:.4g}"
        return f"loss {record.loss:.4f}  accuracy {percent(accuracy)}  {human_bytes(total)} {accounting}{private}"

    if not err.is_terminal:
        step = max(1, rounds // 20)

        def line(record: RoundRecord) -> None:
            text = news(record)
            if record.alarm:
                err.print(f"{label}  round {record.round}/{rounds}  {record.alarm}", soft_wrap=True, markup=False)
            if record.round % step == 0 or record.round in (1, rounds):
                err.print(f"{label}  round {record.round}/{rounds}  {text}", soft_wrap=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bars:
        bar = bars.add_task(label, total=rounds, news="starting")

        def move(record: RoundRecord) -> None:
            bars.update(bar, completed=record.round, news=news(record))
            if record.alarm:
                bars.console.print(f"{label}  round {record.round}  {record.alarm}", soft_wrap=True, markup=False)

        yield move


def show_facts(facts: dict[str, Any], title: str) -> None:
    """One fact a line."""
    table = Table(title=visible(title), show_header=False, title_justify="left")
    for key, value in facts.items():
        if isinstance(value, list):  # a table of its own
            continue
        if key == "seconds_by_link":  # six links on one line would not fit
            for name, times in _times(value):
                table.add_row(name, times)
            continue
        if key.startswith("status_") and not value:  # nothing is wrong
            continue
        if value is None or value == "":
            text = "-"
        elif key.startswith(("bytes", "payload", "memory", "message")) and isinstance(value, int | float):
            text = f"{value:,}  ({human_bytes(value)})" if value >= 1000 else f"{value} B"
        elif key.endswith("accuracy"):
            text = percent(value)
        elif isinstance(value, dict):
            text = ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v:,}" for k, v in value.items())
        else:
            text = f"{value:,}" if isinstance(value, int) and key != "seed" else str(value)
        table.add_row(visible(key.replace("_", " ")), visible(text))
    out.print(table)


def _times(seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Times by link in two rows: links that are as fast up as down, and those with slow uploads."""
    names = [name for name in seconds if "(" not in name]
    slow = [name for name in seconds if "(" in name]
    return [
        (
            f"over {', '.join(name.split()[0] for name in some)} Mbps{words}",
            ", ".join(human_seconds(seconds[name]) for name in some),
        )
        for some, words in ((names, ""), (slow, ", slow up"))
        if some
    ]


def show_layers(layers: Sequence[dict[str, Any]], rounds: int) -> None:
    """Which layers spoke how often; a full bar is every round."""
    table = Table(title="layers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("layer", "numbers", "synchronised", "", "bytes up"):
        table.add_column(head, justify="left" if head in ("layer", "") else "right", no_wrap=True)
    for row in layers:
        known = row["bytes_up"] is not None
        bar = "█" * round(24 * row["syncs"] / rounds)
        sent = human_bytes(row["bytes_up"]) if known else "-"
        table.add_row(visible(row["layer"], 200), f"{row['numbers']:,}", f"{row['syncs']:,}", bar.ljust(24, "·"), sent)
    out.print(table)
    if any(row["bytes_up"] is None for row in layers):
        out.print("the up codec mixes blocks, so no bytes belong to one layer")


def show_comparison(rows: Sequence[Row], title: str) -> None:
    """The table of a comparison."""

    def spread(value: MeanStd | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.std else "")

    yardstick = "fedavg" if any(row.method == "fedavg" for row in rows) else rows[0].method
    table = Table(title=visible(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    heads = ["method", "final %", "best %", "up", "down", "catch-up", "total", "ideal", "fewer"]
    roomy, wide = out.width >= 100, out.width >= 112
    heads += ["seconds", "at 2 Mbps"] if roomy else []
    heads += ["slow up"] if wide else []
    heads += ["broke down"] if any(row.broken != "-" for row in rows) else []
    for head in heads:
        least = max(len(visible(row.method, 200)) for row in rows) if head == "method" else None
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True, min_width=least)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3g}x"
        ways = (row.bytes_up, row.bytes_down, row.bytes_catchup, row.bytes_total_honest, row.bytes_total_ideal)
        table.add_row(
            visible(row.method, 200),
            spread(row.final_accuracy),
            spread(row.best_accuracy),
            *(human_bytes(way) for way in ways),
            ratio,
            *([f"{row.seconds:.1f}", _at(row, "2 Mbps")] if roomy else []),
            *([_at(row, "2 Mbps (uploads 16x slower)")] if wide else []),
            *([row.broken] if heads[-1] == "broke down" else []),
        )
    out.print(table)
    by = "total" if rows[0].accounting == "honest" else "ideal"
    out.print(
        f"accuracy at the end and at best; bytes of all messages (total), and without catch-up (ideal); how many times "
        f"fewer than {visible(yardstick, 200)}, by {by} ({rows[0].accounting} accounting)"
    )
    if roomy:
        slow = ", and with uploads 16x slower (slow up)" if wide else ""
        out.print(f"seconds here, and the time that it would take over links of 2 Mbps{slow}")


def _at(row: Row, link: str) -> str:
    return human_seconds(row.seconds_by_link[link]) if row.seconds_by_link else "-"


def standing_line(now: Standing) -> str:
    """Where a run stands, in one line."""
    parts = [f"{now.method} on {now.task}", f"round {now.round}/{now.rounds}"]
    if now.state != "starting":
        parts += ["loss -" if now.loss is None else f"loss {now.loss:.4f}"]
        parts += [f"accuracy {percent(now.accuracy)} (best {percent(now.best_accuracy)})"]
        parts += [f"{human_bytes(now.bytes_total)} sent"]
    if now.bytes_per_round is not None:
        parts += [f"{human_bytes(now.bytes_per_round)} a round"]
    if now.seconds_per_round is not None:
        parts += [f"{human_seconds(now.seconds_per_round)} a round"]
    if now.status in BROKEN:
        parts += [f"{now.status}: {now.status_why}"]
    if now.state == "finished":
        parts += ["finished"]
    elif now.eta_seconds is not None:
        parts += [f"{human_seconds(now.eta_seconds)} to go"]
    pace = now.seconds_per_round or 0.0
    if now.state != "finished" and now.silent_seconds is not None and now.silent_seconds > max(60.0, 10 * pace):
        parts += [f"no news for {human_seconds(now.silent_seconds)}: `thinwire resume {now.run}` if it was stopped"]
    return visible("  ".join(parts))


def watch_live(standings: Iterable[Standing]) -> None:
    """Show a run as it goes on: a bar in a terminal, a line for each change elsewhere."""
    if not out.is_terminal:
        last = None
        for now in standings:
            if last is None or (now.round, now.state) != (last.round, last.state):
                out.print(standing_line(now), soft_wrap=True)
            last = now
        return
    from rich.live import Live
    from rich.progress_bar import ProgressBar

    with Live(console=out, refresh_per_second=4) as live:
        for now in standings:
            view = Table.grid()
            view.add_row(ProgressBar(total=max(1, now.rounds), completed=now.round, width=48))
            view.add_row(Text(standing_line(now)))
            live.update(view)


def show_list(items: Sequence[dict[str, Any]]) -> None:
    """Names with one line each."""
    heads = [key for key in items[0] if any(item.get(key) for item in items)] if items else []
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head == "name", justify="right" if head == "parameters" else "left")
    for item in items:
        cells = (item.get(head) for head in heads)
        # plain text: a word in brackets, as in thinwire[hf], is no markup
        table.add_row(*(Text("" if c is None else f"{c:,}" if isinstance(c, int) else visible(str(c))) for c in cells))
    out.print(table)


def say_run(progress: Progress, quiet: bool = False) -> None:
    """One line for a run of many that ended; if quiet, only for one that did not finish."""
    if quiet and not progress.trouble:
        return
    left = "" if progress.seconds_left is None else f", about {progress.seconds_left:.0f} s to go"
    words = progress.trouble or "done"
    err.print(visible(f"{progress.done}/{progress.todo} {progress.name} {words}{left}"), soft_wrap=True)


def show_markdown(text: str) -> None:
    """A page in the terminal, as it is written: tables are wide, and scripts may read them."""
    out.print(Text("\n".join(visible(line, len(line)) for line in text.split("\n"))), soft_wrap=True)


def refuse(error: BaseException) -> None:
    """What went wrong, as one line."""
    print(f"thinwire: {visible(_words(error))}", file=sys.stderr)


def note(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, instead of Python's two."""
    print(f"thinwire: note: {visible(str(message))}", file=sys.stderr)


_HINTS = {
    errno.ENOSPC: "; make room, then give the same command again",
    errno.EDQUOT: "; make room, then give the same command again",
    errno.EFBIG: "; allow longer files, or write to another place",
    errno.ENAMETOOLONG: "; give it a shorter name",
    errno.EACCES: "; choose a place where you may read and write",
    errno.EPERM: "; choose a place where you may read and write",
    errno.EROFS: "; choose a place where you may read and write",
}


def _words(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    where = visible(f"{os.fsdecode(error.filename)}: " if error.filename else "", 300)
    return f"{where}{error.strerror}{_HINTS.get(error.errno, '')}"
