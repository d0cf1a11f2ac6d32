"""`thinwire compare` and `thinwire report`: tables and pages that compare methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

TOUR = ("fedavg", "mapo", "fedpara", "sparse", "fedlama", "thin")  # methods of `thinwire compare` without arguments


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD]...", help="Methods, combinations with +, or .toml files; by default a selection."
        ),
    ] = None,
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
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Page with charts and tables. Default: compare.html in --out."),
    ] = None,
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
    tune_rates: Annotated[
        int, typer.Option("--tune-rates", metavar="N", help="Number of rates that each method may try.")
    ] = 8,
    tune_share: Annotated[
        float, typer.Option("--tune-share", metavar="FRACTION", help="Rounds of the last rung of the search.")
    ] = 1.0,
    tune_seed: Annotated[
        int, typer.Option("--tune-seed", help="Random seed of the search; none of the seeds of the comparison.")
    ] = 100,
) -> None:
    """Train several methods on the same clients and batches, and compare accuracy and bytes in a table and a page.

    Example: thinwire compare fedavg mapo mapo+int8 fedpara+scaffold --on digits --seeds 3 --html page.html

    Example: thinwire compare fedavg mapo topk+int8 --on digits --seeds 3 --tune
    """
    from thinwire.cli.searches import maker_of, nothing_trains, search_hooks, show_searches, watch_runs
    from thinwire.cli.tables import print_json, show_comparison
    from thinwire.cli.terminal import print_written
    from thinwire.experiments.compare import compare_methods
    from thinwire.experiments.presets import presets
    from thinwire.experiments.records import read_run
    from thinwire.experiments.tune_rate import RateSearch
    from thinwire.experiments.tune_settings import NothingTrains
    from thinwire.reports.comparison import Comparison
    from thinwire.reports.report import check_page

    check_page([html] if html else [], ())
    if not methods:
        known = presets("methods")
        methods = [name for name in TOUR if name in known]
    options: dict[str, Any] = {
        "rounds": rounds,
        "clients": clients,
        "cohort": cohort,
        "device": device,
        "accounting": accounting,
    }
    options |= {"on_divergence": on_divergence, "recipe": recipe}
    options |= {"patience": patience, "objective": objective, "metrics": metric}
    first = seed or 0
    makers = [maker_of(method, on, set_, **options) for method in methods]
    check_page([], target or (), makers[0]({}).eval.objective)
    try:
        compared = compare_methods(
            makers,
            range(first, first + seeds),
            out,
            watch_runs(quiet),
            search=RateSearch(rates=tune_rates, share=tune_share, extend=0) if tune else None,
            search_seed=tune_seed,
            hooks=search_hooks(quiet, show_rungs=not (quiet or as_json)),
            data_dir=data_dir,
            again=again,
        )
    except NothingTrains as error:
        nothing_trains(error)
    found = Comparison.of(compared)
    if as_json:
        print_json(found.plain())
    else:
        one = read_run(Path(next(iter(found.runs))))
        number, trained = one.table["task"].get("clients", "own"), compared.experiments[0].rounds
        size = f"{number} clients, {trained} rounds, {seeds} seed{'s' if seeds > 1 else ''}"
        show_comparison(found.rows, f"{one.task}: {size}")
        if found.searches:
            show_searches(found.searches, found.rows)
    page = html or out / "compare.html"
    if any(read_run(path).records for path in map(Path, found.runs)):
        found.report(page, targets=target or ())
        print_written(page)
    exit_if_failed(found.runs)


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
    from thinwire.cli.tables import print_json, show_comparison
    from thinwire.cli.terminal import print_written
    from thinwire.reports.compare import as_json as plain_rows
    from thinwire.reports.compare import table
    from thinwire.reports.report import report as write_report
    from thinwire.reports.report import summaries

    groups = write_report(runs, html, md, targets=target or (), compute=compute, joules_per_megabyte=joules)
    rows = table(summaries(groups, compute))
    if as_json:
        print_json(plain_rows(rows))
    else:
        show_comparison(rows, ", ".join(dict.fromkeys(group.task for group in groups)))
    for file in (html, md):
        if file:
            print_written(file)
