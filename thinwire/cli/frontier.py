"""`thinwire frontier`: accuracy against bytes of many methods, after equal searches, with the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import AsJson, DataDir, Imports, Overrides, Quiet, Recipe, Rounds, RunsOut, Task


def frontier(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROW]...",
            help="Rows of the documented set by label, or methods (`thinwire list`); by default the whole set.",
        ),
    ] = None,
    on: Task = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 0.")] = 3,
    rounds: Rounds = None,
    rates: Annotated[int, typer.Option(min=1, help="Learning rates that every method tries; 1 for no search.")] = 3,
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="Rounds of the search, as a fraction of those of the run.")
    ] = 0.5,
    recipe: Recipe = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel runs.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Stop after this time (15m, 2h): the search first, then seed by seed; the next call goes on."
        ),
    ] = None,
    set_: Overrides = None,
    out: RunsOut = Path("runs/frontier"),
    md: Annotated[
        Path | None,
        typer.Option(
            "--md",
            metavar="FILE",
            help="The page, with a chart (.svg) and the runs (.json) beside it; runs that this .json file holds are "
            "not run again. Default: TASK.md in --out.",
        ),
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; show finished runs only.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Measure accuracy against bytes for a documented set of methods and densities, and draw the Pareto front.

    Every method tries the same number of learning rates on a seed of its own, judged by examples that clients hold out;
    then all run on the same seeds. Finished runs are used again: those in --out, and with --md those that the .json
    file beside the page holds, of any day and machine.

    Example: thinwire frontier --on digits --rounds 20 --jobs 2

    Example: thinwire frontier --on fashion-mnist --rounds 300 --device cuda --jobs 15 --budget 15m

    Example: thinwire frontier fedavg thin "thin, k/4" mapo+int8 --on digits --seeds 1 --rates 1
    """
    from thinwire.cli.tables import print_json, show_markdown
    from thinwire.cli.terminal import print_run, print_written
    from thinwire.core.units import read_seconds
    from thinwire.experiments.archive import Archive, Runs
    from thinwire.experiments.frontier import Where, Work, frontier_grid, rows_of
    from thinwire.experiments.run_grids import run_grids
    from thinwire.experiments.task_files import folder_name
    from thinwire.reports.frontier_page import frontier_page

    seconds = None if budget is None else read_seconds(budget)
    where = Where(on, recipe, device, tuple(set_ or ()), data_dir)
    archive = Archive.read(md.with_suffix(".json")) if md else Archive()
    grid = frontier_grid(rows_of(methods or ()), where, Work(seeds, rates, share, rounds))
    if not no_run:
        run_grids([grid], out, jobs, data_dir, lambda run: print_run(run, quiet), seconds, archive)
    path = md or out / f"{folder_name(where.experiment().task.label)}.md"
    words = ["thinwire", "frontier", *(methods or ()), *(("--on", on) if on else ()), "--seeds", str(seeds)]
    words += ["--rates", str(rates), "--share", f"{share:g}", *(("--rounds", str(rounds)) if rounds else ())]
    words += [*(("--recipe", recipe) if recipe else ()), *(("--device", device) if device != "cpu" else ())]
    words += [word for change in set_ or () for word in ("--set", change)]
    words += ["--md", str(md)] if md else []
    page = frontier_page(grid, Runs(out, archive), words, path.stem)
    page.write(path)
    if as_json:
        print_json(page.values)
    else:
        show_markdown(page.text)
    for file in (path, path.with_suffix(".svg"), path.with_suffix(".json")):
        print_written(file)
    if page.missing and not no_run:
        raise typer.Exit(1)
