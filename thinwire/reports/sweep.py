"""The table of a sweep: the objective of every setting over seeds, its bytes, and its distance to the best setting.

    difference   mean over seeds of (value - value of the best setting with the same seed), with its 95 % interval

Settings are ranked by the mean of the final objective on the test set, or, with `task.validation_fraction`, of the
clients' accuracy (or loss) on the examples that they hold out. A setting of which a run diverged, collapsed or is at
chance is listed after the others and is never the best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.frames import data_frame
from thinwire.core.units import human_bytes
from thinwire.errors import ConfigError
from thinwire.experiments.collapse import BROKEN, count_broken
from thinwire.experiments.compare import Watch, watcher
from thinwire.experiments.knobs import value_text
from thinwire.experiments.records import Recorded
from thinwire.experiments.request import Make, maker
from thinwire.experiments.sweep import Swept, run_sweep
from thinwire.experiments.toml import Table
from thinwire.experiments.validation_runs import mean_of_last
from thinwire.metrics.objective import Objective
from thinwire.protocol.method import Method
from thinwire.reports.report import check_page, report
from thinwire.reports.seed_groups import MeanInterval
from thinwire.reports.text_table import Cells


class SweepRow(NamedTuple):
    """One setting; means over seeds.

    Args:
        values: by name.
        settings: by dotted path.
        final: the objective after the last round.
        best: the objective in its best round.
        validation: the clients' accuracy or loss on held-out examples; None without those.
        bytes: of all messages.
        difference: to the best setting, paired by seed, of the number that ranks; None for failed settings.
        failed: how many runs diverged, collapsed or are at chance; `-` if none.
        runs: the run directories.
    """

    values: dict[str, Any]
    settings: Table
    final: MeanInterval | None
    best: MeanInterval | None
    validation: MeanInterval | None
    bytes: float
    difference: MeanInterval | None
    failed: str
    runs: tuple[Path, ...]


@dataclass(frozen=True, eq=False)
class Sweep:
    """The result of a sweep.

    Args:
        method: the label of the method.
        task: the name of the task.
        seeds: the seeds of every setting.
        rows: the settings, the best first, those that failed last.
        objective: what `final` and `best` are.
        ranked_by: what ranks: the objective, or accuracy or loss on validation examples.
        by_validation: whether validation examples rank.
    """

    method: str
    task: str
    seeds: tuple[int, ...]
    rows: list[SweepRow]
    objective: Objective
    ranked_by: Objective
    by_validation: bool

    @property
    def best(self) -> SweepRow | None:
        """The best setting; None if every setting failed."""
        return self.rows[0] if self.rows[0].difference is not None else None

    @property
    def how(self) -> str:
        """What ranks, in words."""
        if self.by_validation:
            return f"{self.ranked_by.name} on examples that the clients hold out"
        return f"final {self.objective.label}"

    def cells(self) -> Cells:
        """The table as text."""
        names = list(self.rows[0].values)
        unit = " %" if self.objective.name == "accuracy" else ""
        heads = [*names, f"final {self.objective.name}{unit}", f"best{unit}"]
        heads += [f"validation {self.ranked_by.name}"] if self.by_validation else []
        heads += ["bytes", "to the best"]
        failed = any(row.failed != "-" for row in self.rows)
        rows = []
        for row in self.rows:
            cells = [*map(value_text, row.values.values()), _mean(row.final, unit), _mean(row.best, unit)]
            cells += [_mean(row.validation, unit)] if self.by_validation else []
            cells += [human_bytes(row.bytes), _difference(row, self.ranked_by)]
            rows.append([*cells, *([row.failed] if failed else [])])
        return Cells([*heads, *(["failed"] if failed else [])], rows, len(names))

    def frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        return data_frame(self.plain())

    def plain(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON."""
        rows = []
        for row in self.rows:
            numbers = {f"{key}_{part}": getattr(value, part, None) for key, value in _numbers(row) for part in _PARTS}
            shared = {"bytes": row.bytes, "failed": row.failed, "is_best": row is self.best, "settings": row.settings}
            rows.append({**row.values, **numbers, **shared, "runs": [str(path) for path in row.runs]})
        return rows

    def report(self, html: Path | str | None = None, md: Path | str | None = None) -> None:
        """Write the page of `tw.report` about all runs."""
        report([path for row in self.rows for path in row.runs], html, md)

    def __repr__(self) -> str:
        count = f"{len(self.rows)} settings, {len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        lines = [f"Sweep {self.method} on {self.task}: {count}, ranked by {self.how}"]
        if self.best is None:
            lines.append("  no setting trains")
        else:
            chosen = ", ".join(f"{name} {value_text(value)}" for name, value in self.best.values.items())
            value = self.best.validation if self.by_validation else self.best.final
            lines.append(f"  best: {chosen}: {self.ranked_by.text(value.mean if value else None)}")
        if failed := sum(row.failed != "-" for row in self.rows):
            lines.append(f"  failed: {failed}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.cells().html()


_PARTS = ("mean", "std", "half")


def _numbers(row: SweepRow) -> list[tuple[str, MeanInterval | None]]:
    return [(key, getattr(row, key)) for key in ("final", "best", "validation", "difference")]


def _mean(value: MeanInterval | None, unit: str) -> str:
    """Mean and standard deviation over seeds; an accuracy in percent."""
    if value is None:
        return "-"
    mean, std = (f"{100 * one:.2f}" if unit else f"{one:.4g}" for one in value[:2])
    return mean if value.half is None else f"{mean} ± {std}"


def _difference(row: SweepRow, ranked_by: Objective) -> str:
    """The distance to the best setting and half its 95 % interval; percentage points for an accuracy."""
    value = row.difference
    if value is None:
        return "-"
    if value.mean == 0 and not value.std:
        return "0"
    mean, half = (
        f"{100 * one:+.2f}" if ranked_by.name == "accuracy" else f"{one:+.3g}"
        for one in (value.mean, value.half or 0.0)
    )
    return mean if value.half is None else f"{mean} ± {half.lstrip('+')}"


def table_of(method: str, task: str, seeds: Sequence[int], swept: Sequence[Swept]) -> Sweep:
    """The table of the runs of a sweep."""
    objective = _objective(swept[0].runs[0])
    finals = [[objective.summary(run.records)["final"] for run in one.runs] for one in swept]
    held, by = _validation(swept, objective)
    ranked_by, values = (objective, finals) if by is None else (by, held)
    failed = [count_broken(_status(run) for run in one.runs) for one in swept]
    known = [None if bad != "-" else _complete(own) for own, bad in zip(values, failed, strict=True)]
    sign = -1.0 if ranked_by.higher_is_better else 1.0
    means = [math.inf if own is None else sign * statistics.fmean(own) for own in known]
    order = sorted(range(len(swept)), key=means.__getitem__)
    rows = []
    for i in order:
        own, top, runs = known[i], known[order[0]], swept[i].runs
        paired = [] if own is None or top is None else [a - b for a, b in zip(own, top, strict=True)]
        rows.append(
            SweepRow(
                swept[i].values,
                swept[i].settings,
                MeanInterval.of(finals[i]),
                MeanInterval.of(objective.summary(run.records)["best"] for run in runs),
                None if by is None else MeanInterval.of(held[i]),
                statistics.fmean(run.totals["bytes_total_honest"] for run in runs),
                MeanInterval.of(paired),
                failed[i],
                tuple(run.path for run in runs),
            )
        )
    return Sweep(method, task, tuple(seeds), rows, objective, ranked_by, by is not None)


Values = list[list[float | None]]  # of each setting, by seed


def _validation(swept: Sequence[Swept], objective: Objective) -> tuple[Values, Objective | None]:
    """The clients' accuracy, or else loss, on held-out examples; None for what it is if there are none."""
    loss = Objective("loss", higher_is_better=False)
    for by in (loss,) if objective.name == "loss" else (Objective(), loss):
        values = [[mean_of_last(run.records, f"client_{by.name}") for run in one.runs] for one in swept]
        if any(value is not None for own in values for value in own):
            return values, by
    return [], None


def _complete(values: Sequence[float | None]) -> list[float] | None:
    """The values; None if one is missing or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if len(known) == len(values) else None


def _objective(run: Recorded) -> Objective:
    """The objective of a run; accuracy for runs of versions that had none."""
    found = (run.summary or {}).get("objective") or {}
    return Objective(str(found.get("name", "accuracy")), bool(found.get("higher_is_better", True)))


def _status(run: Recorded) -> str:
    """The status of a run; one that is at chance is so after few rounds too."""
    status, chance = run.verdict.status, run.chance
    if status in BROKEN or chance is None:
        return status
    last = [record[chance.metric] for record in run.records if record.get(chance.metric) is not None][-1:]
    return "at chance" if last and last[0] <= chance.ceiling else status


def sweep(
    method: str | Method,
    over: Mapping[str, Sequence[Any]],
    on: Any = None,
    *,
    seeds: int = 3,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    seed: int = 0,
    validation_fraction: float | None = None,
    out: Path | str = "runs",
    html: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    device: str | None = None,
    data_dir: Path | str | None = None,
    again: bool = False,
    progress: bool | None = None,
) -> Sweep:
    """Run a method with every combination of some values, over the same seeds.

    Args:
        method: names of methods, an experiment file, or a Method.
        over: values by short key or dotted path, `{"lr": [0.1, 0.3], "k": [64, 128]}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        rounds: number of rounds.
        clients: number of clients.
        cohort: clients in a round.
        seed: the first seed.
        validation_fraction: fraction of each client's examples that is held out and ranks the settings; by default
            they are ranked by the test set.
        out: the folder of the runs; finished ones are used again.
        html: the file of a page.
        overrides: settings by dotted path.
        recipe: the name of a recipe.
        device: `cpu` or `cuda`.
        data_dir: the folder of datasets.
        again: run even if a run is finished.
        progress: print a line for each run; by default in a terminal.
    """
    check_page([html] if html else [], ())
    held = {} if validation_fraction is None else {"task.validation_fraction": validation_fraction}
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    make = maker(method, on, recipe=recipe, overrides={**dict(overrides or {}), **held}, **options)
    folder = None if data_dir is None else Path(data_dir)
    found = sweep_of(make, over, range(seed, seed + seeds), Path(out), watcher(progress), data_dir=folder, again=again)
    if html:
        found.report(html)
    return found


def sweep_of(
    make: Make,
    over: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    out: Path,
    watch: Watch,
    *,
    data_dir: Path | None = None,
    again: bool = False,
) -> Sweep:
    """Run a sweep over the experiments that `make` returns, and make its table (`run_sweep` has the arguments)."""
    if not seeds:
        raise ConfigError("seeds must be 1 or more; write for example seeds=3")
    own = make({})
    swept = run_sweep(make, over, seeds, out, watch, data_dir=data_dir, again=again)
    return table_of(own.name, swept[0].runs[0].task, seeds, swept)
