"""`thinwire compare`, `sweep`, `tune` and `report`: tables and pages of many runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thinwire.cli.options import AsJson, Jobs, Method, Quiet, Targets, Task, documented, verb
from thinwire.cli.run import exit_if_failed
from thinwire.cli.terminal import note, out as console, print_json, show_cells
from thinwire.core.text import visible

if TYPE_CHECKING:
    from thinwire.federation.settings import Settings
    from thinwire.reports.table import Table
    from thinwire.search.trials import Trial

TOUR = ("fedavg", "mapo", "fedpara", "sparse", "fedlama", "thin")  # methods of `thinwire compare` without arguments
RUNS = Path("runs")
NOTHING_FOUND = 1  # exit code if nothing trains
NO_PAGE = 1  # exit code if `thinwire report` cannot write its page

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


@verb()
def compare(
    methods: Methods = None,
    on: Task = None,
    seeds: int = 1,
    html: Page = None,
    targets: Targets = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    tune: bool = False,
    tune_rates: int = 8,
    tune_seed: int = 100,
    jobs: Jobs = 1,
    **options: Any,
) -> None:
    """Train several methods on the same clients and batches, and compare accuracy and bytes in a table and a page.

    Example: thinwire compare fedavg mapo mapo+int8 fedpara+scaffold --on digits --seeds 3 --html page.html

    Example: thinwire compare fedavg mapo topk+int8 --on digits --seeds 3 --tune --jobs 2

    Options:
        seeds: Number of seeds, from --seed upward.
        tune: First search the learning rate of every method, as `thinwire tune` does.
        tune_rates: Number of rates that each method may try.
        tune_seed: Random seed of the search; none of those of the comparison.
    """
    from thinwire.reports.report import check_page
    from thinwire.runs.run import settings_of
    from thinwire.search.compare import compare as run
    from thinwire.search.tune import NothingTrains

    names = methods or TOUR
    check_page([html] if html else [], targets or (), settings_of(names[0], on, options).eval.objective)
    how: dict[str, Any] = {"tune": tune, "tune_rates": tune_rates, "tune_seed": tune_seed, "jobs": jobs}
    how |= {} if quiet else {"on_trial": print_trial}
    try:
        table = run(names, on, seeds=seeds, progress=not quiet, **how, **options)
    except NothingTrains as error:
        nothing_trains(error)
    table = replace(table, targets=targets or ())
    _show(table, table.plain(), as_json, html or (options["out"] or RUNS) / "compare.html")
    exit_if_failed({str(one.path): one.summary or {} for one in table.runs})


@verb()
def sweep(
    what: Method,
    over: Over = None,
    on: Task = None,
    seeds: int = 3,
    jobs: Jobs = 1,
    html: Page = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run a method with every combination of some values, over the same seeds, and rank the settings.

    All settings have the same clients and batches, and differences are paired by seed. A setting of which a run
    diverges, collapses or stays at chance is listed and never the best. Finished runs are used again.

    Example: thinwire sweep mapo --on digits --over lr=0.1,0.3,1 --over k=64,128 --seeds 3 --jobs 2

    Example: thinwire sweep flasc --on digits --over density=1/16,1/4,1 --over rank=1,8 --html sweep.html

    Example: thinwire sweep fedavg --over method.client_opt.momentum=0.0,0.9 --validation-fraction 0.1

    Options:
        seeds: Number of seeds, from --seed upward.
    """
    from thinwire.reports.report import check_page
    from thinwire.search.candidates import parse_over
    from thinwire.search.compare import sweep as run

    check_page([html] if html else [])
    table = run(what, parse_over(over or ()), on, seeds=seeds, jobs=jobs, progress=not quiet, **options)
    page = html or (options["out"] or RUNS) / "sweep.html"
    _show(table, {"ranked_by": table.how, "rows": table.plain()}, as_json, page)
    if table.best is None:
        nothing_trains("no setting trains on every seed; try smaller learning rates, or more rounds")


