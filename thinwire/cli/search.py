"""`thinwire compare`, `sweep`, `tune` and `report`: tables and pages of many runs."""

from __future__ import annotations

import itertools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from thinwire.cli.options import AsJson, Method, Quiet, Targets, Task, verb
from thinwire.cli.run import exit_if_failed
from thinwire.cli.terminal import err, out as console, print_json, print_written, show_cells, show_facts
from thinwire.core.text import human_bytes, percent, visible

if TYPE_CHECKING:
    from thinwire.federation.settings import Settings
    from thinwire.search.candidates import Knobs
    from thinwire.search.halving import OnRung, OnTrial, Rung, Trial
    from thinwire.search.table import Table
    from thinwire.search.tune import OnSearch, Tuned

TOUR = ("fedavg", "mapo", "fedpara", "sparse", "fedlama", "thin")  # methods of `thinwire compare` without arguments
RUNS = Path("runs")
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


@verb()
def compare(
    methods: Methods = None,
    on: Task = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from --seed upward.")] = 1,
    html: Page = None,
    targets: Targets = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First search the learning rate of every method with the same budget (`thinwire tune`)."
        ),
    ] = False,
    tune_rates: Annotated[int, typer.Option(metavar="N", help="Number of rates that each method may try.")] = 8,
    tune_share: Annotated[float, typer.Option(metavar="FRACTION", help="Rounds of the last rung of the search.")] = 1.0,
    tune_seed: Annotated[int, typer.Option(help="Random seed of the search; none of those of the comparison.")] = 100,
    **options: Any,
) -> None:
    """Train several methods on the same clients and batches, and compare accuracy and bytes in a table and a page.

    Example: thinwire compare fedavg mapo mapo+int8 fedpara+scaffold --on digits --seeds 3 --html page.html

    Example: thinwire compare fedavg mapo topk+int8 --on digits --seeds 3 --tune
    """
    from thinwire.reports.report import check_page
    from thinwire.search.table import compare as run
    from thinwire.search.tune import NothingTrains

    check_page([html] if html else [], ())
    how: dict[str, Any] = {"tune": tune, "tune_rates": tune_rates, "tune_share": tune_share, "tune_seed": tune_seed}
    how["on_search"] = printers(quiet, show_rungs=not (quiet or as_json))
    try:
        table = run(methods or TOUR, on, seeds=seeds, targets=targets or (), progress=not quiet, **how, **options)
    except NothingTrains as error:
        nothing_trains(error)
    _show(table, table.plain(), as_json, html or (options["out"] or RUNS) / "compare.html", targets=targets or ())
    exit_if_failed({str(one.path): one.summary or {} for one in table.runs})


