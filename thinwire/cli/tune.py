"""`thinwire tune`: search two hyperparameters with few runs (FLASC-S)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import (
    AsJson,
    Clients,
    CohortSize,
    DataDir,
    Device,
    Method,
    Overrides,
    Recipe,
    Rounds,
    RunsOut,
    Seed,
    Task,
    resolve_experiment,
)
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.experiments.tune import Found, Knob


def tune(
    what: Method = "flasc",
    on: Task = None,
    recipe: Recipe = None,
    ranks: Annotated[str, typer.Option(metavar="R,R,...", help="Ranks to try, ascending.")] = "1,4,8",
    densities: Annotated[str, typer.Option(metavar="D,D,...", help="Densities to try, ascending.")] = "1/16,1/4,1",
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[+KEY]=V,V,...",
            help="Search other hyperparameters: give it twice, a size and a density; uploads grow with their product.",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Stop after this many bytes sent, such as 500MB.")
    ] = None,
    validation_fraction: Annotated[
        float,
        typer.Option(
            metavar="FRACTION", help="Fraction of each client's examples for validation; 0 selects on the test set."
        ),
    ] = 0.1,
    out: RunsOut = Path("runs"),
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Seed = None,
    device: Device = None,
    set_: Overrides = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Search two hyperparameters with few runs (FLASC-S: rank and density); prints the bytes of search and full grid.

    Example: thinwire tune flasc --on digits --ranks 1,4,8 --densities 1/16,1/4,1 --budget 50MB
    """
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.core.units import read_bytes
    from thinwire.experiments.tune import tune as search

    experiment = resolve_experiment(
        what, on, set_, rounds=rounds, clients=clients, cohort=cohort, seed=seed, device=device, recipe=recipe
    )
    size, density = _hyperparameters(knob, ranks, densities)
    limit = None if budget is None else read_bytes(budget)
    found = search(
        experiment, size, density, budget=limit, out=out, data_dir=data_dir, validation_fraction=validation_fraction
    )
    facts: dict[str, Any] = {size.label: found.size, density.label: found.share, "chosen_by": found.chosen_by}
    facts |= {"bytes_total": found.bytes, "bytes_of_a_grid": found.grid, "stopped": found.stopped}
    if as_json:
        pairs = [[trial._asdict() for trial in pair] for pair in found.compared]
        print_json({**facts, "tried": [trial._asdict() for trial in found.tried], "compared": pairs})
        return
    show_facts(facts | _trial_texts(found, size.label, density.label), "search")


def _hyperparameters(knobs: list[str] | None, ranks: str, densities: str) -> tuple[Knob, Knob]:
    """The two hyperparameters and their values: those of `--knob`, or rank and density."""
    from thinwire.experiments.tune import Knob, flasc_knobs, numbers

    if not knobs:
        return flasc_knobs(numbers(ranks, "ranks"), numbers(densities, "densities"))
    if len(knobs) != 2:
        raise ConfigError(f"--knob must be given twice, a size and a density, not {len(knobs)} time(s)")
    return Knob.parse(knobs[0]), Knob.parse(knobs[1])


def _trial_texts(found: Found, size: str, density: str) -> dict[str, str]:
    """One text for each trial, one for each pair that was compared at equal uploads, and why the search ended."""
    texts = {}
    for trial in found.tried:
        test = "" if trial.test_accuracy is None else f", test accuracy {trial.test_accuracy:.4f}"
        result = f"accuracy {trial.accuracy:.4f}{test}, {trial.bytes:,} bytes"
        texts[f"{size} {trial.size:g}, {density} {trial.share:g}"] = result
    for low, high in found.compared:
        pair = f"{size} {high.size:g}, {density} {high.share:g} against {low.size:g}, {low.share:g}"
        texts[pair] = f"{high.bytes / low.bytes:.2f} times its bytes" if low.bytes else "-"
    texts["stopped"] = "by the budget; the best trial so far" if found.stopped else "search complete"
    return texts
