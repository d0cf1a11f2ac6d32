"""Searches, sweeps and comparisons on the terminal: progress, the tables of rungs, and experiments from options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, percent

if TYPE_CHECKING:
    from thinwire.experiments.compare import SearchHooks, Watch
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.knobs import Knob
    from thinwire.experiments.request import Make
    from thinwire.experiments.search_record import SearchRecord
    from thinwire.experiments.successive_halving import Rung, Trial
    from thinwire.experiments.validation_runs import OnTrial
    from thinwire.reports.compare import ComparisonRow
    from thinwire.reports.text_table import Cells

NOTHING_FOUND = 1  # exit code if nothing trains


def maker_of(
    method: str, on: str | None, overrides: Sequence[str] | None, *, recipe: str | None = None, **options: Any
) -> Make:
    """The experiment that a method, a task and the options of a verb describe, as a function of further settings.

    Args:
        method: name of a method, several joined by +, or a .toml file.
        on: the task; None for the default one.
        overrides: `KEY=VALUE` texts of `--set`.
        recipe: name of a recipe; None for that of the file, or the default one.
        **options: the other options of `resolve_experiment`.
    """
    from thinwire.cli.options import resolve_experiment
    from thinwire.experiments.toml import value_words

    def make(changes: Mapping[str, Any]) -> Experiment:
        words = [f"{key}={value_words(value)}" for key, value in changes.items()]
        return resolve_experiment(method, on, [*(overrides or ()), *words], recipe=recipe, **options)

    return make


def watch_runs(quiet: bool) -> Watch:
    """Progress of the runs of a comparison or a sweep."""
    from thinwire.cli.terminal import progress

    return lambda experiment: progress(
        f"{experiment.name} seed {experiment.seed}", experiment.rounds, quiet, experiment.accounting
    )


def show_cells(cells: Cells, title: str) -> None:
    """Print a table of text."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from thinwire.cli.terminal import out

    table = Table(title=visible(title, 300), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(cells.heads):
        table.add_column(visible(head, 60), justify="left" if i < cells.left else "right", no_wrap=True)
    for row in cells.rows:
        table.add_row(*(visible(cell, 200) for cell in row))
    out.print(table)


def search_hooks(quiet: bool, show_rungs: bool) -> SearchHooks:
    """Output of the searches before a comparison: a line for each run, a table for each rung."""
    from thinwire.experiments.knobs import Knob

    def hooks(experiment: Experiment, key: str) -> tuple[OnTrial, Callable[[Rung], None]]:
        return printers(experiment, (Knob((key,), ()),), quiet, show_rungs)

    return hooks


def printers(
    experiment: Experiment, knobs: Sequence[Knob], quiet: bool, show_rungs: bool
) -> tuple[OnTrial, Callable[[Rung], None]]:
    """Functions that print the runs and the rungs of a search.

    Args:
        experiment: the experiment that is searched.
        knobs: the settings that are searched.
        quiet: do not print a line for each run.
        show_rungs: print a table for each rung.
    """
    name = ", ".join(knob.paths[0].removeprefix("method.") if len(knobs) == 1 else knob.label for knob in knobs)
    label = f"{experiment.name} {name}" if len(knobs) == 1 else experiment.name
    title = f"{experiment.name} on {experiment.task.label}, {name}"
    return _trial_printer(label, knobs, quiet), _rung_printer(title, knobs, show_rungs)


def nothing_trains(error: Exception | str) -> NoReturn:
    """Print one line and exit with 1."""
    print(visible(f"thinwire: {error}", 1000), file=sys.stderr)
    sys.exit(NOTHING_FOUND)


def _trial_printer(label: str, knobs: Sequence[Knob], quiet: bool) -> Callable[[Trial], None]:
    from thinwire.cli.terminal import err
    from thinwire.experiments.knobs import point_text, value_text
    from thinwire.experiments.tune_settings import as_point

    def print_trial(trial: Trial) -> None:
        if not quiet:
            accuracy, loss, rounds, sent, status = _row(trial)
            text = f"validation {accuracy}  loss {loss}  {rounds} rounds  {sent}  {status}".rstrip()
            point = as_point(trial.value)
            chosen = value_text(point[0]) if len(knobs) == 1 else point_text(knobs, point)
            err.print(visible(f"{label} {chosen}  {text}", 400), soft_wrap=True)

    return print_trial


def _rung_printer(title: str, knobs: Sequence[Knob], shown: bool) -> Callable[[Rung], None]:
    from thinwire.experiments.knobs import value_text
    from thinwire.experiments.tune_settings import as_point
    from thinwire.reports.text_table import Cells

    number = 0
    heads = ["rate" if len(knobs) == 1 and not knobs[0].name else knob.label for knob in knobs]
    heads += ["validation", "loss", "rounds", "bytes", "status", ""]

    def print_rung(rung: Rung) -> None:
        nonlocal number
        number += 1
        if not shown:
            return
        runs = f"{len(rung.trials)} run{'s' if len(rung.trials) > 1 else ''} of {rung.rounds} rounds"
        rows = [
            [*map(value_text, as_point(trial.value)), *_row(trial), "goes on" if trial.value in rung.kept else ""]
            for trial in rung.trials
        ]
        show_cells(Cells(heads, rows, 0), f"rung {number}: {title}: {runs}")

    return print_rung


def _row(trial: Trial) -> tuple[str, ...]:
    """Accuracy, loss, rounds, bytes and status of a trial."""
    found = trial.measured
    loss = "-" if found.loss is None else f"{found.loss:.4g}"
    status = "" if found.status == "finished" else found.status
    return percent(found.accuracy), loss, f"{found.rounds:,}", human_bytes(found.bytes), status


def rung_facts(rungs: Sequence[Rung], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rungs as plain values; a candidate is a `rate`, or a table of settings by name."""

    def plain(value: Any) -> Any:
        return dict(zip(names, value, strict=True)) if names else value

    return [
        {
            "rounds": rung.rounds,
            "trials": [
                {"settings" if names else "rate": plain(trial.value), **trial.measured._asdict()}
                for trial in rung.trials
            ],
            "kept": [plain(value) for value in rung.kept],
        }
        for rung in rungs
    ]


def show_searches(searches: Mapping[str, SearchRecord], rows: Sequence[ComparisonRow]) -> None:
    """Print what was searched for each method of a comparison, and what it cost beside one of its runs."""
    from thinwire.cli.terminal import out
    from thinwire.reports.chapters import SEARCH_HEADS, how_searched, search_cells
    from thinwire.reports.text_table import Cells

    found = [search_cells(method, record) for method, record in searches.items()]
    show_cells(Cells(SEARCH_HEADS, found, 2), "search before the comparison")
    for sentence in how_searched(list(searches.values())):
        out.print(visible(sentence, 1000), soft_wrap=True)
