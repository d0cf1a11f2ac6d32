"""Runs of a comparison, one after another: methods over the same seeds, after equal searches if asked for.

Every run has the directory that `thinwire run` gives it: a finished run is read, one that was killed goes on, and one
that diverged stays a row of the comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from thinwire.core.text import visible
from thinwire.core.units import human_bytes, percent
from thinwire.errors import ConfigError, Diverged
from thinwire.experiments.execute import OnRound, default_folder, execute
from thinwire.experiments.experiment import Experiment
from thinwire.experiments.knobs import Knob
from thinwire.experiments.request import Make
from thinwire.experiments.run_directory import RunFolder, Summary
from thinwire.experiments.search_record import SearchRecord, write_search
from thinwire.experiments.successive_halving import Rung
from thinwire.experiments.tune_rate import SEARCH_SEED, RateFound, RateSearch, rate_key, tune_rate
from thinwire.experiments.tune_settings import NothingTrains, why_nothing
from thinwire.experiments.validation_runs import OnTrial
from thinwire.runtime.job import RoundRecord

Watch = Callable[[Experiment], AbstractContextManager[OnRound]]  # shows the progress of one run
SearchHooks = Callable[[Experiment, str], tuple[OnTrial, Callable[[Rung], None]]]  # of an experiment and a setting


class Compared(NamedTuple):
    """The runs of a comparison: experiments, totals by run directory, and searches by method."""

    experiments: list[Experiment]
    summaries: dict[str, Summary]
    searches: dict[str, SearchRecord]


def watcher(progress: bool | None = None) -> Watch:
    """Progress of runs started from Python: one line a run on stderr; None for a terminal only."""
    shown = sys.stderr.isatty() if progress is None else progress

    @contextmanager
    def watch(experiment: Experiment) -> Iterator[OnRound]:
        last: RoundRecord | None = None
        sent = 0

        def on_round(record: RoundRecord) -> None:
            nonlocal last, sent
            last, sent = record, sent + record.bytes_up + record.bytes_down + record.bytes_catchup

        yield on_round
        if shown and last is not None:
            result = f"loss {last.loss:.4f}" if last.accuracy is None else f"accuracy {percent(last.accuracy)}"
            text = f"{experiment.name} seed {experiment.seed}: {last.round} rounds, {result}, {human_bytes(sent)}"
            print(visible(text, 300), file=sys.stderr)

    return watch


def no_hooks(experiment: Experiment, key: str) -> tuple[OnTrial, Callable[[Rung], None]]:
    """Searches without output."""
    return lambda trial: None, lambda rung: None


def run_all(
    experiments: Sequence[Experiment], out: Path, watch: Watch, *, data_dir: Path | None = None, again: bool = False
) -> dict[str, Summary]:
    """Run experiments one after another; returns the totals by run directory.

    Args:
        experiments: the experiments.
        out: the folder of the run directories.
        watch: shows the progress of a run.
        data_dir: the folder of datasets.
        again: run even if a directory holds the finished run.
    """
    summaries: dict[str, Summary] = {}
    for experiment in experiments:
        path = default_folder(experiment, out)
        with watch(experiment) as on_round:
            try:
                summary = execute(experiment, path, data_dir=data_dir, resume=True, again=again, on_round=on_round)
            except Diverged:  # a row of the table; the other experiments still run
                summary = RunFolder(path, experiment).summary() or {}
        summaries[str(path)] = summary
    return summaries


def compare_methods(
    methods: Sequence[Make],
    seeds: Sequence[int],
    out: Path,
    watch: Watch,
    *,
    search: RateSearch | None = None,
    search_seed: int = SEARCH_SEED,
    hooks: SearchHooks = no_hooks,
    data_dir: Path | None = None,
    again: bool = False,
) -> Compared:
    """Run methods over the same seeds; with a search, first find the rate of each with the same budget.

    Args:
        methods: the experiments of each method, as functions of further settings.
        seeds: the same clients and batches for every method.
        out: the folder of the run directories; the runs of searches are in `search` in it.
        watch: shows the progress of a run.
        search: the search of each method; None for none.
        search_seed: of the searches; none of `seeds`.
        hooks: are called with the runs and rungs of a search.
        data_dir: the folder of datasets.
        again: run even if a directory holds the finished run.
    """
    experiments = [make({"seed": seed}) for make in methods for seed in seeds]
    found: dict[str, RateFound] = {}
    if search is not None:
        _check_seeds(search_seed, {experiment.seed for experiment in experiments})
        for make in methods:
            one = make({"seed": search_seed})
            if one.name not in found:
                found[one.name] = _searched(one, search, out / "search", data_dir, hooks)
        experiments = [found[experiment.name].applied(experiment) for experiment in experiments]
    summaries = run_all(experiments, out, watch, data_dir=data_dir, again=again)
    searches = {name: one.record() for name, one in found.items()}
    for path, summary in summaries.items():
        if record := searches.get(summary["method"]):
            write_search(Path(path), record)
    return Compared(experiments, summaries, searches)


def _check_seeds(seed: int, seeds: set[int]) -> None:
    if seed in seeds:
        raise ConfigError(
            f"the seed of the search, {seed}, is among the seeds of the comparison, {min(seeds)} to {max(seeds)}; "
            f"write --tune-seed {max(seeds) + 1}"
        )


def _searched(
    experiment: Experiment, search: RateSearch, out: Path, data_dir: Path | None, hooks: SearchHooks
) -> RateFound:
    """The rate of one method; raises `NothingTrains` if there is none."""
    key = search.key or rate_key(experiment)
    on_trial, on_rung = hooks(experiment, key)
    found = tune_rate(experiment, search, out=out, data_dir=data_dir, on_trial=on_trial, on_rung=on_rung)
    if found.found.value is None:
        raise NothingTrains(why_nothing(experiment, (Knob((key,), ()),), found.found))
    return found
