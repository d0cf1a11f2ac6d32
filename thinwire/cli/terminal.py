"""Output of the command line: tables, JSON and notes, as plain lines in a file or pipe.

Names and paths are printed literally: brackets are not markup, and control characters are escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from thinwire.core.text import human_bytes, percent, visible
from thinwire.runs.progress import console_of

if TYPE_CHECKING:
    from thinwire.reports.page import Cells

out, err = console_of(), console_of(stderr=True)
LONG = 40  # characters of a cell that is folded


def note(text: str) -> None:
    """Print one line beside the output: on stderr."""
    print(visible(text), file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=1))


def show_cells(cells: Cells) -> None:
    """Print a table of text; the columns on the left are never shortened, and long texts are folded."""
    table = Table(title=visible(cells.caption, 300) or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding, table.show_header = True, any(cells.heads)
    rows = [[visible(cell, 200) for cell in row] for row in cells.rows]
    for i, head in enumerate(cells.heads):
        longest, left = max((len(row[i]) for row in rows), default=0), i < cells.left
        table.add_column(
            visible(head, 60),
            justify="left" if left or longest > LONG else "right",
            overflow="fold",
            no_wrap=longest <= LONG,
            min_width=longest if left and longest <= LONG else None,
        )
    for row in rows:
        table.add_row(*row)
    out.print(table)


def show_facts(facts: dict[str, Any], title: str) -> None:
    """Print a table with one row per fact; values that are lists are left out, apart from retries."""
    from thinwire.reports.chapters import retry_text
    from thinwire.reports.page import Cells

    rows = [(f"retry {number}", retry_text(one)) for number, one in enumerate(facts.get("retries", ()), 1)]
    for key, value in facts.items():
        if not (isinstance(value, list) or (not value and key.startswith(("status_", "bytes_abandoned")))):
            rows.append((key.replace("_", " "), _fact_text(key, value)))
    show_cells(Cells(title, ("", ""), rows, left=2))


def _fact_text(key: str, value: Any) -> str:
    if key.startswith(("bytes", "payload", "memory", "message")) and isinstance(value, int | float):
        return f"{value:,}  ({human_bytes(value)})" if value >= 1000 else f"{value} B"
    if key == "objective" and value:
        best = f"best {plain_text(value.get('best'))} in round {value.get('best_round')}"
        return f"{value.get('name')} {plain_text(value.get('final'))} ({best})"
    return percent(value) if key.endswith("accuracy") else str(value) if key == "seed" else plain_text(value)


def plain_text(value: Any) -> str:
    """A value as text: numbers with thousands, `-` for none."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain_text(one)}" for name, one in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(plain_text, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no", None: "-"}.get(value) or str(value or "-")
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def show_layers(layers: Sequence[dict[str, Any]]) -> None:
    """Print how often each layer was synchronized, and its bytes."""
    show_list(
        [
            {
                "layer": row["layer"],
                "values": row["numbers"],
                "synchronized": row["syncs"],
                "bytes up": None if row["bytes_up"] is None else human_bytes(row["bytes_up"]),
            }
            for row in layers
        ]
    )
    if any(row["bytes_up"] is None for row in layers):
        out.print("the upload codec encodes all blocks together, so bytes cannot be attributed to layers")


def show_list(items: Sequence[dict[str, Any]], title: str = "") -> None:
    """Print one row per item; columns without any value are left out."""
    from thinwire.reports.page import Cells

    heads = [key for key in items[0] if any(item.get(key) for item in items)] if items else []
    rows = [["" if item.get(head) is None else plain_text(item[head]) for head in heads] for item in items]
    show_cells(Cells(title, [head.replace("_", " ") for head in heads], rows))
