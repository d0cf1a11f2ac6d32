"""`thinwire check`, `list` and `show`: what there is, and what an experiment or a run consists of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import AsJson, Imports, Task, verb
from thinwire.cli.terminal import note, out, plain_text, print_json, show_cells, show_facts, show_layers, show_list
from thinwire.core.text import visible
from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.presets import LISTS, catalog

if TYPE_CHECKING:
    from thinwire.federation.settings import Settings

Experiment = Annotated[
    str, typer.Argument(metavar="METHOD_FILE_OR_RUN", help="As for run, or the directory of a finished run.")
]
SHOWN = 20  # clients in the table; the JSON has all


@verb("out", "overwrite")
def check(
    what: Experiment = "fedavg",
    on: Task = None,
    partition: bool = False,
    plot: Path | None = None,
    replay: bool = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Validate an experiment and print its message sizes and the memory of a client, after one step of training.

    Of a finished run, check the files by their checksums. --replay simulates a deployed run with the clients that it
    accepted; it needs the data of all clients, and a machine of the same kind. Exit code 1 if a weight differs.

    Example: thinwire check fedpara+scaffold --on digits

    Example: thinwire check --on digits --partition --set task.partition.alpha=0.1 --plot clients.svg

    Example: thinwire check runs/deployed/fedavg-digits-s0-1a2b3c --replay

    Options:
        partition: Print the examples and classes of each client instead.
        plot: With --partition: draw the clients to a file: .svg, .png or .pdf.
        replay: Simulate a deployed run again, and compare the weights bit for bit.
    """
    from thinwire.runs.check import check as check_settings
    from thinwire.runs.run import settings_of

    data_dir = options["data_dir"]
    if (Path(what) / "config.toml").is_file():
        _check_run(Path(what), replay, data_dir, as_json)
        return
    if replay:
        raise ConfigError(f"--replay is for a run directory, and {what} is not one")
    settings = settings_of(what, on, options)
    if partition:
        _show_partition(settings, plot, data_dir, as_json)
        return
    facts = check_settings(settings, data_dir)
    print_json(facts) if as_json else show_facts(facts, "ready to run")


def _check_run(path: Path, replayed: bool, data_dir: Path | None, as_json: bool) -> None:
    from thinwire.runs.replay import replay
    from thinwire.runs.run_directory import RunFolder

    folder = RunFolder.open(path)
    if folder.summary() is None:  # which compares the checksums
        raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    if not replayed:
        print_json({"checksums": "match"}) if as_json else print(visible(f"{path}: all checksums match"))
        return
    found = replay(path, data_dir)
    done = f"{found.rounds} rounds, {found.uploads} accepted uploads"
    if as_json:
        print_json({**found._asdict(), "identical": found.identical})
    elif found.identical:
        print(f"{done}: the final weights are identical, bit for bit")
    else:
        since = f"; the test loss differs from round {found.first} on" if found.first else ""
        blocks = visible(", ".join(found.differ[:3]), 200)
        print(f"{done}: {len(found.differ)} blocks differ, by at most {found.largest:.3g} ({blocks}){since}")
    if not found.identical:
        raise typer.Exit(1)


def list_names(
    what: Annotated[str, typer.Argument(help=f"{', '.join(LISTS)}.")] = "methods",
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """List the known names, one per line. Methods can be combined with +, as in mapo+int8.

    Example: thinwire list models --json
    """
    items = catalog(what)
    print_json(items) if as_json else show_list(items)


@verb("out", "overwrite", "data_dir")
def show(
    what: Experiment,
    on: Task = None,
    plot: Path | None = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Print the full configuration of an experiment as TOML, or the totals and layers of a finished run.

    Example: thinwire show fedpara+scaffold --on mnist > my.toml

    Example: thinwire show runs/fedlama-digits-s0-1a2b3c --plot layers.svg

    Options:
        plot: For a run: write a chart of its layers to this file.
    """
    from thinwire.runs.config import to_table
    from thinwire.runs.run import settings_of
    from thinwire.runs.toml import dumps

    if (Path(what) / "config.toml").is_file():
        _show_run(Path(what), plot, as_json)
    elif plot:
        raise ConfigError(f"--plot draws a run directory, and {what} is not one")
    else:
        table = to_table(settings_of(what, on, options))
        print_json(table) if as_json else print(dumps(table), end="")


def _show_run(path: Path, plot: Path | None, as_json: bool) -> None:
    from thinwire.reports import figures
    from thinwire.runs.run_directory import RunFolder

    summary = RunFolder.open(path).summary()
    if summary is None:
        raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    layers = summary.get("layers", [])  # not in runs of earlier versions
    if plot and not layers:
        raise CheckpointError(f"{path} has no counts by layer, as runs of earlier versions; run it with --overwrite")
    if plot:
        what, rows = figures.layer_bars(layers, summary["rounds"])
        title = f"{summary['method']} on {summary['task']}, {path.name}"
        figures.save(figures.bars(rows, 680, title=f"{title}: {what}"), plot)
    if as_json:
        print_json(summary)
        return
    show_facts(summary, str(path))
    if layers:
        show_layers(layers, summary["rounds"])


def _show_partition(settings: Settings, plot: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Print the examples and classes of each client, of many the first and the last, and how unequal clients are."""
    from thinwire.core.key import Key
    from thinwire.data.task import describe_partition
    from thinwire.reports.figures import partition_figure, save
    from thinwire.reports.page import Cells
    from thinwire.runs.build import build_task

    task = build_task(settings.task, Key(settings.seed), data_dir)
    found = describe_partition(task)
    title, facts, rows = f"{settings.task.kind}, seed {settings.seed}", found.summary(), found.rows()
    if as_json:
        print_json({"task": settings.task.kind, "note": task.note, **facts, "rows": rows})
    else:
        for row in rows:
            ranked = sorted(row["classes"].items(), key=lambda pair: -pair[1])
            row["classes"] = ", ".join(f"{name}: {count:,}" for name, count in ranked)
        heads, cells = list(rows[0]), [[plain_text(value) for value in row.values()] for row in rows]
        if len(cells) > SHOWN:
            cells[SHOWN - 5 : -5] = [[f"... {len(cells) - SHOWN:,} more", *[""] * (len(heads) - 1)]]
        show_cells(Cells(title, [head.replace("_", " ") for head in heads], cells))
        out.print(f"{found!r}; {facts['examples']:,} examples, {facts['unused_examples']:,} of no client")
        out.print(
            "label skew: mean total variation distance between the classes of a client and those of all (0: equal); "
            "size skew: Gini coefficient of the numbers of examples (0: equal)"
        )
        if task.note:
            out.print(visible(task.note))
    if plot:
        save(partition_figure(found, title), plot)
        note(f"wrote {plot}")
