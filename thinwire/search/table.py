"""The table of runs: one row for each method or setting, with means over seeds.

    ratio        bytes of FedAvg (of the first row, without one) on the same task divided by those of the row
    difference   mean over seeds of (value - value of the best row with the same seed), with its 95 % interval

`tw.compare` and `tw.sweep` return it, and verbs print it. The rows of a sweep are settings, ranked by the mean of the
final objective on the test set or, with `task.validation_fraction`, of the clients' accuracy (or loss) on the examples
that they hold out. A setting of which a run diverged, collapsed or is at chance is listed after the others and is never
the best.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from thinwire.core.text import visible
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.settings import Accounting, Settings
from thinwire.metrics.objective import Objective
from thinwire.protocol.method import Method
from thinwire.reports.page import Cells
from thinwire.reports.report import check_page, plot, report
from thinwire.reports.seed_groups import (
    ACCURACY,
    MeanInterval,
    SeedGroup,
    baseline_of,
    byte_columns,
    objective_name,
    objectives,
    result_columns,
    value_text,
)
from thinwire.runs.build import build_job
from thinwire.runs.collapse import BROKEN, count_broken
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.options import Options
from thinwire.runs.progress import shown, style_of
from thinwire.runs.records import SavedRun, read_run, read_totals
from thinwire.runs.search_record import SearchRecord, write_search
from thinwire.search import candidates, tune as tuner
from thinwire.search.candidates import changes, knobs_of, maker, points
from thinwire.search.halving import mean_of_last
from thinwire.search.tune import RATES, SEARCH_SEED, OnSearch, silent

TOTALS = (
    *("bytes_up", "bytes_down", "bytes_catchup", "bytes_abandoned", "bytes_total_honest", "bytes_total_ideal"),
    "seconds",
)


class Row(NamedTuple):
    """One method or setting; means over seeds.

    Args:
        method: its label.
        group: its runs, one for each seed.
        failed: how many runs diverged, collapsed or are at chance; `-` if none.
        accounting: which bytes `bytes_total` and `ratio` have.
        ratio: bytes of another row divided by these.
        compared_with: the label of that row.
        seconds_by_link: modeled time over links.
        search: how its learning rate was found.
        values: of a sweep, by name.
        settings: of a sweep, by dotted path.
        validation: of a sweep, the clients' accuracy or loss on held-out examples; None without those.
        difference: of a sweep, to the best setting, of the number that ranks; None for failed settings.
    """

    method: str
    group: SeedGroup
    failed: str
    accounting: Accounting
    ratio: float | None
    compared_with: str
    seconds_by_link: dict[str, float]
    search: SearchRecord | None = None
    values: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    validation: MeanInterval | None = None
    difference: MeanInterval | None = None

    @property
    def final(self) -> MeanInterval | None:
        """The objective after the last round."""
        return self.group.final

    @property
    def best(self) -> MeanInterval | None:
        """The objective in its best round."""
        return self.group.best

    @property
    def bytes(self) -> float:
        """Bytes of all messages of a run."""
        return self.group.total("bytes_total_honest")

    @property
    def runs(self) -> list[Path]:
        """The run directories."""
        return [run.path for run in self.group.runs]

    def plain(self) -> dict[str, Any]:
        """The row as plain values, for JSON; the values of a sweep are keys."""
        objective = self.group.objective
        means = {"final": self.final, "best": self.best, "validation": self.validation, "difference": self.difference}
        return {
            **self.values,
            "method": self.method,
            "seeds": len(self.runs),
            "objective": {"name": objective.name, "higher_is_better": objective.higher_is_better},
            **{name: value and value._asdict() for name, value in means.items()},
            "failed": self.failed,
            "final_metrics": {name: value._asdict() for name, value in self.group.metrics.items()},
            "final_clients_eval": {name: value._asdict() for name, value in self.group.clients.items()},
            **{key: self.group.total(key) for key in TOTALS},
            "accounting": self.accounting,
            "bytes_total": self.group.total(f"bytes_total_{self.accounting}"),
            "ratio": self.ratio,
            "compared_with": self.compared_with,
            "seconds_by_link": self.seconds_by_link,
            "settings": dict(self.settings),
            "runs": [str(path) for path in self.runs],
            **({"search": self.search._asdict()} if self.search else {}),
        }


@dataclass(frozen=True, eq=False)
class Table:
    """Runs side by side.

    Args:
        title: what is compared.
        rows: one for each method; of a sweep one for each setting, the best first, those that failed last.
        ranked_by: of a sweep, what ranks: the objective, or accuracy or loss on validation examples.
        by_validation: whether validation examples rank.
    """

    title: str
    rows: list[Row]
    ranked_by: Objective | None = None
    by_validation: bool = False

    @property
    def best(self) -> Row | None:
        """The best setting of a sweep; None if every setting failed."""
        return self.rows[0] if self.rows[0].difference is not None else None

    @property
    def runs(self) -> list[SavedRun]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.group.runs]

    @property
    def how(self) -> str:
        """What ranks, in words."""
        if self.by_validation and self.ranked_by:
            return f"{self.ranked_by.name} on examples that the clients hold out"
        return f"final {self.rows[0].group.objective.label}"

    def cells(self) -> Cells:
        """The table as text."""
        rows, by = self.rows, self.ranked_by
        columns = {name: [candidates.value_text(row.values[name]) for row in rows] for name in rows[0].values}
        columns = columns or {"method": [visible(row.method, 200) for row in rows]}
        left, groups = len(columns), [row.group for row in rows]
        columns |= result_columns(groups)
        if by and self.by_validation:
            columns[f"validation {by.name}"] = [value_text(by, row.validation) for row in rows]
        sent = byte_columns(groups)
        if by:
            columns["total"] = sent["total"]
            columns["to the best"] = [_difference(row.difference, by) for row in rows]
        else:
            columns |= sent | {"ratio": ["-" if row.ratio is None else f"{row.ratio:.3g}x" for row in rows]}
        if any(row.failed != "-" for row in rows):
            columns["failed"] = [row.failed for row in rows]
        return Cells.of(self.title, columns, left)

    def notes(self) -> list[str]:
        """What the columns mean, in sentences."""
        if self.ranked_by:
            points = ", in percentage points" if self.ranked_by == ACCURACY else ""
            text = (
                f"mean ± standard deviation over seeds; ranked by {self.how}; to the best: mean difference to the best"
            )
            test = "the test set ranks: choose settings by --validation-fraction 0.1, or by `thinwire tune`"
            texts = [f"{text} setting on the same seeds ± half its 95 % interval{points}"]
            return texts if self.by_validation else [*texts, test]
        names = list(dict.fromkeys(objective_name(row.group.objective).removeprefix("test ") for row in self.rows))
        lost = " and abandoned rounds" if any(row.group.total("bytes_abandoned") for row in self.rows) else ""
        baseline = visible(" or ".join(dict.fromkeys(row.compared_with for row in self.rows)), 200)
        accounting = self.rows[0].accounting
        by = f"by {'total' if accounting == 'honest' else 'ideal'} ({accounting} accounting)"
        texts = [
            f"final and best {' or '.join(names)}; bytes of all messages (total), and without catch-up{lost} (ideal); "
            f"ratio: bytes of {baseline} divided by these, {by}"
        ]
        if len(names) > 1:
            texts.insert(0, f"the rows have different objectives, which cannot be compared: {', '.join(names)}")
        return texts

    def plain(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON."""
        return [{**row.plain(), **({"is_best": row is self.best} if self.ranked_by else {})} for row in self.rows]

    def frame(self) -> Any:
        """The rows as a pandas DataFrame; means and standard deviations are columns of their own: `final_mean`."""
        import pandas  # type: ignore[import-untyped]

        return pandas.json_normalize(self.plain(), sep="_")

    def report(self, html: Path | str | None = None, md: Path | str | None = None, **options: Any) -> None:
        """Write the page of `tw.report` about all runs."""
        report([run.path for run in self.runs], html, md, **options)

    def plot(self) -> Any:
        """The objective against bytes, as a matplotlib Figure."""
        return plot([run.path for run in self.runs])

    def __repr__(self) -> str:
        return f"{self.title}\n{self._texts().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return str(self._texts().to_html(index=False))

    def _texts(self) -> Any:
        import pandas

        cells = self.cells()
        return pandas.DataFrame([[visible(cell, 200) for cell in row] for row in cells.rows], columns=cells.heads)