@verb("overwrite", "log")
def tune(
    methods: Methods = None,
    on: Task = None,
    rates: int = 8,
    over: Over = None,
    flasc_s: bool = False,
    bytes: str | None = None,
    jobs: Jobs = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Find the learning rate, other settings, or a method, on held-out examples of the clients, not on the test set.

    The search is successive halving. The setting that it started from is in its last rung.

    With --over: all combinations of the given values instead of a ladder of learning rates.

    With --bytes: also several methods, by default a selection, instead of the settings of one.

    The seed of the search is 100 by default: keep it out of the seeds of a comparison.

    Example: thinwire tune mapo --on digits --jobs 2

    Example: thinwire tune mapo --on digits --over lr=0.1,0.3,1 --over k=64,128

    Example: thinwire tune fedadam --on digits --rates 4 --rounds 30

    Example: thinwire tune flasc --on digits --over rank=1,4,8 --over density=1/16,1/4,1 --flasc-s

    Example: thinwire tune fedavg mapo topk+int8 --on digits --bytes 200kB

    Options:
        rates: Number of learning rates in the first rung, a factor of 2 apart: of the clients, or of the server if its
            optimizer is not SGD, or the method sends a sketch (EvoFed).
        flasc_s: Search two settings of --over, a size and a density, with few full runs (FLASC-S).
        bytes: Find the most accurate setting, or method, that sends at most this, as 5MB.
    """
    from thinwire.runs.plugins import loaded
    from thinwire.runs.toml import written
    from thinwire.search.candidates import parse_over
    from thinwire.search.tune import NothingTrains, tune as search

    how: dict[str, Any] = {"rates": rates, "flasc_s": flasc_s, "bytes": bytes, "jobs": jobs}
    how |= {"over": parse_over(over) if over else None, **({} if quiet else {"on_trial": print_trial})}
    one = methods[0] if methods and len(methods) == 1 else methods
    try:
        found = search(one, on, **how, **options)
    except NothingTrains as error:
        nothing_trains(error)
    best = dict(found.best.point)
    again = ["thinwire", "run", best.get("method") or str(one), *(["--on", on] if on else [])]
    kept = {f"--{name}": options[name] for name in ("rounds", "clients", "cohort", "device", "recipe")}
    again += [word for flag, value in kept.items() if value is not None for word in (flag, str(value))]
    again += [word for text in options["set"] or () if not text.startswith("seed=") for word in ("--set", text)]
    again += [word for module in loaded() for word in ("--import", module)]
    again += [word for key, value in found.settings.items() for word in ("--set", f"{key}={written(value)}")]
    command = shlex.join(again)
    if as_json:
        print_json({**best, "command": command, **found.plain()})
        return
    show_cells(found.cells())
    console.print(f"{found!r}\n\n{command}", soft_wrap=True)


@documented
def report(
    runs: list[Path],
    html: Path | None = None,
    md: Path | None = None,
    targets: Targets = None,
    as_json: AsJson = False,
) -> None:
    """Compare existing runs, finished or not: accuracy against bytes, and time to a target accuracy.

    Runs that differ only in their seed are averaged.

    Example: thinwire report runs --html page.html --target 0.9

    Options:
        runs: Run directories, or folders of run directories.
        html: Page with charts and tables.
        md: Write the tables as Markdown.
    """
    from thinwire.reports.report import check_page, report as read

    check_page([file for file in (html, md) if file])
    table = read(runs, targets=targets or ())
    if not _show(table, table.plain(), as_json, html, md):
        sys.exit(NO_PAGE)


def _show(table: Table, facts: Any, as_json: bool, html: Path | None = None, md: Path | None = None) -> bool:
    """Print a table, or facts as JSON, and write its pages if a run has a finished round; returns whether they are."""
    from thinwire.reports.report import report

    if as_json:
        print_json(facts)
    else:
        for cells in table.cells():
            show_cells(cells)
        for text in table.notes():
            console.print(visible(text, 1000), soft_wrap=True)
    pages = [str(file) for file in (html, md) if file]
    if pages and any(run.records for run in table.runs):
        try:
            report(table, html, md, targets=table.targets)
        except Exception as error:  # of any kind: the runs are complete, and so is the table
            note(f"thinwire: note: the page {' or '.join(pages)} was not written ({type(error).__name__}: {error})")
            return False
        for file in pages:
            note(f"wrote {file}")
    return True


def nothing_trains(error: Exception | str) -> NoReturn:
    """Print one line and exit with 1."""
    note(f"thinwire: {error}")
    sys.exit(NOTHING_FOUND)


def print_trial(experiment: Settings, trial: Trial) -> None:
    """Print a run of a search."""
    note(f"{experiment.name} {trial.name}: {trial.outcome} after {trial.rounds} rounds")
