"""Output of the command line: tables and JSON; progress, warnings and errors, as plain lines in a file or pipe.

Names and paths are printed literally: brackets are not markup, and control characters are escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from thinwire.core.text import human_bytes, percent, visible
from thinwire.runs.files import message_of
from thinwire.runs.progress import Style, console_of, shown

if TYPE_CHECKING:
    from thinwire.federation.job import RoundRecord
    from thinwire.reports.page import Cells

out, err = console_of(), console_of(stderr=True)
LONG = 40  # characters of a cell that is folded


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
    style: Style = "nothing" if quiet else "terminal" if err.is_terminal else "lines"
    with shown(label, rounds, style, accounting, err) as on_round:
        yield on_round


def print_start(run: Path, done: int, rounds: int) -> None:
    """Print the round from which a run goes on."""
    text = f"goes on after round {done} of {rounds}" if done else f"has no checkpoint yet: from round 1 of {rounds}"
    print(visible(f"{run} {text}"), file=sys.stderr)


def print_written(file: Path) -> None:
    """Print the name of a file that was written."""
    print(visible(f"wrote {file}"), file=sys.stderr)


def print_error(error: BaseException) -> None:
    """Print an error as one line."""
    print(f"thinwire: {visible(message_of(error))}", file=sys.stderr)


def print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line; replaces `warnings.showwarning`."""
    print(f"thinwire: note: {visible(str(message))}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=1))


def show_facts(facts: dict[str, Any], title: str) -> None:
    """Print a table with one row per fact; values that are lists are left out, apart from retries."""
    from thinwire.reports.chapters import retry_text

    table = Table(title=visible(title), show_header=False, title_justify="left")
    for key, value in facts.items():
        if key == "retries":
            for number, retry in enumerate(value, 1):
                table.add_row(f"retry {number}", retry_text(retry))
        if isinstance(value, list) or (not value and key.startswith(("status_", "bytes_abandoned"))):
            continue
        table.add_row(visible(key.replace("_", " ")), visible(_fact_text(key, value)))
    out.print(table)


def _fact_text(key: str, value: Any) -> str:
    if value is None or value == "" or value == {}:
        return "-"
    if key.startswith(("bytes", "payload", "memory", "message")) and isinstance(value, int | float):
        return f"{value:,}  ({human_bytes(value)})" if value >= 1000 else f"{value} B"
    if key.endswith("accuracy"):
        return percent(value)
    if key == "objective":
        final, best = _number_text(value.get("final")), _number_text(value.get("best"))
        return f"{value.get('name')} {final} (best {best} in round {value.get('best_round')})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_number_text(number)}" for name, number in value.items())
    return f"{value:,}" if isinstance(value, int) and key != "seed" else str(value)


def _number_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def show_layers(layers: Sequence[dict[str, Any]], rounds: int) -> None:
    """Print how often each layer was synchronized; a full bar is every round."""
    from thinwire.reports.page import Cells

    rows = []
    for row in layers:
        bar = "█" * round(24 * row["syncs"] / rounds)
        sent = "-" if row["bytes_up"] is None else human_bytes(row["bytes_up"])
        rows.append((row["layer"], bar.ljust(24, "·"), f"{row['numbers']:,}", f"{row['syncs']:,}", sent))
    show_cells(Cells("layers", ("layer", "", "values", "synchronized", "bytes up"), rows, left=2))
    if any(row["bytes_up"] is None for row in layers):
        out.print("the upload codec encodes all blocks together, so bytes cannot be attributed to layers")


def show_cells(cells: Cells) -> None:
    """Print a table of text; the columns on the left are never shortened, and long texts are folded."""
    table = Table(title=visible(cells.caption, 300) or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    rows = [[visible(cell, 200) for cell in row] for row in cells.rows]
    for i, head in enumerate(cells.heads):
        longest, left = max((len(row[i]) for row in rows), default=0), i < cells.left
        table.add_column(
            visible(head, 60),
            justify="left" if left or longest > LONG else "right",
            overflow="fold",
            no_wrap=longest <= LONG,
            min_width=longest if left else None,
        )
    for row in rows:
        table.add_row(*row)
    out.print(table)


def show_list(items: Sequence[dict[str, Any]]) -> None:
    """Print one row per item; columns without any value are left out."""
    heads = [key for key in items[0] if any(item.get(key) for item in items)] if items else []
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=head == "name", justify="right" if head == "parameters" else "left")
    for item in items:
        cells = (item.get(head) for head in heads)
        # Text: brackets, as in thinwire[hf], are not markup
        table.add_row(*(Text("" if c is None else f"{c:,}" if isinstance(c, int) else visible(str(c))) for c in cells))
    out.print(table)
