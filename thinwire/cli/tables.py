"""Tables and JSON on standard output: facts, layers, comparisons, lists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from thinwire.cli.terminal import out
from thinwire.core.text import visible
from thinwire.core.units import human_bytes, human_seconds, percent

if TYPE_CHECKING:
    from thinwire.reports.compare import ComparisonRow

SLOW_UPLOADS = "2 Mbps (uploads 16x slower)"


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


def show_comparison(rows: Sequence[ComparisonRow], title: str) -> None:
    """Print the table of a comparison, as many columns as the terminal is wide, and what its columns mean."""
    table = Table(title=visible(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = _columns(rows)
    heads = [head for head, _ in columns]
    for head, cells in columns:
        name = head == "method"
        table.add_column(
            head, justify="left" if name else "right", no_wrap=True, min_width=max(map(len, cells)) if name else None
        )
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    out.print(table)
    baseline = " or ".join(dict.fromkeys(row.compared_with for row in rows))
    lost = " and abandoned rounds" if any(row.bytes_abandoned for row in rows) else ""
    total = "total" if rows[0].accounting == "honest" else "ideal"
    names = list(dict.fromkeys(_objective_name(row) for row in rows))
    if len(names) > 1:
        out.print(f"the rows have different objectives, which cannot be compared: {', '.join(names)}")
    out.print(
        f"final and best {' or '.join(names)}; bytes of all messages (total), and without catch-up{lost} (ideal); "
        f"ratio: bytes of {visible(baseline, 200)} divided by these, by {total} ({rows[0].accounting} accounting)"
    )
    if "at 2 Mbps" in heads:
        slow = ", and with uploads 16x slower (slow up)" if "slow up" in heads else ""
        out.print(f"seconds on this machine, and modeled time over links of 2 Mbps{slow}")


def _columns(rows: Sequence[ComparisonRow]) -> list[tuple[str, list[str]]]:
    """The columns: a head, and a cell for each row."""
    from thinwire.experiments.collapse import FAILED_RUNS
    from thinwire.reports.compare import metric_names

    lost = any(row.bytes_abandoned for row in rows)
    columns = [
        ("method", [visible(row.method, 200) for row in rows]),
        *_scores(rows),
        *((visible(name, 40), [_metric(row, name) for row in rows]) for name in metric_names(rows)),
    ]
    if any(row.worst_clients for row in rows):
        columns.append(("worst 10 % of clients", [_mean_std(row.worst_clients) for row in rows]))
    columns += [
        ("up", [human_bytes(row.bytes_up) for row in rows]),
        ("down", [human_bytes(row.bytes_down) for row in rows]),
        ("catch-up", [human_bytes(row.bytes_catchup) for row in rows]),
        *([("abandoned", [human_bytes(row.bytes_abandoned) for row in rows])] if lost else []),
        ("total", [human_bytes(row.bytes_total_honest) for row in rows]),
        ("ideal", [human_bytes(row.bytes_total_ideal) for row in rows]),
        ("ratio", ["-" if row.ratio is None else f"{row.ratio:.3g}x" for row in rows]),
    ]
    if out.width >= 100:
        columns.append(("seconds", [f"{row.seconds:.1f}" for row in rows]))
        columns.append(("at 2 Mbps", [_link_time(row, "2 Mbps") for row in rows]))
    if out.width >= 112:
        columns.append(("slow up", [_link_time(row, SLOW_UPLOADS) for row in rows]))
    if any(row.broken != "-" for row in rows):
        columns.append((FAILED_RUNS, [row.broken for row in rows]))
    return columns


def _scores(rows: Sequence[ComparisonRow]) -> list[tuple[str, list[str]]]:
    """The last and the best value of each objective of the rows."""
    columns = []
    for name in dict.fromkeys(_objective_name(row) for row in rows):
        percents = name == "accuracy"
        ranked = [row if _objective_name(row) == name else None for row in rows]
        show, unit = (_mean_std, "%") if percents else (_own_unit, name)
        columns.append((f"final {unit}", [show(row.final if row else None) for row in ranked]))
        columns.append((f"best {unit}", [show(row.best if row else None) for row in ranked]))
    return columns


def _objective_name(row: ComparisonRow) -> str:
    return "accuracy" if row.objective.name == "accuracy" else visible(row.objective.label, 40)


def _mean_std(value: Any) -> str:
    """Mean and standard deviation in percent."""
    if value is None:
        return "-"
    return f"{100 * value.mean:.2f}" + (f" ± {100 * value.std:.2f}" if value.std else "")


def _metric(row: ComparisonRow, name: str) -> str:
    """Mean and standard deviation of a metric, in its own unit."""
    return _own_unit(row.final_metrics.get(name))


def _own_unit(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.4g}" + (f" ± {value.std:.2g}" if value.std else "")


def _link_time(row: ComparisonRow, link: str) -> str:
    return human_seconds(row.seconds_by_link[link]) if row.seconds_by_link else "-"


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