def _difference(value: MeanInterval | None, by: Objective) -> str:
    """The distance to the best setting and half its 95 % interval; percentage points for an accuracy."""
    if value is None or (value.mean == 0 and not value.std):
        return "-" if value is None else "0"
    scale, form = (100, "+.2f") if by == ACCURACY else (1, "+.3g")
    half = "" if value.half is None else f" ± {scale * value.half:{form}}".replace("+", "")
    return f"{scale * value.mean:{form}}{half}"


def table_of(
    groups: Sequence[SeedGroup],
    title: str = "",
    *,
    accounting: Accounting = "honest",
    compute: float | None = None,
    searches: Mapping[str, SearchRecord] | None = None,
) -> Table:
    """One row for each group of runs.

    Args:
        groups: runs that differ in their seed only, under a label.
        title: what is compared.
        accounting: which bytes are compared.
        compute: training seconds of a client per round; as measured by default.
        searches: how learning rates were found, by label.
    """
    several = len({group.task for group in groups}) > 1
    rows = []
    for group in groups:
        other = baseline_of([one for one in groups if (one.task, one.objective) == (group.task, group.objective)])
        own, theirs = (one.total(f"bytes_total_{accounting}") for one in (group, other))
        label, compared_with = (f"{one.task}: {one.label}" if several else one.label for one in (group, other))
        times = [seconds_by_link(run.records, compute) for run in group.runs]
        by_link = {name: statistics.fmean(time[name] for time in times) for name in times[0]}
        failed = count_broken(run.verdict.status for run in group.runs)
        ratio = theirs / own if own else None
        search = (searches or {}).get(group.label)
        rows.append(Row(label, group, failed, accounting, ratio, compared_with, by_link, search))
    return Table(title, rows)


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
