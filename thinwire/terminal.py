"""What people see: progress bars in a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from thinwire.engines.local import RoundRecord
    from thinwire.run.compare import Row, Spread

WIDE = 160  # outside a terminal nobody scrolls sideways: tables are not squeezed into the 80 columns that rich assumes


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


out, err = _console(), _console(stderr=True)


def human_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1000.

    >>> human_bytes(999), human_bytes(1500), human_bytes(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            break
    return f"{count:.3g} {unit}"


def percent(share: float | None) -> str:
    """A share for people.

    >>> percent(0.9312), percent(None)
    ('93.12 %', '-')
    """
    return "-" if share is None else f"{100 * share:.2f} %"


@contextmanager
def progress(
    label: str, rounds: int, quiet: bool = False, accounting: str = "honest"
) -> Iterator[Callable[[RoundRecord], None]]:
    """Show the rounds of a run as they come: a bar in a terminal, about twenty lines elsewhere."""
    if quiet:
        yield lambda record: None
        return
    total = 0
    accuracy: float | None = None

    def news(record: RoundRecord) -> str:
        nonlocal total, accuracy
        total += record.bytes_up + record.bytes_down + (record.bytes_catchup if accounting == "honest" else 0)
        accuracy = accuracy if record.accuracy is None else record.accuracy
        return f"loss {record.loss:.4f}  accuracy {percent(accuracy)}  {human_bytes(total)} {accounting}"

    if not err.is_terminal:
        step = max(1, rounds // 20)

        def line(record: RoundRecord) -> None:
            text = news(record)
            if record.round % step == 0 or record.round in (1, rounds):
                err.print(f"{label}  round {record.round}/{rounds}  {text}", soft_wrap=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bars:
        bar = bars.add_task(label, total=rounds, news="starting")
        yield lambda record: bars.update(bar, completed=record.round, news=news(record))


def show_facts(facts: dict[str, Any], title: str) -> None:
    """One fact a line."""
    table = Table(title=title, show_header=False, title_justify="left")
    for key, value in facts.items():
        if isinstance(value, list):  # a table of its own
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
        table.add_row(key.replace("_", " "), text)
    out.print(table)


def show_layers(layers: Sequence[dict[str, Any]], rounds: int) -> None:
    """Which layers spoke how often; a full bar is every round."""
    table = Table(title="layers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("layer", "numbers", "synchronised", "", "bytes up"):
        table.add_column(head, justify="left" if head in ("layer", "") else "right", no_wrap=True)
    for row in layers:
        known = row["bytes_up"] is not None
        bar = "█" * round(24 * row["syncs"] / rounds)
        sent = human_bytes(row["bytes_up"]) if known else "-"
        table.add_row(row["layer"], f"{row['numbers']:,}", f"{row['syncs']:,}", bar.ljust(24, "·"), sent)
    out.print(table)
    if any(row["bytes_up"] is None for row in layers):
        out.print("the up codec mixes blocks, so no bytes belong to one layer")


def show_comparison(rows: Sequence[Row], title: str) -> None:
    """The table of a comparison."""

    def spread(value: Spread | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.std else "")

    yardstick = "fedavg" if any(row.method == "fedavg" for row in rows) else rows[0].method
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    heads = ("method", "final %", "best %", "up", "down", "catch-up", "total", "ideal", "fewer", "seconds")
    for head in heads:
        least = max(len(row.method) for row in rows) if head == "method" else None
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True, min_width=least)
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3g}x"
        ways = (row.bytes_up, row.bytes_down, row.bytes_catchup, row.bytes_total_honest, row.bytes_total_ideal)
        table.add_row(
            row.method,
            spread(row.final_accuracy),
            spread(row.best_accuracy),
            *(human_bytes(way) for way in ways),
            ratio,
            f"{row.seconds:.1f}",
        )
    out.print(table)
    by = "total" if rows[0].accounting == "honest" else "ideal"
    out.print(
        f"accuracy at the end and at best; bytes of all messages (total), and without catch-up (ideal); how many times "
        f"fewer than {yardstick}, by {by} ({rows[0].accounting} accounting)"
    )


def show_list(items: Sequence[dict[str, Any]]) -> None:
    """Names with one line each."""
    heads = [key for key in items[0] if any(item.get(key) for item in items)] if items else []
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head == "name", justify="right" if head == "parameters" else "left")
    for item in items:
        cells = (item.get(head) for head in heads)
        table.add_row(*("" if c is None else f"{c:,}" if isinstance(c, int) else str(c) for c in cells))
    out.print(table)
