"""`thinwire sweep`: a method with every combination of some values, over the same seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli.options import (
    Again,
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Device,
    Imports,
    Method,
    Overrides,
    Quiet,
    Recipe,
    Rounds,
    RunsOut,
    Seed,
    Task,
)

if TYPE_CHECKING:
    from thinwire.reports.sweep import Sweep

Over = Annotated[
    list[str] | None,
    typer.Option(
        "--over",
        metavar="KEY=V,V,...",
        help="A setting and its values; may be repeated, all combinations are tried. KEY is lr, server_lr, k, rank, "
        "density, bits, rounds, cohort, clients, epochs, steps, batch, where the method has it, or a dotted path.",
    ),
]


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
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Page with charts and tables. Default: sweep.html in --out."),
    ] = None,
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
    from thinwire.cli.searches import maker_of, nothing_trains, watch_runs
    from thinwire.cli.tables import print_json
    from thinwire.cli.terminal import print_written
    from thinwire.experiments.knobs import parse_over
    from thinwire.experiments.records import read_run
    from thinwire.reports.report import check_page
    from thinwire.reports.sweep import sweep_of

    check_page([html] if html else [], ())
    held = [] if validation_fraction is None else [f"task.validation_fraction={validation_fraction!r}"]
    options = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    make = maker_of(what, on, [*(set_ or ()), *held], recipe=recipe, **options)
    first = seed or 0
    found = sweep_of(
        make,
        parse_over(over or ()),
        range(first, first + seeds),
        out,
        watch_runs(quiet),
        data_dir=data_dir,
        again=again,
    )
    if as_json:
        print_json({"ranked_by": found.how, "seeds": list(found.seeds), "rows": found.plain()})
    else:
        _show(found)
    page = html or out / "sweep.html"
    if any(read_run(path).records for row in found.rows for path in row.runs):
        found.report(page)
        print_written(page)
    if found.best is None:
        nothing_trains("no setting trains on every seed; try smaller learning rates, or more rounds")


def _show(found: Sweep) -> None:
    """Print the table, what ranks, and the command of the best setting."""
    from thinwire.cli.searches import show_cells
    from thinwire.cli.terminal import out as console

    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    show_cells(found.cells(), f"{found.method} on {found.task}: {len(found.rows)} settings, {seeds}")
    points = ", in percentage points" if found.ranked_by.name == "accuracy" else ""
    console.print(
        f"mean ± standard deviation over seeds; ranked by {found.how}; to the best: mean difference to the best "
        f"setting on the same seeds ± half its 95 % interval{points}",
        soft_wrap=True,
    )
    if not found.by_validation:
        console.print("the test set ranks: choose settings by --validation-fraction 0.1, or by `thinwire tune`")
