"""`thinwire partition`: print and draw which client has which examples, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import AsJson, Clients, DataDir, Imports, Overrides, Seed, Task, resolve_experiment

if TYPE_CHECKING:
    from thinwire.data.describe_partition import PartitionDescription

SHOWN = 20  # clients in the table; the JSON has all
_CLASSES = 6  # of a client in the table


def partition(
    on: Task = None,
    clients: Clients = None,
    seed: Seed = None,
    set_: Overrides = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the clients: a file that ends in .svg, .png or .pdf.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Print who has what: the examples and classes of each client, and how unequal clients are.

    Example: thinwire partition --on digits --set task.partition.alpha=0.1 --plot clients.svg
    """
    from thinwire.cli.tables import print_json
    from thinwire.cli.terminal import print_written
    from thinwire.core.key import Key
    from thinwire.data.describe_partition import describe_partition
    from thinwire.experiments.build import build_task
    from thinwire.reports.figures import partition_figure, save

    experiment = resolve_experiment("fedavg", on, set_, clients=clients, seed=seed)
    task = build_task(experiment.task, Key(experiment.seed), data_dir)
    found = describe_partition(task)
    title = f"{experiment.task.kind}, seed {experiment.seed}"
    if as_json:
        print_json({"task": experiment.task.kind, "note": task.note, **found.summary(), "rows": found.rows()})
    else:
        _show(found, title, task.note)
    if plot:
        save(partition_figure(found, title), plot)
        print_written(plot)


def _show(found: PartitionDescription, title: str, note: str) -> None:
    """Print the table of clients and the numbers of all."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from thinwire.cli.terminal import out
    from thinwire.core.text import visible

    table = Table(title=visible(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    held_out = ("validation",) if found.validation.any() else ()
    last = "target: lowest, quartiles, highest" if found.quantiles is not None else "classes"
    for head in ("client", "examples", *held_out, "skew", last):
        table.add_column(head, justify="left" if head in ("client", last) else "right", overflow="fold")
    rows = found.rows()
    for row in _some(rows):
        if row is None:
            table.add_row(f"... {len(rows) - SHOWN:,} more")
            continue
        numbers = [f"{row[key]:,}" for key in ("examples", *held_out)]
        table.add_row(visible(row["client"], 60), *numbers, f"{row['label_skew']:.3f}", visible(_what(row), 200))
    out.print(table)
    facts = found.summary()
    out.print(f"{found!r}; {facts['examples']:,} examples, {facts['unused_examples']:,} of no client")
    out.print(
        "label skew: mean total variation distance between the classes of a client and those of all (0: equal); "
        "size skew: Gini coefficient of the numbers of examples (0: equal)"
    )
    if note:
        out.print(visible(note))


def _some(rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """All rows, or the first and the last of many, with None between them."""
    if len(rows) <= SHOWN:
        return list(rows)
    return [*rows[: SHOWN - 5], None, *rows[-5:]]


def _what(row: dict[str, Any]) -> str:
    """The classes of a client, most frequent first, or the quantiles of its targets."""
    if "quantiles" in row:
        return ", ".join(f"{value:.3g}" for value in row["quantiles"])
    ranked = sorted(row["classes"].items(), key=lambda pair: -pair[1])
    more = f" and {len(ranked) - _CLASSES} more" if len(ranked) > _CLASSES else ""
    return ", ".join(f"{name}: {count:,}" for name, count in ranked[:_CLASSES]) + more
