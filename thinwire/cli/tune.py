"""`thinwire tune`: search the learning rate, any settings, or two hyperparameters with few runs (FLASC-S)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.options import (
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
    Task,
    resolve_experiment,
)
from thinwire.cli.sweep import Over
from thinwire.core.text import visible
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.request import Make
    from thinwire.experiments.tune import Found, Knob
    from thinwire.experiments.tune_rate import RateSearch
    from thinwire.experiments.tune_settings import Tuned

FLASC_S = "search of two hyperparameters (FLASC-S)"
RANKS, DENSITIES = "1,4,8", "1/16,1/4,1"


def tune(
    what: Method,
    on: Task = None,
    recipe: Recipe = None,
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
    share: Annotated[
        float, typer.Option(metavar="FRACTION", help="Rounds of the last rung, as a fraction of the run's.")
    ] = 1.0,
    ranks: Annotated[
        str | None, typer.Option(metavar="R,R,...", help=f"FLASC-S: ranks to try, ascending, such as {RANKS}.")
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(metavar="D,D,...", help=f"FLASC-S: densities to try, ascending, such as {DENSITIES}."),
    ] = None,
    knob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[+KEY]=V,V,...",
            help="FLASC-S over other hyperparameters: give it twice, a size and a density; uploads grow with their "
            "product.",
        ),
    ] = None,
    over: Over = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Stop after this many bytes sent, such as 500MB.")
    ] = None,
    validation_fraction: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Fraction of each client's examples for validation; FLASC-S takes 0 to select on the test set.",
        ),
    ] = 0.1,
    out: RunsOut = Path("runs/search"),
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed of the search; keep it out of the seeds of a comparison. Default: 100; FLASC-S: the "
            "experiment's."
        ),
    ] = None,
    device: Device = None,
    set_: Overrides = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Find the learning rate, or other settings, on held-out examples of the clients; the test set is not used.

    The search is successive halving. What it recommends is then run in full, beside the setting that it started from.

    With --over: all combinations of the given values instead of a ladder of learning rates.

    With --ranks, --densities or --knob: search two hyperparameters with few runs (FLASC-S).

    Example: thinwire tune mapo --on digits

    Example: thinwire tune mapo --on digits --over lr=0.1,0.3,1 --over k=64,128

    Example: thinwire tune fedadam --on digits --rate method.server_opt.lr --rates 4 --share 0.5 --budget 50MB

    Example: thinwire tune flasc --on digits --ranks 1,4,8 --densities 1/16,1/4,1 --budget 50MB
    """
    from thinwire.cli.searches import maker_of
    from thinwire.core.units import read_bytes
    from thinwire.experiments.knobs import parse_over
    from thinwire.experiments.overrides import parse_overrides
    from thinwire.experiments.tune_rate import SEARCH_SEED, RateSearch

    two = ranks is not None or densities is not None or bool(knob)
    if two and (rate is not None or rates != 8 or share != 1.0 or over):
        raise ConfigError(f"--rate, --rates, --share and --over do not apply to the {FLASC_S}; leave them out")
    if over and (rate is not None or rates != 8):
        raise ConfigError("--rate and --rates search one rate, --over names the values to try; leave one of them out")
    limit = None if budget is None else read_bytes(budget)
    options = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    if two:
        experiment = resolve_experiment(what, on, set_, seed=seed, recipe=recipe, **options)  # type: ignore[arg-type]
        size, density = _hyperparameters(knob, ranks or RANKS, densities or DENSITIES)
        _search_two(experiment, size, density, limit, out, data_dir, validation_fraction, as_json)
        return
    again = ["thinwire", "run", what, *(["--on", on] if on else [])]
    again += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    again += ["--recipe", recipe] if recipe else []
    again += [word for text in set_ or () if not text.startswith("seed=") for word in ("--set", text)]
    again += [word for module in imports or () for word in ("--import", module)]
    own_seed = parse_overrides(list(set_ or ())).get("seed", SEARCH_SEED)
    _search(
        maker_of(what, on, set_, recipe=recipe, **options),
        parse_over(over) if over else None,
        RateSearch(rate, rates, share, extend=rates // 2, validation_fraction=validation_fraction),
        {"seed": own_seed if seed is None else seed, "budget": limit, "out": out, "data_dir": data_dir},
        again,
        as_json,
        quiet,
    )


def _search(
    make: Make,
    over: Mapping[str, Sequence[Any]] | None,
    search: RateSearch,
    options: dict[str, Any],
    again: Sequence[str],
    as_json: bool,
    quiet: bool,
) -> None:
    """Search, and print the rungs, the full runs, the cost, and the command that uses the result."""
    from thinwire.cli.searches import nothing_trains, printers
    from thinwire.cli.terminal import err
    from thinwire.experiments.knobs import Knob, knobs_of
    from thinwire.experiments.tune_rate import rate_key
    from thinwire.experiments.tune_settings import NothingTrains, tune_settings

    experiment = make({"seed": options["seed"]})
    method = experiment.method
    if over is None and not quiet and hasattr(method.space, "rank") and hasattr(method.up, "density"):
        err.print("thinwire: note: this searches the learning rate; --ranks and --densities search rank and density")
    knobs = (Knob((search.key or rate_key(experiment),), ()),) if over is None else knobs_of(experiment, over)
    on_trial, on_rung = printers(experiment, knobs, quiet, show_rungs=not as_json)
    try:
        found = tune_settings(make, over, search, on_trial=on_trial, on_rung=on_rung, **options)
    except NothingTrains as error:
        nothing_trains(error)
    _show_tuned(found, shlex.join([*again, *found.words]), over is None, as_json)


def _show_tuned(tuned: Tuned, command: str, one_rate: bool, as_json: bool) -> None:
    """Print the result of a search."""
    from thinwire.cli.searches import rung_facts
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.cli.terminal import err
    from thinwire.cli.terminal import out as console
    from thinwire.experiments.knobs import point_text
    from thinwire.experiments.tune_settings import as_point

    found, full, knobs = tuned.found, tuned.confirmation, tuned.knobs
    best = point_text(knobs, as_point(found.value))
    names = [] if one_rate else [knob.label for knob in knobs]
    facts: dict[str, Any] = {"searched": ", ".join(path for knob in knobs for path in knob.paths)}
    facts |= {"value": full.value} if one_rate else dict(zip(names, full.value, strict=True))
    facts |= {"best_of_the_search": best, "full_run": full.text}
    facts |= {"at_an_end": full.value in (found.tried[0], found.tried[-1])} if one_rate else {}
    facts |= {"chosen_by": tuned.chosen_by, "seed": tuned.seed}
    facts |= {"rates_tried" if one_rate else "settings_tried": len(found.tried)}
    facts |= {"rounds_of_the_search": found.rounds, "bytes_of_the_search": found.bytes, "stopped": found.stopped}
    start_is_better = full.is_start and full.start is not None
    if as_json:
        runs = {key: one and one._asdict() for key, one in (("result", full.found), ("start", full.start))}
        facts |= {"settings": tuned.settings, "command": command}
        facts |= {"confirmation": {**runs, "rounds": full.rounds, "start_is_better": start_is_better}}
        print_json({**facts, "rungs": rung_facts(found.rungs, names)})
        return
    if one_rate:
        facts["at_an_end"] = "yes; a better rate may lie beyond" if facts["at_an_end"] else "no"
    facts["stopped"] = "by the budget; the best so far" if found.stopped else "search complete"
    show_facts(facts, "search")
    if start_is_better:
        err.print(visible(f"thinwire: note: {full.text}; {best} is not recommended", 500), soft_wrap=True)
    console.print(command, soft_wrap=True)


def _search_two(
    experiment: Experiment,
    size: Knob,
    density: Knob,
    budget: int | None,
    out: Path,
    data_dir: Path | None,
    validation_fraction: float,
    as_json: bool,
) -> None:
    """Search two hyperparameters, and print the bytes of the search and of a full grid."""
    from thinwire.cli.searches import nothing_trains
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.experiments.tune import tune as search

    found = search(
        experiment, size, density, budget=budget, out=out, data_dir=data_dir, validation_fraction=validation_fraction
    )
    if not any(trial.accuracy for trial in found.tried):
        nothing_trains(f"none of {len(found.tried)} settings trains {experiment.name} on {experiment.task.label}")
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
