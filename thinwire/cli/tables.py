"""Tables and JSON on standard output: facts, layers, lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from thinwire.cli.terminal import out
from thinwire.core.text import human_bytes, human_seconds, percent, visible

if TYPE_CHECKING:
    from thinwire.reports.page import Cells


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
        if key == "seconds_by_link":  # six links would not fit in one row
            for name, times in _link_times(value):
                table.add_row(name, times)
        else:
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


def _link_times(seconds: dict[str, float]) -> list[tuple[str, str]]:
    """Seconds by link in two rows: symmetric links, and links with slow uploads."""
    symmetric = [name for name in seconds if "(" not in name]
    slow = [name for name in seconds if "(" in name]
    return [
        (
            f"over {', '.join(name.split()[0] for name in names)} Mbps{suffix}",
            ", ".join(human_seconds(seconds[name]) for name in names),
        )
        for names, suffix in ((symmetric, ""), (slow, ", slow up"))
        if names
    ]


def show_layers(layers: Sequence[dict[str, Any]], rounds: int) -> None:
    """Print how often each layer was synchronized; a full bar is every round."""
    table = Table(title="layers", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("layer", "values", "synchronized", "", "bytes up"):
        table.add_column(head, justify="left" if head in ("layer", "") else "right", no_wrap=True)
    for row in layers:
        bar = "█" * round(24 * row["syncs"] / rounds)
        sent = "-" if row["bytes_up"] is None else human_bytes(row["bytes_up"])
        table.add_row(visible(row["layer"], 200), f"{row['numbers']:,}", f"{row['syncs']:,}", bar.ljust(24, "·"), sent)
    out.print(table)
    if any(row["bytes_up"] is None for row in layers):
        out.print("the upload codec encodes all blocks together, so bytes cannot be attributed to layers")


def show_cells(cells: Cells) -> None:
    """Print a table of text; the columns on the left are never shortened."""
    table = Table(title=visible(cells.caption, 300) or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    rows = [[visible(cell, 200) for cell in row] for row in cells.rows]
    for i, head in enumerate(cells.heads):
        own = max(len(row[i]) for row in rows) if i < cells.left else None
        table.add_column(visible(head, 60), justify="right" if own is None else "left", no_wrap=True, min_width=own)
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
