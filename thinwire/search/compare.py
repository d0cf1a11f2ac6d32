"""`tw.compare` and `tw.sweep`: several methods, or settings of one, over the same seeds, as a table.

    difference   mean over seeds of (value - value of the best row with the same seed), with its 95 % interval

The rows of a sweep are settings, ranked by the mean of the final objective on the test set or, with
`task.validation_fraction`, by its mean over clients on the examples that they hold out. A setting of which a
run diverged, collapsed or is at chance is listed after the others and is never the best.

Every run has the directory that `thinwire run` gives it: a finished run is read, one that was killed goes on, and one
that diverged stays a row of the table.

>>> import thinwire as tw, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     found = tw.compare(["fedavg", "mapo"], on="digits", seeds=1, rounds=1, cohort=2, out=folder)
>>> [row.label for row in found.rows]
['fedavg', 'mapo']
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.protocol.method import Method
from thinwire.reports.rows import MeanInterval, Row, evaluations, group
from thinwire.reports.table import Table
from thinwire.runs.build import build_job
from thinwire.runs.execute import default_folder
from thinwire.runs.jobs import Jobs
from thinwire.runs.options import Options
from thinwire.runs.progress import style_of
from thinwire.runs.records import SavedRun, SearchRecord, read_run, read_totals, write_search
from thinwire.search import tune as tuner
from thinwire.search.candidates import changes, knobs_of, maker, makers, points
from thinwire.search.trials import mean_of_last
from thinwire.search.tune import RATES, SEARCH_SEED, OnTrial


def compare(
    methods: Sequence[str] | Mapping[str, str | Method],
    on: Any = None,
    *,
    seeds: int = 3,
    tune: bool = False,
    tune_rates: int = RATES,
    tune_seed: int = SEARCH_SEED,
    jobs: int = 1,
    on_trial: OnTrial = lambda experiment, trial: None,
    **options: Unpack[Options],
) -> Table:
    """Train several methods on the same clients and batches, and compare the objective and bytes.

    Args:
        methods: names of methods, combinations with `+`, experiment files; or a name for each Method:
            `{"mine": tw.methods.mapo(k=64), "fedavg": "fedavg"}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        tune: first search the learning rate of every method, as `tune` does.
        tune_rates: number of rates that each method may try.
        tune_seed: the seed of the search; none of the seeds of the comparison.
        jobs: number of runs at a time (`runs/jobs.py`).
        on_trial: is called with each run of a search.
        **options: as for `tw.run`; `out` is the folder of the runs, of which finished ones are used again, by default
            `runs`; those of searches are in `search` in it.
    """
    if isinstance(methods, str | Method) or not methods:
        raise ConfigError(f"methods must be a list such as ['fedavg', 'mapo'], not {methods!r}")
    every, folder = _seeds(seeds, options), Path(options.get("out") or "runs")
    makes = list(makers(methods, on, options).values())
    if tune and tune_seed in every:
        raise ConfigError(
            f"the seed of the search, {tune_seed}, is among the seeds of the comparison, {every[0]} to {every[-1]}; "
            f"write --tune-seed {every[-1] + 1}"
        )
    for make in makes:
        make({"seed": every[0]})  # raises before the first search
    out, data_dir = folder / "search", options.get("data_dir")
    how: dict[str, Any] = {
        "rates": tune_rates,
        "jobs": jobs,
        "seed": tune_seed,
        "out": out,
        "data_dir": data_dir,
    }
    experiments: dict[Path, Settings] = {}
    searches: dict[Path, SearchRecord] = {}
    for make in makes:
        record = tuner.tune(make, on_trial=on_trial, **how).record if tune else None
        found = {record.setting: record.value} if record else {}
        own = {default_folder(one, folder): one for one in (make({**found, "seed": number}) for number in every)}
        experiments |= own
        searches |= dict.fromkeys(own, record) if record else {}
    _run_all(experiments.values(), folder, jobs, options)
    for path, record in searches.items():
        write_search(path, record)
    rows = group([read_run(path) for path in experiments])
    table = rows[0].config
    size = f"{table['task'].get('clients', 'own')} clients, {table['rounds']} rounds, {_count(every)}"
    return Table(f"{rows[0].task}: {size}", rows)


def sweep(
    method: str | Method,
    over: Mapping[str, Sequence[Any]],
    on: Any = None,
    *,
    seeds: int = 3,
    jobs: int = 1,
    **options: Unpack[Options],
) -> Table:
    """Run a method with every combination of some values, over the same seeds; impossible values are refused first.

    All settings have the same clients, initial weights and batches: differences between settings are paired by seed.

    Args:
        method: names of methods, an experiment file, or a Method.
        over: values by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        jobs: number of runs at a time (`runs/jobs.py`).
        **options: as for `tw.run`; `out` is the folder of the runs, of which finished ones are used again, by default
            `runs`. Settings are ranked on validation examples if there are any (`validation_fraction`), or else on the
            test set.
    """
    every, folder, data_dir = _seeds(seeds, options), Path(options.get("out") or "runs"), options.get("data_dir")
    make = maker(method, on, **options)
    own = make({})
    knobs = knobs_of(own, over)
    tried = points(knobs)
    settings = [changes(own, knobs, point) for point in tried]
    experiments = [[make({**change, "seed": number}) for number in every] for change in settings]
    for first, *_ in experiments:
        if read_totals(default_folder(first, folder)) is None:
            build_job(first, None if data_dir is None else Path(data_dir))
    # seed by seed: an interrupted sweep has all settings on its first seeds
    _run_all([one for same in zip(*experiments, strict=True) for one in same], folder, jobs, options)
    rows = group([read_run(default_folder(one, folder)) for same in experiments for one in same])
    named = zip(rows, tried, settings, strict=True)
    rows = [row._replace(values=dict(point), settings=change) for row, point, change in named]
    return _ranked(f"{own.name} on {rows[0].task}: {len(rows)} settings, {_count(every)}", rows)


def _seeds(count: int, options: Mapping[str, Any]) -> range:
    if count < 1:
        raise ConfigError(f"seeds must be 1 or more, not {count}")
    first = options.get("seed") or 0
    return range(first, first + count)


def _count(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"


def _run_all(experiments: Iterable[Settings], out: Path, jobs: int, options: Mapping[str, Any]) -> None:
    """Make all runs; one that diverges is a row of the table."""
    data_dir, todo = options.get("data_dir"), list(experiments)
    how = {"overwrite": bool(options.get("overwrite")), "style": style_of(options.get("progress"))}
    with Jobs(jobs, todo[0].engine.device) as places:
        for _ in places.finish(todo, out, data_dir=data_dir and Path(data_dir), log=options.get("log"), **how):
            pass


def _ranked(title: str, rows: Sequence[Row]) -> Table:
    """The table of a sweep: its rows, the best first, with differences to the best, on held-out examples if any."""
    by = rows[0].objective
    key = by.validation_key
    held = any(evaluations(run, key) for row in rows for run in row.runs)

    def value(run: SavedRun) -> float | None:
        return mean_of_last(run.records, key) if held else next(reversed(evaluations(run, by.key)), None)

    values = {row.label: [value(run) for run in row.runs] for row in rows}
    sound = {row.label: [] if row.broken else [one for one in values[row.label] if one is not None] for row in rows}
    sign = -1 if by.higher_is_better else 1
    ranked = sorted(rows, key=lambda row: sign * statistics.fmean(sound[row.label] or [sign * math.inf]))
    best = sound[ranked[0].label]
    return Table(
        title,
        [
            row._replace(
                validation=MeanInterval.of(values[row.label]) if held else None,
                difference=MeanInterval.of(a - b for a, b in zip(sound[row.label], best, strict=False)),
            )
            for row in ranked
        ],
        by,
    )
