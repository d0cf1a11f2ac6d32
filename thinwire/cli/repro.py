"""`thinwire repro`: reproduce tables of papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.options import AsJson, DataDir, Overrides, Quiet, RunsOut


def repro(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="Tables to reproduce, or `all`; without a name, lists all tables."),
    ] = None,
    scale: Annotated[str, typer.Option(help="Size of the runs: quick, gpu or paper.")] = "quick",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel runs.")] = 1,
    budget: Annotated[
        str | None,
        typer.Option(help="Stop after this time (30m, 2h, 90s), the most valuable runs first; the next call goes on."),
    ] = None,
    set_: Overrides = None,
    out: RunsOut = Path("runs/repro"),
    md: Annotated[
        Path | None,
        typer.Option(
            "--md",
            metavar="FILE",
            help="Write a Markdown page, and a .json file with its runs; tables and runs that they hold are kept.",
        ),
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; show finished runs only.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce tables of papers: our value, the published value, their difference, and the bytes sent.

    With --md the page is extended: its other tables stay, and runs that its .json file holds are not run again.

    Example: thinwire repro mapo-3 --scale quick --set task.clients=20

    Example: thinwire repro all --scale gpu --device cuda --jobs 7 --budget 30m
    """
    from thinwire.cli.tables import print_json, show_list, show_markdown
    from thinwire.cli.terminal import print_run, print_written
    from thinwire.experiments.presets import presets, tables

    if not names:
        print_json(tables()) if as_json else show_list(tables())
        return
    from thinwire.core.units import read_seconds
    from thinwire.experiments.archive import Archive
    from thinwire.experiments.repro import by_value, load
    from thinwire.experiments.run_grids import run_grids
    from thinwire.reports.repro_page import section, update_page

    wanted = list(presets("repro")) if names == ["all"] else names
    found = [load(name, scale, device, set_ or ()) for name in wanted]
    if not no_run:
        seconds = None if budget is None else read_seconds(budget)
        grids = [one.grid for one in (found if seconds is None else by_value(found))]
        archive = Archive.read(md.with_suffix(".json")) if md else None
        run_grids(grids, out, jobs, data_dir, lambda run: print_run(run, quiet), seconds, archive)
    sections = update_page(md, found, out) if md else [section(one, out) for one in found]
    if md:
        print_written(md)
    if as_json:
        print_json({name: part._asdict() for name, part in zip(wanted, sections, strict=True)})
    elif not md:
        for part in sections:
            show_markdown(part.text)
    if not no_run and any(part.missing for part in sections):
        raise typer.Exit(1)
