"""`tw.compare` and `tw.sweep`: several methods, or a method with several settings, on one task over the same seeds.

Every run has the directory that `thinwire run` gives it: a finished run is read, one that was killed goes on, and one
that diverged stays a row of the table.

>>> import thinwire as tw, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     found = tw.compare(["fedavg", "mapo"], on="digits", seeds=1, rounds=1, cohort=2, out=folder)
>>> [row.method for row in found.rows]
['fedavg', 'mapo']
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from thinwire.errors import ConfigError, Diverged
from thinwire.federation.settings import Accounting, Settings
from thinwire.metrics.objective import Objective
from thinwire.protocol.method import Method
from thinwire.reports.report import check_page
from thinwire.reports.seed_groups import ACCURACY, MeanInterval, SeedGroup, objectives
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN, count_broken
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.options import Options
from thinwire.runs.progress import shown, style_of
from thinwire.runs.records import SavedRun, read_run, read_totals
from thinwire.runs.search_record import SearchRecord, write_search
from thinwire.search import tune as tuner
from thinwire.search.candidates import changes, knobs_of, maker, points
from thinwire.search.table import Table, table_of
from thinwire.search.tune import RATES, SEARCH_SEED, OnSearch, silent
from thinwire.search.validation import mean_of_last


def _run_all(every: Sequence[Settings], out: Path, options: Mapping[str, Any]) -> None:
    data_dir = options.get("data_dir")
    how: dict[str, Any] = {"data_dir": data_dir and Path(data_dir), "resume": True}
    how["overwrite"] = bool(options.get("overwrite"))
    for one in every:
        style = style_of(options.get("progress"))
        with (
            shown(f"{one.name} seed {one.seed}", one.rounds, style, one.accounting) as on_round,
            suppress(Diverged),  # a row of the table; the other runs still go on
        ):
            execute(one, default_folder(one, out), on_round=on_round, **how)


def _group(label: str, paths: Sequence[Path]) -> SeedGroup:
    runs = [read_run(path) for path in paths]
    return SeedGroup(label, runs, objectives(runs)[0])


def compare(
    methods: Sequence[str] | Mapping[str, str | Method],
    on: Any = None,
    *,
    seeds: int = 3,
    tune: bool = False,
    tune_rates: int = RATES,
    tune_share: float = 1.0,
    tune_seed: int = SEARCH_SEED,
    html: Path | str | None = None,
    targets: Sequence[float] = (),
    on_search: OnSearch = silent,
    **options: Unpack[Options],
) -> Table:
    """Train several methods on the same clients and batches, and compare the objective and bytes.

    Args:
        methods: names of methods, combinations with `+`, experiment files; or a name for each Method:
            `{"mine": tw.methods.mapo(k=64), "fedavg": "fedavg"}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        tune: first search the learning rate of every method with the same budget.
        tune_rates: number of rates that each method may try.
        tune_share: rounds of the last rung of the search, as a fraction.
        tune_seed: the seed of the search; none of the seeds of the comparison.
        html: the file of a page.
        targets: values of the objective whose cost the page compares.
        on_search: returns functions that are called with each run and each rung of a search.
        **options: as for `tw.run`; `out` is the folder of the runs, of which finished ones are used again, by default
            `runs`; those of searches are in `search` in it.
    """
    check_page([html] if html else [], ())
    if isinstance(methods, str | Method) or not methods:
        raise ConfigError(f"methods must be a list such as ['fedavg', 'mapo'], not {methods!r}")
    if seeds < 1:
        raise ConfigError(f"seeds must be 1 or more, not {seeds}")
    pairs = list(methods.items()) if isinstance(methods, Mapping) else [("", one) for one in methods]
    makes = [maker(one, on, **{**options, **({"name": name} if name else {})}) for name, one in pairs]
    check_page([], targets, makes[0]({}).eval.objective)
    seed, folder = options.get("seed") or 0, Path(options.get("out") or "runs")
    every = range(seed, seed + seeds)
    experiments: dict[str, dict[Path, Settings]] = {}  # by label and run directory
    searches: dict[str, SearchRecord] = {}
    if tune and tune_seed in every:
        raise ConfigError(
            f"the seed of the search, {tune_seed}, is among the seeds of the comparison, {seed} to {every[-1]}; "
            f"write --tune-seed {every[-1] + 1}"
        )
    for make in makes:
        make({"seed": seed})  # raises before the first search
    for make in makes:
        name, found = make({}).name, {}
        if tune:
            if name not in searches:
                how: dict[str, Any] = {"rates": tune_rates, "share": tune_share, "seed": tune_seed, "full_run": False}
                how |= {"out": folder / "search", "data_dir": options.get("data_dir"), "on_search": on_search}
                searches[name] = tuner.tune(make, **how).record
            found = {searches[name].setting: searches[name].value}
        runs = [make({**found, "seed": one}) for one in every]
        experiments.setdefault(name, {}).update({default_folder(one, folder): one for one in runs})
    every_run = [one for same in experiments.values() for one in same.values()]
    _run_all(every_run, folder, options)
    groups = [_group(name, list(same)) for name, same in experiments.items()]
    for group in groups:
        for run in group.runs:
            if group.label in searches:
                write_search(run.path, searches[group.label])
    table = groups[0].runs[0].table
    size = f"{table['task'].get('clients', 'own')} clients, {table['rounds']} rounds, {seeds} seed{'s' * (seeds > 1)}"
    accounting: Accounting = "ideal" if all(one.accounting == "ideal" for one in every_run) else "honest"
    result = table_of(groups, f"{groups[0].task}: {size}", accounting=accounting, searches=searches)
    if html:
        result.report(html, targets=targets)
    return result


def sweep(
    method: str | Method,
    over: Mapping[str, Sequence[Any]],
    on: Any = None,
    *,
    seeds: int = 3,
    html: Path | str | None = None,
    **options: Unpack[Options],
) -> Table:
    """Run a method with every combination of some values, over the same seeds; impossible values are refused first.

    All settings have the same clients, initial weights and batches: differences between settings are paired by seed.

    Args:
        method: names of methods, an experiment file, or a Method.
        over: values by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        html: the file of a page.
        **options: as for `tw.run`; `out` is the folder of the runs, of which finished ones are used again, by default
            `runs`. Settings are ranked on validation examples if there are any (`validation_fraction`), or else on the
            test set.
    """
    check_page([html] if html else [], ())
    if seeds < 1:
        raise ConfigError(f"seeds must be 1 or more, not {seeds}")
    make = maker(method, on, **options)
    seed, folder, data_dir = options.get("seed") or 0, Path(options.get("out") or "runs"), options.get("data_dir")
    own = make({})
    knobs = knobs_of(own, over)
    settings = [changes(own, knobs, point) for point in points(knobs)]
    experiments = [[make({**one, "seed": number}) for number in range(seed, seed + seeds)] for one in settings]
    for first, *_ in experiments:
        if read_totals(default_folder(first, folder)) is None:
            build_job(first, None if data_dir is None else Path(data_dir))
    # seed by seed: an interrupted sweep has all settings on its first seeds
    ordered = [one for same in zip(*experiments, strict=True) for one in same]
    _run_all(ordered, folder, options)
    groups = [_group(own.name, [default_folder(one, folder) for one in same]) for same in experiments]
    title = f"{own.name} on {groups[0].task}: {len(groups)} settings, {seeds} seed{'s' * (seeds > 1)}"
    values = [dict(zip((knob.label for knob in knobs), point, strict=True)) for point in points(knobs)]
    result = _ranked(table_of(groups, title), values, settings)
    if html:
        result.report(html)
    return result


def _ranked(table: Table, points: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]) -> Table:
    """The table of a sweep: rows with values by name and settings by path, ranked, with differences to the best."""
    groups = [row.group for row in table.rows]
    held = _validation(groups)
    by = held or groups[0].objective

    def score(group: SeedGroup, run: SavedRun) -> Any:
        return mean_of_last(run.records, f"client_{by.name}") if held else next(iter(group.values(run)[::-1]), None)

    scores = [[score(group, run) for run in group.runs] for group in groups]
    failed = [count_broken(_status(run) for run in group.runs) for group in groups]
    known = [
        own if bad == "-" and all(one is not None and math.isfinite(one) for one in own) else []
        for own, bad in zip(scores, failed, strict=True)
    ]
    sign = -1.0 if by.higher_is_better else 1.0
    means = [sign * statistics.fmean(own) if own else math.inf for own in known]
    rows, order = [], sorted(range(len(groups)), key=means.__getitem__)
    for i in order:
        changed: dict[str, Any] = {"values": points[i], "settings": settings[i], "failed": failed[i]}
        changed |= {"validation": MeanInterval.of(scores[i])} if held else {}
        paired = MeanInterval.of(a - b for a, b in zip(known[i], known[order[0]], strict=False))
        rows.append(table.rows[i]._replace(difference=paired, **changed))
    return Table(table.title, rows, by, held is not None)


def _validation(groups: Sequence[SeedGroup]) -> Objective | None:
    """The clients' accuracy, or else loss, on held-out examples; None if there are none."""
    records = [record for group in groups for run in group.runs for record in run.records]
    loss = Objective("loss", higher_is_better=False)
    for by in (loss,) if groups[0].objective == loss else (ACCURACY, loss):
        if any(record.get(f"client_{by.name}") is not None for record in records):
            return by
    return None


def _status(run: SavedRun) -> str:
    """The status of a run; one that is at chance is so after few rounds too."""
    status, chance = run.verdict.status, run.chance
    if status in BROKEN or chance is None:
        return status
    last = [record[chance.metric] for record in run.records if record.get(chance.metric) is not None][-1:]
    return "at chance" if last and last[0] <= chance.ceiling else status
