"""`thinwire compare`, `sweep` and `report`: tables and pages of many runs."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thinwire.cli.execution import exit_if_failed
from thinwire.cli.options import (
    Accounting,
    Again,
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Device,
    Imports,
    Method,
    Metrics,
    Objective,
    OnDivergence,
    Overrides,
    Patience,
    Quiet,
    Recipe,
    Rounds,
    RunsOut,
    Seed,
    Targets,
    Task,
)
from thinwire.core.text import human_bytes, percent, visible

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.search.candidates import Knobs
    from thinwire.search.halving import OnRung, Rung, Trial
    from thinwire.search.table import Table
    from thinwire.search.tune import OnSearch
    from thinwire.search.validation import OnTrial

TOUR = ("fedavg", "mapo", "fedpara", "sparse", "fedlama", "thin")  # methods of `thinwire compare` without arguments
NOTHING_FOUND = 1  # exit code if nothing trains

Methods = Annotated[
    list[str] | None,
    typer.Argument(metavar="[METHOD]...", help="Methods, combinations with +, or .toml files; by default a selection."),
]
Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        metavar="KEY=V,V,...",
        help="A setting and its values; may be repeated, all combinations are tried. KEY is lr, server_lr, k, rank, "
        "density, bits, rounds, cohort, clients, epochs, steps, batch, where the method has it, or a dotted path.",
    ),
]
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Page with charts and tables. Default: in --out, named as the verb."),
]


def compare(
    methods: Methods = None,
    on: Task = None,
    recipe: Recipe = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from --seed upward.")] = 1,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    accounting: Accounting = None,
    on_divergence: OnDivergence = None,
    patience: Patience = None,
    objective: Objective = None,
    metric: Metrics = None,
    set_: Overrides = None,
    out: RunsOut = Path("runs"),
    html: Page = None,
    target: Targets = None,
    data_dir: DataDir = None,
    again: Again = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First search the learning rate of every method with the same budget (`thinwire tune`)."
        ),
    ] = False,
    tune_rates: Annotated[int, typer.Option(metavar="N", help="Number of rates that each method may try.")] = 8,
    tune_share: Annotated[float, typer.Option(metavar="FRACTION", help="Rounds of the last rung of the search.")] = 1.0,
    tune_seed: Annotated[int, typer.Option(help="Random seed of the search; none of those of the comparison.")] = 100,
) -> None:
    """Train several methods on the same clients and batches, and compare accuracy and bytes in a table and a page.

    Example: thinwire compare fedavg mapo mapo+int8 fedpara+scaffold --on digits --seeds 3 --html page.html

    Example: thinwire compare fedavg mapo topk+int8 --on digits --seeds 3 --tune
    """
    from thinwire.experiments.toml import parse_overrides
    from thinwire.reports.report import check_page
    from thinwire.search.compare import compare as run
    from thinwire.search.tune import NothingTrains

    check_page([html] if html else [], ())
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    options |= {"accounting": accounting, "on_divergence": on_divergence, "patience": patience}
    options |= {"objective": objective, "metrics": metric, "recipe": recipe, "overrides": parse_overrides(set_ or [])}
    options |= {"tune": tune, "tune_rates": tune_rates, "tune_share": tune_share, "tune_seed": tune_seed}
    options |= {"out": out, "data_dir": data_dir, "again": again, "targets": target or ()}
    options |= {"progress": not quiet, "on_search": printers(quiet, show_rungs=not (quiet or as_json))}
    try:
        table = run(methods or TOUR, on, seeds=seeds, seed=seed or 0, **options)
    except NothingTrains as error:
        nothing_trains(error)
    _show(table, table.plain(), as_json, html or out / "compare.html", targets=target or ())
    exit_if_failed({str(one.path): one.summary or {} for one in table.runs})


def sweep(
    what: Method,
    over: Over = None,
    on: Task = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from --seed upward.")] = 3,
    recipe: Recipe = None,
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="FRACTION",
            help="Fraction of each client's examples that is held out and ranks the settings. Default: they are ranked "
            "by the test set.",
        ),
    ] = None,
    device: Device = None,
    set_: Overrides = None,
    out: RunsOut = Path("runs"),
    html: Page = None,
    data_dir: DataDir = None,
    again: Again = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Run a method with every combination of some values, over the same seeds, and rank the settings.

    All settings have the same clients and batches, and differences are paired by seed. A setting of which a run
    diverges, collapses or stays at chance is listed and never the best. Finished runs are used again.

    Example: thinwire sweep mapo --on digits --over lr=0.1,0.3,1 --over k=64,128 --seeds 3

    Example: thinwire sweep flasc --on digits --over density=1/16,1/4,1 --over rank=1,8 --html sweep.html

    Example: thinwire sweep fedavg --over method.client_opt.momentum=0.0,0.9 --validation-fraction 0.1
    """
    from thinwire.experiments.toml import parse_overrides
    from thinwire.reports.report import check_page
    from thinwire.search.candidates import parse_over
    from thinwire.search.compare import sweep as run

    check_page([html] if html else [], ())
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    options |= {"recipe": recipe, "overrides": parse_overrides(set_ or []), "validation_fraction": validation_fraction}
    options |= {"out": out, "data_dir": data_dir, "again": again, "progress": not quiet}
    table = run(what, parse_over(over or ()), on, seeds=seeds, seed=seed or 0, **options)
    _show(table, {"ranked_by": table.how, "rows": table.plain()}, as_json, html or out / "sweep.html")
    if table.best is None:
        nothing_trains("no setting trains on every seed; try smaller learning rates, or more rounds")


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of run directories.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Page with charts and tables.")] = None,
    md: Annotated[Path | None, typer.Option("--md", metavar="FILE", help="Write the tables as Markdown.")] = None,
    target: Targets = None,
    compute: Annotated[
        float | None,
        typer.Option(help="Training seconds of a client per round, for the time model. Default: as measured."),
    ] = None,
    joules: Annotated[
        float | None, typer.Option(help="Joules per megabyte, for the energy model. Default: 360.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare existing runs, finished or not: accuracy against bytes, and time and energy to a target accuracy.

    Runs that differ only in their seed are averaged.

    Example: thinwire report runs --html page.html --target 0.9
    """
    from thinwire.cli.terminal import print_written
    from thinwire.reports.report import report as write_report
    from thinwire.search.table import table_of

    groups = write_report(runs, html, md, targets=target or (), compute=compute, joules_per_megabyte=joules)
    table = table_of(groups, ", ".join(dict.fromkeys(group.task for group in groups)), compute=compute)
    _show(table, table.plain(), as_json)
    for file in (html, md):
        if file:
            print_written(file)


def _show(table: Table, facts: Any, as_json: bool, page: Path | None = None, **options: Any) -> None:
    """Print a table, or facts as JSON, and write its page if a run has a finished round."""
    from thinwire.cli.tables import print_json, show_cells
    from thinwire.cli.terminal import out, print_written
    from thinwire.reports.chapters import SEARCH_HEADS, how_searched, search_cells
    from thinwire.search.table import Cells

    if as_json:
        print_json(facts)
    else:
        show_cells(table.cells(out.width), table.title)
        texts = table.notes(out.width)
        if found := {row.method: row.search for row in table.rows if row.search}:
            cells = [search_cells(method, search) for method, search in found.items()]
            show_cells(Cells(SEARCH_HEADS, cells, 2), "search before the comparison")
            texts += how_searched(list(found.values()))
        for text in texts:
            out.print(visible(text, 1000), soft_wrap=True)
    if page and any(run.records for run in table.runs):
        table.report(page, **options)
        print_written(page)


def nothing_trains(error: Exception | str) -> NoReturn:
    """Print one line and exit with 1."""
    print(visible(f"thinwire: {error}", 1000), file=sys.stderr)
    sys.exit(NOTHING_FOUND)


def printers(quiet: bool, show_rungs: bool) -> OnSearch:
    """Output of a search: a line for each run unless `quiet`, and with `show_rungs` a table for each rung."""

    def on_search(experiment: Experiment, knobs: Knobs) -> tuple[OnTrial, OnRung]:
        from thinwire.cli.tables import show_cells
        from thinwire.cli.terminal import err
        from thinwire.search.candidates import as_point, point_text, value_text
        from thinwire.search.table import Cells

        heads = [*(knob.label for knob in knobs), "validation", "loss", "rounds", "bytes", "status", ""]
        numbers = itertools.count(1)

        def on_trial(trial: Trial) -> None:
            accuracy, loss, rounds, sent, status = _trial_cells(trial)
            text = f"validation {accuracy}  loss {loss}  {rounds} rounds  {sent}  {status}".rstrip()
            if not quiet:
                point = point_text(knobs, as_point(trial.value))
                err.print(visible(f"{experiment.name} {point}  {text}", 400), soft_wrap=True)

        def on_rung(rung: Rung) -> None:
            runs = f"{len(rung.trials)} run{'s' * (len(rung.trials) > 1)} of {rung.rounds} rounds"
            title = f"rung {next(numbers)}: {experiment.name} on {experiment.task.label}: {runs}"
            rows = [
                [*map(value_text, as_point(trial.value)), *_trial_cells(trial), "goes on" * (trial.value in rung.kept)]
                for trial in rung.trials
            ]
            if show_rungs:
                show_cells(Cells(heads, rows, 0), title)

        return on_trial, on_rung

    return on_search


def _trial_cells(trial: Trial) -> tuple[str, ...]:
    """Accuracy, loss, rounds, bytes and status of a trial."""
    found = trial.measured
    loss = "-" if found.loss is None else f"{found.loss:.4g}"
    status = "" if found.status == "finished" else found.status
    return percent(found.accuracy), loss, f"{found.rounds:,}", human_bytes(found.bytes), status