@verb()
def sweep(
    what: Method,
    over: Over = None,
    on: Task = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from --seed upward.")] = 3,
    html: Page = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run a method with every combination of some values, over the same seeds, and rank the settings.

    All settings have the same clients and batches, and differences are paired by seed. A setting of which a run
    diverges, collapses or stays at chance is listed and never the best. Finished runs are used again.

    Example: thinwire sweep mapo --on digits --over lr=0.1,0.3,1 --over k=64,128 --seeds 3

    Example: thinwire sweep flasc --on digits --over density=1/16,1/4,1 --over rank=1,8 --html sweep.html

    Example: thinwire sweep fedavg --over method.client_opt.momentum=0.0,0.9 --validation-fraction 0.1
    """
    from thinwire.reports.report import check_page
    from thinwire.search.candidates import parse_over
    from thinwire.search.table import sweep as run

    check_page([html] if html else [], ())
    table = run(what, parse_over(over or ()), on, seeds=seeds, progress=not quiet, **options)
    page = html or (options["out"] or RUNS) / "sweep.html"
    _show(table, {"ranked_by": table.how, "rows": table.plain()}, as_json, page)
    if table.best is None:
        nothing_trains("no setting trains on every seed; try smaller learning rates, or more rounds")


@verb("overwrite")
def tune(
    methods: Methods = None,
    on: Task = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The rate to search. Default: method.client_opt.lr; method.server_opt.lr if the server optimizer is "
            "not SGD, or the method sends a sketch (EvoFed).",
        ),
    ] = None,
    rates: Annotated[
        int, typer.Option(metavar="N", help="Number of rates in the first rung, a factor of 2 apart.")
    ] = 8,
    over: Over = None,
    flasc_s: Annotated[
        bool,
        typer.Option(
            "--flasc-s", help="Search two settings of --over, a size and a density, with few full runs (FLASC-S)."
        ),
    ] = False,
    bytes: Annotated[
        str | None,
        typer.Option("--bytes", metavar="BYTES", help="Find the most accurate method that sends at most this, as 5MB."),
    ] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Find the method that reaches this accuracy with the fewest bytes, as 0.84.")
    ] = None,
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="Rounds of the last rung, as a fraction of the run's.")
    ] = 1.0,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Stop after this many bytes sent, such as 500MB.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Find the learning rate, other settings, or a method, on held-out examples of the clients, not on the test set.

    The search is successive halving. What it recommends is then run in full, beside the setting that it started from.

    With --over: all combinations of the given values instead of a ladder of learning rates.

    With --bytes or --accuracy: several methods, by default a selection, instead of the settings of one.

    The seed of the search is 100 by default: keep it out of the seeds of a comparison.

    Example: thinwire tune mapo --on digits

    Example: thinwire tune mapo --on digits --over lr=0.1,0.3,1 --over k=64,128

    Example: thinwire tune fedadam --on digits --rate method.server_opt.lr --rates 4 --share 0.5 --budget 50MB

    Example: thinwire tune flasc --on digits --over rank=1,4,8 --over density=1/16,1/4,1 --flasc-s

    Example: thinwire tune fedavg mapo topk+int8 --on digits --bytes 200kB
    """
    from thinwire.runs.plugins import loaded
    from thinwire.search.candidates import parse_over
    from thinwire.search.tune import NothingTrains, tune as search

    how: dict[str, Any] = {"rate": rate, "rates": rates, "flasc_s": flasc_s, "bytes": bytes, "accuracy": accuracy}
    how |= {"share": share, "budget": budget, "over": parse_over(over) if over else None}
    one = methods[0] if methods and len(methods) == 1 else methods
    try:
        found = search(one, on, **how, on_search=printers(quiet, show_rungs=not as_json), **options)
    except NothingTrains as error:
        nothing_trains(error)
    several = "method" in found.knobs[0].paths
    again = ["thinwire", "run", str(found.confirmation.value) if several else str(one), *(["--on", on] if on else [])]
    kept = {name: options[name] for name in ("rounds", "clients", "cohort", "device", "recipe")}
    again += [word for name, value in kept.items() if value is not None for word in (f"--{name}", str(value))]
    again += [word for text in options["set"] or () if not text.startswith("seed=") for word in ("--set", text)]
    again += [word for module in loaded() for word in ("--import", module)]
    _show_tuned(found, shlex.join([*again, *found.words]), as_json)


def _show_tuned(tuned: Tuned, command: str, as_json: bool) -> None:
    """Print the result of a search."""
    from thinwire.search.candidates import as_point, point_text

    found, full = tuned.found, tuned.confirmation
    is_rate = isinstance(found.value, float)

    def plain(value: Any) -> dict[str, Any]:
        return dict(zip((knob.label for knob in tuned.knobs), as_point(value), strict=True))

    def run_facts(trial: Trial) -> dict[str, Any]:
        return {key: value for key, value in trial._asdict().items() if key != "value"}

    facts: dict[str, Any] = {"searched": ", ".join(path for knob in tuned.knobs for path in knob.paths)}
    facts |= {**plain(full.value), "best_of_the_search": point_text(tuned.knobs, as_point(found.value))}
    facts |= {"full_run": full.text, "chosen_by": tuned.chosen_by, "seed": tuned.seed, "tried": len(found.tried)}
    facts |= {"rounds_of_the_search": found.rounds, "bytes_of_the_search": found.bytes}
    at_end = is_rate and full.value in (found.tried[0], found.tried[-1])
    start_is_better = full.is_start and full.start is not None
    if as_json:
        rungs = [
            {
                "rounds": rung.rounds,
                "trials": [{"settings": plain(one.value), **run_facts(one)} for one in rung.trials],
                "kept": [plain(value) for value in rung.kept],
            }
            for rung in found.rungs
        ]
        runs = {name: one and run_facts(one) for name, one in (("result", full.found), ("start", full.start))}
        facts |= {"at_an_end": at_end, "stopped": found.stopped, "settings": tuned.settings, "command": command}
        facts |= {"confirmation": {**runs, "rounds": full.rounds, "start_is_better": start_is_better}, "rungs": rungs}
        print_json(facts)
        return
    facts |= {"at_an_end": "yes; a better rate may lie beyond" if at_end else "no"} if is_rate else {}
    facts["stopped"] = "by the budget; the best so far" if found.stopped else "search complete"
    show_facts(facts, "search")
    if start_is_better:
        text = f"thinwire: note: {full.text}; {facts['best_of_the_search']} is not recommended"
        err.print(visible(text, 500), soft_wrap=True)
    console.print(command, soft_wrap=True)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of run directories.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Page with charts and tables.")] = None,
    md: Annotated[Path | None, typer.Option("--md", metavar="FILE", help="Write the tables as Markdown.")] = None,
    targets: Targets = None,
    compute: Annotated[
        float | None,
        typer.Option(help="Training seconds of a client per round, for the time model. Default: as measured."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare existing runs, finished or not: accuracy against bytes, and time to a target accuracy.

    Runs that differ only in their seed are averaged.

    Example: thinwire report runs --html page.html --target 0.9
    """
    from thinwire.reports.report import report as write_report
    from thinwire.search.table import table_of

    groups = write_report(runs, html, md, targets=targets or (), compute=compute)
    table = table_of(groups, ", ".join(dict.fromkeys(group.task for group in groups)), compute=compute)
    _show(table, table.plain(), as_json)
    for file in (html, md):
        if file:
            print_written(file)


def _show(table: Table, facts: Any, as_json: bool, page: Path | None = None, **options: Any) -> None:
    """Print a table, or facts as JSON, and write its page if a run has a finished round."""
    from thinwire.reports.chapters import SEARCH_HEADS, how_searched, search_cells
    from thinwire.reports.page import Cells

    if as_json:
        print_json(facts)
    else:
        show_cells(table.cells())
        texts = table.notes()
        if found := {row.method: row.search for row in table.rows if row.search}:
            cells = [search_cells(method, search) for method, search in found.items()]
            show_cells(Cells("search before the comparison", SEARCH_HEADS, cells, left=2))
            texts += how_searched(list(found.values()))
        for text in texts:
            console.print(visible(text, 1000), soft_wrap=True)
    if page and any(run.records for run in table.runs):
        table.report(page, **options)
        print_written(page)


def nothing_trains(error: Exception | str) -> NoReturn:
    """Print one line and exit with 1."""
    print(visible(f"thinwire: {error}", 1000), file=sys.stderr)
    sys.exit(NOTHING_FOUND)


def printers(quiet: bool, show_rungs: bool) -> OnSearch:
    """Output of a search: a line for each run unless `quiet`, and with `show_rungs` a table for each rung."""

    def on_search(experiment: Settings, knobs: Knobs) -> tuple[OnTrial, OnRung]:
        from thinwire.reports.page import Cells
        from thinwire.search.candidates import as_point, point_text, value_text

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
                show_cells(Cells(title, heads, rows, left=0))

        return on_trial, on_rung

    return on_search


def _trial_cells(trial: Trial) -> tuple[str, ...]:
    """Accuracy, loss, rounds, bytes and status of a trial."""
    loss = "-" if trial.loss is None else f"{trial.loss:.4g}"
    status = "" if trial.status == "finished" else trial.status
    return percent(trial.accuracy), loss, f"{trial.rounds:,}", human_bytes(trial.bytes), status
