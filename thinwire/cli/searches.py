"""Search for a learning rate with its rungs on the terminal, for `thinwire tune` and `thinwire compare --tune`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, percent
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.experiments.config import Experiment
    from thinwire.experiments.search_record import SearchRecord
    from thinwire.experiments.successive_halving import Rung, Trial
    from thinwire.experiments.tune_rate import RateFound, RateSearch
    from thinwire.reports.compare import ComparisonRow

NOTHING_FOUND = 1  # exit code if every rate failed


def search_rate(
    experiment: Experiment,
    search: RateSearch,
    *,
    out: Path,
    data_dir: Path | None = None,
    budget: int | None = None,
    quiet: bool = False,
    show_rungs: bool = True,
) -> RateFound:
    """Search the learning rate of an experiment; exits with 1 and one line if no rate trains.

    Args:
        experiment: the experiment, with the seed of the search.
        search: what is searched, and how.
        out: the folder of the run directories.
        data_dir: folder that holds the datasets.
        budget: bytes that the runs may send; None for no limit.
        quiet: do not print a line for each run.
        show_rungs: print a table for each rung.
    """
    from thinwire.experiments.tune_rate import rate_key, tune_rate

    name = (search.key or rate_key(experiment)).removeprefix("method.")
    found = tune_rate(
        experiment,
        search,
        budget=budget,
        out=out,
        data_dir=data_dir,
        on_trial=_trial_printer(f"{experiment.name} {name}", quiet),
        on_rung=_rung_printer(f"{experiment.name} on {experiment.task.label}, {name}", show_rungs),
    )
    if found.found.rate is None:
        print(visible(f"thinwire: {_why_nothing(experiment, found)}", 1000), file=sys.stderr)
        sys.exit(NOTHING_FOUND)
    return found


def _why_nothing(experiment: Experiment, found: RateFound) -> str:
    last: dict[float, str] = {trial.rate: trial.measured.status for rung in found.found.rungs for trial in rung.trials}
    counts = Counter("at chance" if status == "at chance so far" else status for status in last.values())
    causes = ", ".join(f"{count} {status}" for status, count in counts.items())
    rates = found.found.rates
    longest = found.found.rungs[-1].rounds
    return (
        f"no {found.key} from {rates[0]:g} to {rates[-1]:g} trains {experiment.name} on {experiment.task.label} in "
        f"{longest} rounds ({causes}); train more rounds, or start from another rate: --set {found.key}=..."
    )


def _trial_printer(label: str, quiet: bool) -> Callable[[Trial], None]:
    from thinwire.cli.terminal import err

    def print_trial(trial: Trial) -> None:
        if not quiet:
            accuracy, loss, rounds, sent, status = _row(trial)
            text = f"validation {accuracy}  loss {loss}  {rounds} rounds  {sent}  {status}".rstrip()
            err.print(visible(f"{label} {trial.rate:g}  {text}", 400), soft_wrap=True)

    return print_trial


def _rung_printer(title: str, shown: bool) -> Callable[[Rung], None]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from thinwire.cli.terminal import out

    number = 0

    def print_rung(rung: Rung) -> None:
        nonlocal number
        number += 1
        if not shown:
            return
        runs = f"{len(rung.trials)} run{'s' if len(rung.trials) > 1 else ''} of {rung.rounds} rounds"
        table = Table(
            title=visible(f"rung {number}: {title}: {runs}", 300), title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        for head in ("rate", "validation", "loss", "rounds", "bytes", "status", ""):
            table.add_column(head, justify="left" if head in ("status", "") else "right", no_wrap=True)
        for trial in rung.trials:
            goes_on = "goes on" if trial.rate in rung.kept else ""
            table.add_row(f"{trial.rate:g}", *_row(trial), goes_on)
        out.print(table)

    return print_rung


def _row(trial: Trial) -> tuple[str, ...]:
    """Accuracy, loss, rounds, bytes and status of a trial."""
    found = trial.measured
    loss = "-" if found.loss is None else f"{found.loss:.4g}"
    status = "" if found.status == "finished" else found.status
    return percent(found.accuracy), loss, f"{found.rounds:,}", human_bytes(found.bytes), status


def tuned(
    before: Sequence[Experiment],
    experiments: Sequence[Experiment],
    search: RateSearch,
    out: Path,
    data_dir: Path | None,
    quiet: bool,
    as_json: bool,
) -> tuple[list[Experiment], dict[str, SearchRecord]]:
    """The experiments of a comparison with the rates of equal searches, and these searches by method.

    Args:
        before: one experiment for each method, with the seed of the search.
        experiments: those of the comparison.
        search: the search, the same for every method.
        out: the folder of the comparison; the runs of the search are in `search` in it.
        data_dir: folder that holds the datasets.
        quiet: do not print a line for each run.
        as_json: print no tables.
    """
    if (seed := before[0].seed) in {experiment.seed for experiment in experiments}:
        seeds = sorted({experiment.seed for experiment in experiments})
        raise ConfigError(
            f"the seed of the search, {seed}, is among the seeds of the comparison, {seeds[0]} to {seeds[-1]}; "
            f"write --tune-seed {seeds[-1] + 1}"
        )
    found = {
        one.name: search_rate(
            one, search, out=out / "search", data_dir=data_dir, quiet=quiet, show_rungs=not (quiet or as_json)
        )
        for one in before
    }
    changed = [found[experiment.name].applied(experiment) for experiment in experiments]
    return changed, {name: one.record() for name, one in found.items()}


def rung_facts(found: RateFound) -> list[dict[str, Any]]:
    """All rungs as plain values."""
    return [
        {
            "rounds": rung.rounds,
            "trials": [{"rate": trial.rate, **trial.measured._asdict()} for trial in rung.trials],
            "kept": list(rung.kept),
        }
        for rung in found.found.rungs
    ]


def show_searches(searches: Mapping[str, SearchRecord], rows: Sequence[ComparisonRow]) -> None:
    """Print what was searched for each method of a comparison, and what it cost beside one of its runs."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from thinwire.cli.terminal import out
    from thinwire.reports.chapter_search import HEADS, how_searched, search_cells

    totals = {row.method: row.bytes_total_honest for row in rows}
    table = Table(title="search before the comparison", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        table.add_column(head, justify="left" if head in HEADS[:2] else "right", no_wrap=True)
    for method, record in searches.items():
        table.add_row(*(visible(cell, 200) for cell in search_cells(method, record, totals.get(method))))
    out.print(table)
    for sentence in how_searched(list(searches.values())):
        out.print(visible(sentence, 1000), soft_wrap=True)
