"""Options that several verbs share, and the experiment that they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from thinwire.runs.config import Experiment


def import_modules(modules: Sequence[str] | None) -> None:
    """Import packages that register parts, so that their names are known to the verb."""
    if modules:
        from thinwire.runs.plugins import load

        load(list(modules))


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE|FILE.py",
        callback=import_modules,
        is_eager=True,
        help="Import a Python module or file that registers methods, codecs or other parts; may be repeated.",
    ),
]
Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD_OR_FILE", help="A method (`thinwire list`), several methods joined by +, or a .toml file."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="TASK",
        help="The task (`thinwire list tasks`), or your own: my_task.py:task, task.toml, data.csv.",
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Training settings where nothing else states them (`thinwire list recipes`): default (clipping, warm-up, "
        "cosine, standardized images) or paper (none of these). Default: that of the file, or default.",
    ),
]
Rounds = Annotated[int | None, typer.Option(help="Number of communication rounds.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
CohortSize = Annotated[int | None, typer.Option("--cohort", help="Number of clients sampled per round.")]
Seed = Annotated[int | None, typer.Option(help="Random seed of data partition, initial weights, sampling and batches.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Accounting = Annotated[
    str | None,
    typer.Option(
        "--accounting",
        help="Bytes counted in totals: honest (all messages) or ideal (without catch-up downloads, as in most papers).",
    ),
]
OnDivergence = Annotated[
    str | None,
    typer.Option(
        "--on-divergence",
        metavar="stop|retry",
        help="If training diverges or collapses: stop, or retry from the last good state with half the learning rate.",
    ),
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        metavar="N",
        help="End after N evaluations without a new best one: of the objective or, if clients keep validation examples "
        "(task.validation_fraction), of these.",
    ),
]
Objective = Annotated[
    str | None,
    typer.Option("--objective", metavar="NAME", help="What rounds and runs are ranked by: accuracy, loss or a metric."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="NAME", help="Another metric to compute (`thinwire list metrics`); may be repeated."
    ),
]
KeepBest = Annotated[
    bool | None, typer.Option("--keep-best", help="Keep the model of the best round: best.safetensors.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any configuration key; may be repeated.")
]
RunOut = Annotated[Path | None, typer.Option("--out", help="Run directory. Default: a new one under runs/.")]
RunsOut = Annotated[Path, typer.Option("--out", help="Folder of the run directories; finished runs are reused.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="THINWIRE_DATA", help="Folder that holds the datasets.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Log = Annotated[
    str | None,
    typer.Option("--log", metavar="TRACKER", help="Also log every round to a tracker: tensorboard or mlflow."),
]
Targets = Annotated[
    list[float] | None,
    typer.Option(
        "--target",
        metavar="VALUE",
        help="Compare the cost of reaching this value of the objective, such as an accuracy of 0.8; may be repeated.",
    ),
]
Again = Annotated[bool, typer.Option("--again", help="Run again, even if this run is finished.")]


def settings_of(given: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """The arguments of a verb that change settings, as `candidates.maker` takes them.

    Args:
        given: the `locals()` of the verb when it begins; an argument that is None is left out.
        *more: names of further arguments.
    """
    from thinwire.runs.toml import parse_overrides
    from thinwire.search.candidates import OPTIONS

    names = (*OPTIONS, "recipe", "metrics", *more)
    found = {name: given[name] for name in names if given.get(name) is not None}
    return {**found, "overrides": parse_overrides(list(given["set_"] or ()))}


def resolve_experiment(given: Mapping[str, Any]) -> Experiment:
    """The experiment that the arguments of a verb, its `locals()`, describe; `--set` takes precedence."""
    from thinwire.search.candidates import maker

    return maker(given["what"], given.get("on"), **settings_of(given))({})
