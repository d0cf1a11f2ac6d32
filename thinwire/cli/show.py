"""`thinwire check`, `thinwire list` and `thinwire show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import (
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Device,
    Imports,
    Method,
    Overrides,
    Recipe,
    Rounds,
    Seed,
    Task,
    resolve_experiment,
)
from thinwire.errors import CheckpointError, ConfigError
from thinwire.experiments.presets import LISTS, catalog


def check(
    what: Method,
    on: Task = None,
    recipe: Recipe = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Overrides = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Validate an experiment and print its message sizes and the memory of a client, after one step of training.

    Example: thinwire check fedpara+scaffold --on digits
    """
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.experiments.check import check as check_experiment

    experiment = resolve_experiment(
        what, on, set_, rounds=rounds, clients=clients, cohort=cohort, seed=seed, device=device, recipe=recipe
    )
    facts = check_experiment(experiment, data_dir)
    print_json(facts) if as_json else show_facts(facts, "ready to run")


def list_names(
    what: Annotated[str, typer.Argument(help=f"{', '.join(LISTS)}.")] = "methods",
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """List the known names, one per line. Methods can be combined with +, as in mapo+int8.

    Example: thinwire list models --json
    """
    from thinwire.cli.tables import print_json, show_list

    items = catalog(what)
    print_json(items) if as_json else show_list(items)


def show(
    what: Annotated[
        str, typer.Argument(metavar="METHOD_FILE_OR_RUN", help="As for run, or the directory of a finished run.")
    ],
    on: Task = None,
    recipe: Recipe = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Overrides = None,
    plot: Annotated[Path | None, typer.Option(help="For a run: write a chart of its layers to this SVG file.")] = None,
    as_json: AsJson = False,
    imports: Imports = None,
) -> None:
    """Print the full configuration of an experiment as TOML, or the totals and layers of a finished run.

    Example: thinwire show fedpara+scaffold --on mnist > my.toml

    Example: thinwire show runs/fedlama-digits-s0-1a2b3c --plot layers.svg
    """
    from thinwire.cli.tables import print_json
    from thinwire.experiments.config import to_table
    from thinwire.experiments.toml import dumps

    if (Path(what) / "config.toml").is_file():
        _show_run(Path(what), plot, as_json)
    elif plot:
        raise ConfigError(f"--plot draws a run directory, and {what} is not one")
    else:
        experiment = resolve_experiment(
            what, on, set_, rounds=rounds, clients=clients, cohort=cohort, seed=seed, device=device, recipe=recipe
        )
        table = to_table(experiment)
        print_json(table) if as_json else print(dumps(table), end="")


def _show_run(path: Path, plot: Path | None, as_json: bool) -> None:
    from thinwire.cli.tables import print_json, show_facts, show_layers
    from thinwire.experiments.run_directory import RunFolder
    from thinwire.reports import figures

    run = RunFolder.open(path)
    summary = run.summary()
    if summary is None:
        raise CheckpointError(f"{path} holds an unfinished run; `thinwire resume {path}` continues it")
    run.verify()
    layers = summary.get("layers", [])  # not in runs of earlier versions
    if plot and not layers:
        raise CheckpointError(f"{path} has no counts by layer, which earlier versions did not write; run it --again")
    if plot:
        what, rows = figures.layer_bars(layers, summary["rounds"])
        title = f"{summary['method']} on {summary['task']}, {path.name}"
        figures.save(figures.bars(rows, 680, title=f"{title}: {what}"), plot)
        if windows := figures.window_curves(record._asdict() for record in run.history()):
            figures.save(figures.window_figure(windows, 680, title), plot.with_stem(f"{plot.stem}-windows"))
    if as_json:
        print_json(summary)
        return
    show_facts(summary, str(path))
    if layers:
        show_layers(layers, summary["rounds"])
