"""`thinwire check`, `list` and `show`: what there is, and what an experiment or a run consists of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import AsJson, Imports, Task, verb
from thinwire.cli.terminal import note, out, print_json, show_facts, show_layers, show_list
from thinwire.core.text import visible
from thinwire.errors import CheckpointError
from thinwire.runs.presets import LISTS, catalog

if TYPE_CHECKING:
    from thinwire.federation.settings import Settings
    from thinwire.runs.run_directory import Summary

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
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Validate an experiment and print its message sizes and the memory of a client, after one step of training.

    Of a finished run, check the files by their checksums.

    Example: thinwire check fedpara+scaffold --on digits

    Example: thinwire check --on digits --partition --set task.partition.alpha=0.1 --plot clients.svg

    Example: thinwire check runs/fedavg-digits-s0-1a2b3c

    Options:
        partition: Print the examples and classes of each client instead.
        plot: With --partition: draw the clients to a file: .svg, .png or .pdf.
    """
    from thinwire.runs.check import check as check_settings
    from thinwire.runs.run import settings_of

    data_dir = options["data_dir"]
    if (Path(what) / "config.toml").is_file():
        _finished(Path(what))
        print_json({"checksums": "match"}) if as_json else print(visible(f"{what}: all checksums match"))
        return
    settings = settings_of(what, on, options)
    if partition:
        _show_partition(settings, plot, data_dir, as_json)
        return
    facts = check_settings(settings, data_dir)
    print_json(facts) if as_json else show_facts(facts, "ready to run")


def _finished(path: Path) -> Summary:
    """The totals of a finished run, whose files are verified."""
    from thinwire.runs.run_directory import RunFolder

    summary = RunFolder.open(path).summary()
    if summary is None:
        raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    return summary


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
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Print the full configuration of an experiment as TOML, or the totals and layers of a finished run.

    Example: thinwire show fedpara+scaffold --on mnist > my.toml

    Example: thinwire show runs/fedlama-digits-s0-1a2b3c
    """
    from thinwire.runs.config import to_table
    from thinwire.runs.run import settings_of
    from thinwire.runs.toml import dumps

    if (Path(what) / "config.toml").is_file():
        summary = _finished(Path(what))
        if as_json:
            print_json(summary)
            return
        show_facts(summary, what)
        if layers := summary.get("layers"):  # not in runs of earlier versions
            show_layers(layers)
    else:
        table = to_table(settings_of(what, on, options))
        print_json(table) if as_json else print(dumps(table), end="")


def _show_partition(settings: Settings, plot: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Print the examples and classes of each client, of many the first and the last, and how unequal clients are."""
    from thinwire.core.key import Key
    from thinwire.data.task import describe_partition
    from thinwire.reports.figures import partition_figure, save
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
        if len(rows) > SHOWN:
            rows[SHOWN - 5 : -5] = [{"client": f"... {len(rows) - SHOWN:,} more"}]
        show_list(rows, title)
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
