"""`thinwire plan`: recommend a method for a target accuracy or a budget of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import AsJson, DataDir, Imports, Overrides, Quiet, Recipe, Rounds, RunsOut, Task

if TYPE_CHECKING:
    from thinwire.experiments.frontier import Where
    from thinwire.reports.frontier import Row
    from thinwire.reports.recommend import Estimate, Wish

SHOWN = 5  # estimates in the table
PILOT_SHARE = 0.25


def plan(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROW]...", help="Rows of a pilot, as for `thinwire frontier`; by default all."),
    ] = None,
    on: Task = None,
    target: Annotated[
        float | None, typer.Option(metavar="ACCURACY", help="The accuracy to reach with few bytes, such as 0.84.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="The bytes that may be sent, such as 5MB.")
    ] = None,
    rounds: Rounds = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs",
            metavar="PATH",
            help="Run directories, folders of them, or .json files of `thinwire frontier`; may be repeated. "
            "Default: --out.",
        ),
    ] = None,
    pilot: Annotated[
        float,
        typer.Option(metavar="FRACTION", help="Rounds of the pilot, as a fraction of those allowed; 0 for none."),
    ] = PILOT_SHARE,
    recipe: Recipe = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel runs of the pilot.")] = 1,
    set_: Overrides = None,
    out: RunsOut = Path("runs/frontier"),
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Recommend a method and its settings for a target accuracy or a budget of bytes, and say what to expect.

    Runs of the same task that are there decide; without any, a short pilot of every method is run and extrapolated. The
    recommendation is written as an experiment file.

    Example: thinwire plan --on digits --target 0.95

    Example: thinwire plan --on fashion-mnist --budget 5MB --runs docs/frontier/fashion-mnist.json
    """
    from thinwire.cli.tables import print_json
    from thinwire.experiments.experiment import to_table
    from thinwire.experiments.frontier import Where
    from thinwire.reports.recommend import measured, rows_there

    wish = _wish(target, budget)
    where = Where(on, recipe, device, tuple(set_ or ()), data_dir)
    experiment = where.experiment(settings={"rounds": rounds} if rounds else {})
    wish = wish._replace(rounds=experiment.rounds)
    there = list(runs) if runs else [out] if any(out.glob("*/config.toml")) else []
    rows = rows_there(there, to_table(experiment))
    found, source = measured(rows, wish), f"{len(rows)} methods with runs on this task"
    if not rows and pilot:
        rows, found = _pilot(methods or [], where, wish, pilot, (jobs, out, quiet))
        source = f"a pilot of {len(rows)} methods"
    if not found:
        _nothing(rows, wish, experiment.task.label)
    file = _write(found[0], wish, out, experiment.task.label)
    if as_json:
        print_json({"from": source, "file": str(file), "estimates": [one.plain() for one in found]})
    else:
        _show(found, wish, source, file)


def _wish(target: float | None, budget: str | None) -> Wish:
    """What is wanted; exactly one of both."""
    from thinwire.core.units import read_bytes
    from thinwire.errors import ConfigError
    from thinwire.reports.recommend import Wish

    if (target is None) == (budget is None):
        raise ConfigError("give a target or a budget: --target 0.84, or --budget 5MB")
    if target is not None and not 0 < target < 1:
        raise ConfigError(f"target must be an accuracy between 0 and 1, not {target:g}; write for example 0.84")
    sent = None if budget is None else read_bytes(budget)
    if sent is not None and sent < 1:
        raise ConfigError(f"budget must be 1 byte or more, not {budget}; write for example 5MB")
    return Wish(target, sent, 0)


