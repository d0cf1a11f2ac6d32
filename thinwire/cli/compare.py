"""`thinwire compare` and `thinwire report`: tables and pages that compare methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    OnDivergence,
    Overrides,
    Quiet,
    Recipe,
    Rounds,
    RunsOut,
    Seed,
    Targets,
    Task,
    resolve_experiment,
)
from thinwire.errors import Diverged

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.run_directory import Summary
    from thinwire.experiments.search_record import SearchRecord

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
    from thinwire.cli.searches import show_searches, tuned
    from thinwire.cli.tables import print_json, show_comparison
    from thinwire.cli.terminal import print_written
    from thinwire.experiments.presets import presets
    from thinwire.experiments.records import read_run
    from thinwire.experiments.search_record import write_search
    from thinwire.experiments.tune_rate import RateSearch
    from thinwire.reports.compare import as_json as plain_rows
    from thinwire.reports.compare import table
    from thinwire.reports.report import check_page
    from thinwire.reports.report import report as write_report

    check_page([html] if html else [], ())
    if not methods:
        known = presets("methods")
        methods = [name for name in TOUR if name in known]
    first = seed or 0

    def resolved(method: str, one_seed: int) -> Experiment:
        return resolve_experiment(
            method,
            on,
            set_,
            rounds=rounds,
            clients=clients,
            cohort=cohort,
            seed=one_seed,
            device=device,
            accounting=accounting,
            on_divergence=on_divergence,
            recipe=recipe,
        )

    experiments = [resolved(method, one_seed) for method in methods for one_seed in range(first, first + seeds)]
    check_page([], target or (), experiments[0].eval.objective)
    searches: dict[str, SearchRecord] = {}
    if tune:
        search = RateSearch(rates=tune_rates, share=tune_share, extend=0)
        before = [resolved(method, tune_seed) for method in dict.fromkeys(methods)]
        experiments, searches = tuned(before, experiments, search, out, data_dir, quiet, as_json)
    summaries = _run_all(experiments, out, data_dir, again, quiet)
    for path, summary in summaries.items():
        if record := searches.get(summary["method"]):
            write_search(Path(path), record)
    rows = table(list(summaries.values()))
    if as_json:
        found = {name: {"search": record._asdict()} for name, record in searches.items()}
        print_json([{**row, **found.get(row["method"], {})} for row in plain_rows(rows)])
    else:
        task = experiments[0].task
        size = f"{task.clients} clients, {experiments[0].rounds} rounds, {seeds} seed{'s' if seeds > 1 else ''}"
        show_comparison(rows, f"{task.kind}: {size}")
        if searches:
            show_searches(searches, rows)
    page = html or out / "compare.html"
    if any(read_run(path).records for path in map(Path, summaries)):
        write_report(list(summaries), page, targets=target or ())
        print_written(page)
    exit_if_failed(summaries)


def _run_all(
    experiments: Sequence[Experiment], out: Path, data_dir: Path | None, again: bool, quiet: bool
) -> dict[str, Summary]:
    """Run the experiments one after another; returns the summary of each run directory."""
    from thinwire.cli.terminal import progress
    from thinwire.experiments.execute import default_folder, execute
    from thinwire.experiments.run_directory import RunFolder

    summaries: dict[str, Summary] = {}
    for experiment in experiments:
        label = f"{experiment.name} seed {experiment.seed}"
        path = default_folder(experiment, out)
        with progress(label, experiment.rounds, quiet, experiment.accounting) as on_round:
            try:
                summary = execute(experiment, path, data_dir=data_dir, resume=True, again=again, on_round=on_round)
            except Diverged:  # a row of the table; the other experiments still run
                summary = RunFolder(path, experiment).summary() or {}
        summaries[str(path)] = summary
    return summaries


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
