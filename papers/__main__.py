"""The command line: `python -m papers VERB`, in a checkout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.page import write_part
from papers import message_sizes, published, studies
from papers.archive import Archive, Runs
from papers.frontier import Where, Work, frontier_grid, rows_of
from papers.frontier_page import frontier_page, rate_tried, rates_table
from papers.grid_page import archive, load_grid, run_lines, write_page
from papers.page import section, update_page, without_old
from papers.runs import print_run, read_seconds, run_grids
from papers.tables import by_value, listed, load, names
from thinwire.cli.app import main
from thinwire.cli.options import AsJson, DataDir, Imports, Jobs, Quiet, Task, documented
from thinwire.cli.terminal import note, print_json, show_list
from thinwire.core.text import visible
from thinwire.runs.files import write_all
from thinwire.runs.task_files import folder_name

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tables of papers beside ours, frontiers of accuracy against bytes, and grids of runs.",
)
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for `thinwire run`.")]
Recipe = Annotated[str | None, typer.Option(metavar="NAME", help="As for `thinwire run`.")]
Rounds = Annotated[int | None, typer.Option(help="Number of communication rounds.")]
RunsOut = Annotated[Path, typer.Option("--out", help="Folder of the run directories; finished runs are reused.")]
Budget = Annotated[
    str | None,
    typer.Option(help="Stop after this time (30m, 2h, 90s), the most valuable runs first; the next call goes on."),
]
NoRun = Annotated[bool, typer.Option("--no-run", help="Run nothing; show finished runs only.")]
Docs = Annotated[Path | None, typer.Option(help="Write into this documentation folder.")]


def show(text: str) -> None:
    """Print Markdown unchanged: tables are wide, and scripts may read them."""
    print("\n".join(visible(line, len(line)) for line in text.split("\n")))


def seconds(budget: str | None) -> float | None:
    """A budget in seconds."""
    return None if budget is None else read_seconds(budget)


@app.command("list")
def list_tables(as_json: AsJson = False) -> None:
    """List the tables that can be reproduced, and those that cannot, with the reason."""
    print_json(listed()) if as_json else show_list(listed())


@app.command()
def repro(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE...", help="Tables to reproduce, or `all`.")],
    scale: Annotated[str, typer.Option(help="Size of the runs: quick, gpu or paper.")] = "quick",
    device: Device = "cpu",
    jobs: Jobs = 1,
    budget: Budget = None,
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
    no_run: NoRun = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce tables of papers: our value, the published value, their difference, and the bytes sent.

    With --md the page is extended: its other tables stay, and runs that its .json file holds are not run again.

    Example: python -m papers repro mapo-3 --scale quick --set task.clients=20

    Example: python -m papers repro all --scale gpu --device cuda --jobs 7 --budget 30m
    """
    wanted = names() if tables == ["all"] else tables
    found = [load(name, scale, device, set_ or ()) for name in wanted]
    if not no_run:
        until = seconds(budget)
        grids = [one.grid for one in (found if until is None else by_value(found))]
        known = without_old(Archive.read(md.with_suffix(".json"))) if md else None
        run_grids(grids, out, jobs, data_dir, functools.partial(print_run, quiet=quiet), until, known)
    sections = update_page(md, found, out)[: len(found)] if md else [section(one, out) for one in found]
    if md:
        note(f"wrote {md}")
    if as_json:
        found_values = [{key: value for key, value in part._asdict().items() if key != "rows"} for part in sections]
        print_json(dict(zip(wanted, found_values, strict=True)))
    elif not md:
        for part in sections:
            show(part.text)
    if not no_run and any(part.missing for part in sections):
        raise typer.Exit(1)


