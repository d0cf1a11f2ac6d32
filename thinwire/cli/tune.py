"""`thinwire tune`: search the learning rate, any settings, or a method."""

from __future__ import annotations

import shlex
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
    Overrides,
    Quiet,
    Recipe,
    Rounds,
    RunsOut,
    Task,
)
from thinwire.cli.search import Methods, Over, nothing_trains, printers
from thinwire.core.text import visible

if TYPE_CHECKING:
    from thinwire.search.tune import Tuned


def tune(
    methods: Methods = None,
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
    over: Over = None,
    flasc_s: Annotated[
        bool,
        typer.Option(
            "--flasc-s", help="Search two settings of --over, a size and a density, with few full runs (FLASC-S)."
        ),
    ] = False,
    limit: Annotated[
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
    validation_fraction: Annotated[
        float, typer.Option(metavar="FRACTION", help="Fraction of each client's examples for validation.")
    ] = 0.1,
    out: RunsOut = Path("runs/search"),
    rounds: Rounds = None,
    clients: Clients = None,
    cohort: CohortSize = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of the search; keep it out of the seeds of a comparison. Default: 100."),
    ] = None,
    device: Device = None,
    set_: Overrides = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Find the learning rate, other settings, or a method, on held-out examples of the clients, not on the test set.

    The search is successive halving. What it recommends is then run in full, beside the setting that it started from.

    With --over: all combinations of the given values instead of a ladder of learning rates.

    With --bytes or --accuracy: several methods, by default a selection, instead of the settings of one.

    Example: thinwire tune mapo --on digits

    Example: thinwire tune mapo --on digits --over lr=0.1,0.3,1 --over k=64,128

    Example: thinwire tune fedadam --on digits --rate method.server_opt.lr --rates 4 --share 0.5 --budget 50MB

    Example: thinwire tune flasc --on digits --over rank=1,4,8 --over density=1/16,1/4,1 --flasc-s

    Example: thinwire tune fedavg mapo topk+int8 --on digits --bytes 200kB
    """
    from thinwire.experiments.toml import parse_overrides
    from thinwire.search.candidates import parse_over
    from thinwire.search.tune import SEARCH_SEED, NothingTrains, tune as search

    overrides = parse_overrides(list(set_ or ()))
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    how: dict[str, Any] = {"over": parse_over(over) if over else None, "rate": rate, "rates": rates, "share": share}
    how |= {"flasc_s": flasc_s, "bytes": limit, "accuracy": accuracy, "validation_fraction": validation_fraction}
    how |= {"out": out, "data_dir": data_dir, "budget": budget, "recipe": recipe, "overrides": overrides}
    how |= {"seed": overrides.get("seed", SEARCH_SEED) if seed is None else seed}
    one = methods[0] if methods and len(methods) == 1 else methods
    try:
        found = search(one, on, on_search=printers(quiet, show_rungs=not as_json), **how, **options)
    except NothingTrains as error:
        nothing_trains(error)
    several = "method" in found.knobs[0].paths
    again = ["thinwire", "run", str(found.confirmation.value) if several else str(one), *(["--on", on] if on else [])]
    again += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    again += ["--recipe", recipe] if recipe else []
    again += [word for text in set_ or () if not text.startswith("seed=") for word in ("--set", text)]
    again += [word for module in imports or () for word in ("--import", module)]
    _show(found, shlex.join([*again, *found.words]), as_json)


def _show(tuned: Tuned, command: str, as_json: bool) -> None:
    """Print the result of a search."""
    from thinwire.cli.tables import print_json, show_facts
    from thinwire.cli.terminal import err, out as console
    from thinwire.search.candidates import as_point, point_text

    found, full = tuned.found, tuned.confirmation
    is_rate = isinstance(found.value, float)

    def plain(value: Any) -> dict[str, Any]:
        return dict(zip((knob.label for knob in tuned.knobs), as_point(value), strict=True))

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
                "trials": [{"settings": plain(one.value), **one.measured._asdict()} for one in rung.trials],
                "kept": [plain(value) for value in rung.kept],
            }
            for rung in found.rungs
        ]
        runs = {name: one and one._asdict() for name, one in (("result", full.found), ("start", full.start))}
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
