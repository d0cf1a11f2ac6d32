"""Chapter about a sweep: the best value of the objective against one setting, with a line for each value of a second.

A method has one if its groups of runs differ in one or two settings, of which at least one is a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.core.units import human_bytes
from thinwire.experiments.collapse import FAILED_RUNS, count_broken
from thinwire.reports.charts import Curve, PlotArea, curves
from thinwire.reports.formatting import NARROW, ident, setting_text, value_text
from thinwire.reports.objectives import ACCURACY, number_text, objective_name, percent_text
from thinwire.reports.page import Chapter, Figure, Piece, Table
from thinwire.reports.scale import limits, outside
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.settings import differing, flat
from thinwire.reports.svg import swatch


class Sweep(NamedTuple):
    """The groups of one method that differ in a setting `x`, and perhaps in a setting `line`."""

    method: str
    groups: list[SeedGroup]
    x: str
    line: str = ""

    def at(self, group: SeedGroup, path: str) -> Any:
        """The value of a setting of a group; None if it has none."""
        return flat(group.config).get(path)


def sweeps(groups: Sequence[SeedGroup]) -> list[Sweep]:
    """The sweeps among groups of runs; `x` is the numeric setting with the most values."""
    names = list(dict.fromkeys(group.runs[0].name for group in groups))
    found = []
    for name in names:
        same = [group for group in groups if group.runs[0].name == name]
        paths = [path for path in differing([group.config for group in same]) if path != "name"]
        values = {path: [flat(group.config).get(path) for group in same] for path in paths}
        numeric = [path for path in paths if all(_is_number(value) for value in values[path])]
        if len(same) < 2 or not 1 <= len(paths) <= 2 or not numeric:
            continue
        x = max(numeric, key=lambda path: len(set(values[path])))
        found.append(Sweep(name, same, x, next((path for path in paths if path != x), "")))
    return found


def sweep_chapters(task: str, groups: Sequence[SeedGroup]) -> list[Chapter]:
    """One chapter for each sweep that has a value to draw."""
    found = [one for one in sweeps(groups) if any(_point(one, group) for group in one.groups)]
    return [_chapter(task, sweep, f"{ident(task)}-sweep-{i}") for i, sweep in enumerate(found)]


def _chapter(task: str, sweep: Sweep, name: str) -> Chapter:
    objective = sweep.groups[0].objective
    measure = f"best {objective_name(objective)}"
    lines = _lines(sweep)
    xs = [point[0] for line in lines for point in line.points]
    percent = objective == ACCURACY
    shown = limits(lines, objective.higher_is_better, bounded=percent)
    title = f"{sweep.method}: {measure} against {sweep.x}, {task}"
    ends = "; ".join(f"{line.label}: {', '.join(_words(percent, point) for point in line.points)}" for line in lines)
    area = PlotArea(
        title,
        f"x axis: {sweep.x}; y axis: {measure}; {ends}.",
        f"{sweep.x} (log scale)" if (log := min(xs) > 0 and max(xs) / min(xs) >= 8) else sweep.x,
        measure,
        ident=name,
        log_x=log,
        y_text=percent_text if percent else lambda value: number_text(value, 3),
        limits=shown,
    )
    notes = []
    if any(len(group.runs) > 1 for group in sweep.groups):
        notes.append("Mean over seeds; the band spans the lowest to the highest seed.")
    notes.append(f"{'Up' if objective.higher_is_better else 'Down'} is better.")
    if lost := [group.label for group in sweep.groups if _point(sweep, group) is None]:
        notes.append(f"Not drawn, because all runs failed: {', '.join(lost)}.")
    if clipped := outside(lines, shown):
        notes.append(f"Values outside the scale are drawn at its edge: {', '.join(clipped)}.")
    legend = [(swatch(line.series), line.label) for line in lines] if sweep.line else []
    narrow = curves(lines, area._replace(width=NARROW, height=300))
    pieces: list[Piece] = [Figure(title, " ".join(notes), curves(lines, area), narrow, legend), _table(sweep)]
    return Chapter(f"Sweep of {sweep.method}", pieces)


def _lines(sweep: Sweep) -> list[Curve]:
    """A curve for each value of the second setting, ordered by the first."""
    values = [sweep.at(group, sweep.line) if sweep.line else None for group in sweep.groups]
    lines = []
    for series, value in enumerate(_unique(values)):
        here = [group for group, theirs in zip(sweep.groups, values, strict=True) if theirs == value]
        points = sorted(point for group in here if (point := _point(sweep, group)))
        label = f"{sweep.line.rsplit('.', 1)[-1]} {setting_text(value)}" if sweep.line else sweep.method
        lines.append(Curve(label, series, points))
    return [line for line in lines if line.points]


def _point(sweep: Sweep, group: SeedGroup) -> tuple[float, float, float, float] | None:
    """A setting, and mean, lowest and highest best value over the seeds that did not fail."""
    found = [group.best_of(run) for run in group.runs if run not in group.failed]
    known = [value for value in found if value is not None]
    if not known:
        return None
    return float(sweep.at(group, sweep.x)), sum(known) / len(known), min(known), max(known)


def _table(sweep: Sweep) -> Table:
    objective = sweep.groups[0].objective
    unit = "%" if objective == ACCURACY else objective_name(objective)
    paths = [path for path in (sweep.x, sweep.line) if path]
    rows = []
    for group in sorted(sweep.groups, key=lambda group: float(sweep.at(group, sweep.x))):
        first, *others = (setting_text(sweep.at(group, path)) for path in paths)
        total = group.total("bytes_total")
        scores = [value_text(objective, group.best), value_text(objective, group.final)]
        sent = human_bytes(total.mean) if total else "-"
        failed = count_broken(run.verdict.status for run in group.runs)
        rows.append([first, *others, *scores, sent, f"{len(group.runs)}", failed])
    heads = [path.rsplit(".", 1)[-1] for path in paths]
    caption = f"{sweep.method} by {' and '.join(paths)} (mean ± standard deviation over seeds)"
    return Table(caption, [*heads, f"best {unit}", f"final {unit}", "total", "seeds", FAILED_RUNS], rows)


def _words(percent: bool, point: tuple[float, ...]) -> str:
    return f"{percent_text(point[1]) if percent else number_text(point[1])} at {point[0]:g}"


def _unique(values: Sequence[Any]) -> list[Any]:
    """Different values in ascending order, or in order of appearance if they cannot be compared."""
    found = [value for i, value in enumerate(values) if value not in values[:i]]
    return sorted(found) if all(map(_is_number, found)) else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