@app.command()
def frontier(
    rows: Annotated[
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
    device: Device = "cpu",
    jobs: Jobs = 1,
    budget: Budget = None,
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
    no_run: NoRun = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Measure accuracy against bytes for a documented set of methods and densities, and draw the Pareto front.

    Every method tries the same number of learning rates on a seed of its own, judged by examples that clients hold out;
    then all run on the same seeds. Finished runs are used again: those in --out, and with --md those that the .json
    file beside the page holds, of any day and machine.

    Example: python -m papers frontier --on digits --rounds 20 --jobs 2

    Example: python -m papers frontier --on fashion-mnist --rounds 300 --device cuda --jobs 15 --budget 15m

    Example: python -m papers frontier fedavg thin "thin, k/4" mapo+int8 --on digits --seeds 1 --rates 1
    """
    until = seconds(budget)
    where = Where(on, recipe, device, tuple(set_ or ()), data_dir)
    known = Archive.read(md.with_suffix(".json")) if md else Archive()
    grid = frontier_grid(rows_of(rows or ()), where, Work(seeds, rates, share, rounds))
    if not no_run:
        run_grids([grid], out, jobs, data_dir, functools.partial(print_run, quiet=quiet), until, known)
    path = md or out / f"{folder_name(where.experiment().task.label)}.md"
    words = ["python", "-m", "papers", "frontier", *(rows or ()), *(("--on", on) if on else ()), "--seeds", str(seeds)]
    words += ["--rates", str(rates), "--share", f"{share:g}", *(("--rounds", str(rounds)) if rounds else ())]
    words += [*(("--recipe", recipe) if recipe else ()), *(("--device", device) if device != "cpu" else ())]
    words += [word for change in set_ or () for word in ("--set", change)]
    words += ["--md", str(md)] if md else []
    page = frontier_page(grid, Runs(out, known), words, path.stem)
    page.write(path)
    print_json(page.values) if as_json else show(page.text)
    for file in (path, path.with_suffix(".svg"), path.with_suffix(".json")):
        note(f"wrote {file}")
    if page.missing and not no_run:
        raise typer.Exit(1)


@app.command()
@documented
def rates(
    rows: Annotated[list[str] | None, typer.Argument(metavar="[ROW]...", help="Rows of the frontier.")] = None,
    on: str = "fashion-mnist",
    factor: list[float] = [0.25, 1.0, 4.0],  # noqa: B006
    rounds: int = 20,
    steps: int = 0,
    file: Annotated[Path, typer.Option("--json", help="The values of all runs; those of new ones are added.")] = Path(
        "docs/frontier/rates.jsonl"
    ),
    no_run: NoRun = False,
    docs: Docs = None,
) -> None:
    """Try learning rates over orders of magnitude in short runs: where the search of a frontier should be centered.

    As in that search: seed 100, a whole schedule, judged by the accuracy of the clients on the tenth of their examples
    that they hold out. The test set is not used.

    Options:
        on: The task.
        factor: Factors of the rate of a row; may be repeated.
        rounds: Number of communication rounds.
        steps: Local steps; 0 for those of the task.
    """
    todo = [] if no_run else frontier_grid(rows_of(rows or ()), Where(on), Work(rates=1)).content["rows"]
    for row in todo:
        for one in factor:
            with file.open("a") as lines:
                lines.write(json.dumps(rate_tried(on, row, one, rounds, steps)) + "\n")
    text = rates_table([json.loads(line) for line in file.read_text().splitlines()])
    show(text)
    if docs:
        write_part(docs / "frontier.md", "rates", text, "python -m papers rates --no-run --docs docs")


@app.command("grid")
def grid_verb(
    grids: Annotated[list[str], typer.Argument(metavar="GRID...", help="Names of files in papers/grids.")],
    device: Device = "cpu",
    jobs: Jobs = 1,
    budget: Budget = None,
    set_: Overrides = None,
    out: RunsOut = Path("runs/grids"),
    docs: Annotated[Path, typer.Option(help="The folder of the pages.")] = Path("docs/results"),
    no_run: NoRun = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Run grids of experiments, and write the page of each; runs that the .json files of the pages hold are kept.

    Example: python -m papers grid mapo-fashion --jobs 2 --device cuda
    """
    found = {name: load_grid(name, device, set_ or ()) for name in grids}
    runs = Runs(out, archive(found.values(), docs))
    if not no_run:
        on_run = functools.partial(print_run, quiet=quiet)
        run_grids(list(found.values()), out, jobs, data_dir, on_run, seconds(budget), runs.archive)
    for name, grid in found.items():
        show(write_page(name, grid, runs, docs))


@app.command("published")
@documented
def published_verb(docs: Path = Path("docs"), chance: bool = False, data_dir: DataDir = None) -> None:
    """Write the tables of all published pages again from their JSON files; runs nothing.

    Options:
        docs: The documentation folder.
        chance: First write chance.json from the datasets.
    """
    if chance:
        published.write_chance(docs / "chance.json", data_dir)
    published.write_published(docs)


@app.command()
def sizes(docs: Docs = None) -> None:
    """Message sizes of every preset in a round, and of federated LoRA, for the pages of methods."""
    for text in message_sizes.sizes(docs):
        show(text)


@app.command()
@documented
def sparseloco(search: bool = False, against: bool = False, out: RunsOut = Path("runs"), docs: Docs = None) -> None:
    """Bits that SparseLoCo takes for a value, its search, or its results, for its page.

    Options:
        search: Search settings on digits.
        against: Compare with FedAvg on digits.
    """
    part = "search" if search else "against" if against else "bits"
    text = studies.searched(out) if search else studies.against(out) if against else studies.bits()
    show(text)
    if docs:
        option = "" if part == "bits" else f" --{part}"
        command = f"python -m papers sparseloco{option} --docs docs"
        write_part(docs / "methods" / "sparseloco.md", part, text, command)


@app.command("fedlama-share")
def fedlama_share(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help='Runs of FedLAMA with rules = "public".')],
    md: Annotated[Path | None, typer.Option("--md", metavar="FILE", help="Write the page.")] = None,
) -> None:
    """The share of FedAvg's bytes that FedLAMA sends, by quarters of a run."""
    text = studies.share_page(runs)
    md.write_text(text) if md else show(text)


@app.command("flasc-s")
def flasc_s(
    device: Device = "cpu",
    jobs: Jobs = 1,
    rounds: int = 40,
    seeds: int = 3,
    out: RunsOut = Path("runs/flasc-s"),
    docs: Annotated[Path, typer.Option(help="The folder of the page.")] = Path("docs/results"),
    no_run: NoRun = False,
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """The search of FLASC-S against the whole grid of ranks and densities, on 20 Newsgroups."""
    if not no_run:
        grids = [studies.flasc_grid(alpha, rounds, seeds, device) for alpha in studies.ALPHAS]
        run_grids(grids, out, jobs, data_dir, functools.partial(print_run, quiet=quiet))
    text, values = studies.flasc_page(out, rounds, seeds, device)
    write_all(docs, {"flasc-s.md": text.encode(), "flasc-s.json": run_lines(values).encode()})
    show(text)


if __name__ == "__main__":
    main(app, "python -m papers")