def _pilot(
    methods: list[str], where: Where, wish: Wish, share: float, how: tuple[int, Path, bool]
) -> tuple[list[Row], list[Estimate]]:
    """Run every method for two lengths; the rows of the longer one, and the estimates."""
    from thinwire.cli.terminal import print_run
    from thinwire.errors import ConfigError
    from thinwire.experiments.frontier import Work, frontier_grid, rows_of
    from thinwire.experiments.run_grids import run_grids
    from thinwire.reports.frontier import rows_of_grid
    from thinwire.reports.recommend import from_pilot

    jobs, out, quiet = how
    length = round(share * wish.rounds)
    if not 0 < share <= 1 or length < 2:
        raise ConfigError(
            f"the pilot needs 2 rounds or more, a share of {wish.rounds}, not {share:g}; write --pilot 0.5"
        )
    folder, given = out / "pilot", rows_of(methods)
    grids = [frontier_grid(given, where, Work(1, 1, 1.0, n)) for n in (length // 2, length)]
    run_grids(grids, folder, jobs, where.data_dir, lambda run: print_run(run, quiet))
    short, long = (rows_of_grid(grid, folder) for grid in grids)
    return long, from_pilot(short, long, wish)


def _nothing(rows: list[Row], wish: Wish, task: str) -> None:
    """Print why nothing is recommended, in one line, and exit with 1."""
    from thinwire.cli.searches import nothing_trains
    from thinwire.core.units import human_bytes, percent
    from thinwire.reports.recommend import nearest

    what = f"an accuracy of {percent(wish.target)}" if wish.target is not None else human_bytes(wish.budget or 0)
    best = nearest(rows)
    if best is None:
        nothing_trains(
            f"no run on {task} says anything about {what}; write --pilot 0.25, or `thinwire frontier --on {task}`"
        )
    value = best.value()
    end = f"{best.label} ended at {percent(value.mean if value else None)} with {human_bytes(best.bytes)}"
    nothing_trains(
        f"none of {len(rows)} methods is expected to do {what} within {wish.rounds} rounds; {end}; allow more"
    )


def _write(best: Estimate, wish: Wish, out: Path, task: str) -> Path:
    """Write the experiment file of a recommendation."""
    from thinwire.experiments.experiment import to_table
    from thinwire.experiments.files import write_all
    from thinwire.experiments.load import from_table
    from thinwire.experiments.overrides import put
    from thinwire.experiments.task_files import folder_name
    from thinwire.experiments.toml import dumps

    table: dict[str, Any] = {**best.row.config, "rounds": best.run_rounds, "seed": 0, "accounting": "honest"}
    if wish.target is not None:
        put(table, "eval.target_accuracy", wish.target)
    name = f"plan-{folder_name(task)}.toml"
    write_all(out, {name: dumps(to_table(from_table(table))).encode()})
    return out / name


def _show(found: list[Estimate], wish: Wish, source: str, file: Path) -> None:
    """Print the best estimates, what to expect, and the command."""
    from thinwire.cli.searches import show_cells
    from thinwire.cli.terminal import out
    from thinwire.core.text import visible
    from thinwire.core.units import human_bytes, percent
    from thinwire.reports.text_table import Cells

    wanted = percent(wish.target) if wish.target is not None else human_bytes(wish.budget or 0)
    rows = [
        [one.row.label, percent(one.accuracy), human_bytes(one.bytes), str(one.rounds), _basis(one)]
        for one in found[:SHOWN]
    ]
    show_cells(Cells(["method", "accuracy", "bytes", "rounds", "from"], rows, 1), f"plan for {wanted}, from {source}")
    best = found[0]
    low, high = (human_bytes(end) for end in best.spread)
    spread = f" ({low} to {high} over seeds)" if len(best.row.runs) > 1 else ""
    at_least = "at least " if wish.target is not None else ""
    out.print(
        visible(
            f"{best.row.label}: expect {at_least}{percent(best.accuracy)} after {best.rounds} rounds and "
            f"{human_bytes(best.bytes)}{spread}, {_basis(best)}.",
            400,
        ),
        soft_wrap=True,
    )
    out.print(visible(f"thinwire run {file}", 400), soft_wrap=True)


def _basis(one: Estimate) -> str:
    seeds = len(one.row.runs)
    what = f"{seeds} seed{'s' if seeds > 1 else ''}"
    return f"measured, {what}" if one.measured else f"extrapolated from {one.row.rounds} rounds, {what}"
