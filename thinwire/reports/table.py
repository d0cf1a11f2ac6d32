"""A table of runs: their objective, such as accuracy, and its cost in bytes, rounds and seconds.

    ratio    bytes of FedAvg (of the first row, without one) on the same task divided by those of the row

The same table is printed, written as JSON, and part of the page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from thinwire.core.text import human_bytes, human_seconds, visible
from thinwire.metrics.objective import Objective
from thinwire.reports import figures
from thinwire.reports.page import Cells, Drawing, table_html
from thinwire.reports.rows import (
    ACCURACY,
    MeanInterval,
    Row,
    baseline_of,
    mean_text,
    number_text,
    objective_name,
    percent_text,
    value_text,
)
from thinwire.reports.targets import SLOW, Costs, cost_to_reach, target_text
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BYTES = {"up": "up", "down": "down", "catch-up": "catchup", "abandoned": "abandoned"}
BYTES |= {"total": "total_honest", "ideal": "total_ideal"}  # head of a column -> total
BAND = "Mean over seeds; the band spans the lowest to the highest seed."
_NAMES = {"accuracy": "test accuracy", "client_accuracy": "client accuracy", "loss": "training loss"}


@dataclass(frozen=True, eq=False)
class Table:
    """Runs side by side.

    Args:
        title: what is compared.
        rows: one for each method; of a sweep one for each setting, the best first, those that failed last.
        ranked_by: of a sweep, what ranks: the objective, or accuracy or loss on validation examples.
        targets: values of the objective whose cost is compared.
    """

    title: str
    rows: Sequence[Row]
    ranked_by: Objective | None = None
    targets: Sequence[float] = ()

    @property
    def best(self) -> Row | None:
        """The best setting of a sweep; None if every setting failed."""
        return self.rows[0] if self.rows[0].difference is not None else None

    @property
    def runs(self) -> list[SavedRun]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    @property
    def objective(self) -> Objective:
        """What the runs of a part are ranked by."""
        return self.rows[0].objective

    @property
    def how(self) -> str:
        """What ranks a sweep, in words."""
        if self.ranked_by and any(row.validation for row in self.rows):
            return f"{self.ranked_by.name} on validation examples"
        return f"final {self.objective.label}"

    @cached_property
    def parts(self) -> dict[str, Table]:
        """A table for each task and objective, whose runs fit on one axis."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            mixed = any(one.task == row.task and one.objective != row.objective for one in self.rows)
            name = f"{row.task} by {objective_name(row.objective)}" if mixed else row.task
            found.setdefault(name, []).append(row)
        return {name: replace(self, title=name, rows=rows) if len(found) > 1 else self for name, rows in found.items()}

    @cached_property
    def baseline(self) -> Row:
        """The row of a part with which the others are compared."""
        return baseline_of(self.rows)

    @cached_property
    def costs(self) -> Costs:
        """The cost of reaching each target, for each row of a part."""
        fit = [one for one in self.targets if one <= 1 or self.objective != ACCURACY]
        return {one: [cost_to_reach(row, one) for row in self.rows] for one in fit}

    # -- text ----------------------------------------------------------------------------------------------------------

    def cells(self) -> list[Cells]:
        """The table as text: of each part the runs, the costs of targets, and the searches, where there are any."""
        every = [
            one for part in self.parts.values() for one in (part.runs_cells(), part.target_cells(), part.searches())
        ]
        return [one for one in every if one.rows]

    def runs_cells(self) -> Cells:
        """The runs of a part as text."""
        rows, by = self.rows, self.ranked_by
        unit = "%" if self.objective == ACCURACY else objective_name(self.objective)
        columns = {name: [value_text(row.values[name]) for row in rows] for name in rows[0].values}
        columns = columns or {"method": [visible(row.label, 200) for row in rows]}
        left = len(columns)
        columns[f"final {unit}"] = [mean_text(row.final, self.objective) for row in rows]
        columns[f"best {unit}"] = [mean_text(row.best, self.objective) for row in rows]
        others = [row.others for row in rows]
        for path in dict.fromkeys(path for found in others for path in found):
            kind, _, name = path.partition(".")
            if kind == "metrics":
                columns[visible(name, 60)] = [mean_text(found.get(path)) for found in others]
            elif name == "worst_10":
                columns["worst 10 % of clients"] = [mean_text(found.get(path), ACCURACY) for found in others]
        counts = {"seeds": [str(len(row.runs)) for row in rows], "rounds": [f"{row.rounds:,}" for row in rows]}
        columns |= {head: texts for head, texts in counts.items() if len(set(texts)) > 1}
        sent = {head: [row.total(f"bytes_{key}") for row in rows] for head, key in BYTES.items()}
        for head, own in sent.items():
            if any(own) if head == "abandoned" else by is None or head == "total":
                columns[head] = [human_bytes(one) for one in own]
        if by is None:
            columns["ratio"] = ["-" if ratio is None else f"{ratio:.3g}x" for ratio in map(self.ratio, rows)]
        else:
            if any(row.validation for row in rows):
                columns[f"validation {by.name}"] = [mean_text(row.validation, by) for row in rows]
            columns["to the best"] = [_difference(row.difference, by) for row in rows]
        if any(row.broken for row in rows):
            columns["failed"] = [row.failed for row in rows]
        return Cells(self.title, list(columns), list(zip(*columns.values(), strict=True)), left=left)

    def target_cells(self) -> Cells:
        """The costs of the targets of a part as text."""
        rows, baseline = [], self.rows.index(self.baseline)
        for target, costs in self.costs.items():
            for row, cost in zip(self.rows, costs, strict=True):
                head, seeds = (row.label, target_text(self.objective, target)), len(row.runs)
                if cost is None:
                    rows.append((*head, "not reached", *["-"] * 4, f"0 of {seeds}"))
                    continue
                total, theirs = cost.mean("bytes_total"), costs[baseline]
                all_seeds = theirs and len(cost.by_seed) == seeds
                rows.append(
                    (
                        *head,
                        human_bytes(total),
                        human_bytes(cost.mean("bytes_total_ideal")),
                        f"{theirs.mean('bytes_total') / total:.3g}x" if theirs and all_seeds else "-",
                        f"{cost.mean('rounds'):.1f}",
                        human_seconds(cost.mean("seconds")),
                        f"{len(cost.by_seed)} of {seeds}",
                    )
                )
        heads = ("method", "target", "total", "ideal", "ratio", "rounds", f"at {SLOW}", "seeds")
        return Cells("Cost of each target (means over the seeds that reached it)", heads, rows, left=2)

    def searches(self) -> Cells:
        """The recorded searches of a part as text; a value at an end of what was tried has a mark."""
        found = {row.label: search for row in self.rows if (search := row.search)}
        how = "; ".join(dict.fromkeys(f"on seed {one.seed} by {one.chosen_by}" for one in found.values()))
        rows = [
            (
                label,
                one.setting,
                f"{one.value:g}{' (at an end)' if one.at_end else ''}",
                f"{min(one.tried):g} to {max(one.tried):g}",
                " + ".join(f"{count} x {rounds}" for count, rounds in one.rungs),
                human_bytes(one.bytes),
            )
            for label, one in found.items()
        ]
        heads = ("method", "searched", "found", "tried", "runs x rounds", "bytes of the search")
        return Cells(f"Searches by successive halving {how}", heads, rows, left=2)

    def notes(self) -> list[str]:
        """What the columns mean, in sentences."""
        spread = "Mean ± standard deviation over seeds"
        if self.ranked_by:
            points = ", in percentage points" if self.ranked_by == ACCURACY else ""
            best = "to the best: mean difference to the best setting on the same seeds ± half its 95 % interval"
            test = "The test set ranks: choose settings by --validation-fraction 0.1, or by `thinwire tune`."
            texts = [f"{spread}; ranked by {self.how}; {best}{points}."]
            return texts if any(row.validation for row in self.rows) else [*texts, test]
        baselines = visible(" or ".join(dict.fromkeys(part.baseline.label for part in self.parts.values())), 200)
        sent = "bytes of all messages (total), and without catch-up and abandoned rounds (ideal)"
        return [f"{spread}; {sent}; ratio: total of {baselines} divided by this."]

    # -- values --------------------------------------------------------------------------------------------------------

    def ratio(self, row: Row) -> float | None:
        """Bytes of the baseline divided by those of a row."""
        theirs, own = (one.bytes for one in (self.baseline, row))
        return theirs / own if own else None

    def plain(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON; the values of a sweep are keys."""
        return [part._plain(i) for part in self.parts.values() for i in range(len(part.rows))]

    def _plain(self, i: int) -> dict[str, Any]:
        row = self.rows[i]
        means = {"final": row.final, "best": row.best, "validation": row.validation, "difference": row.difference}
        means |= {f"final_{path}": value for path, value in row.others.items()}
        times = [seconds_by_link(run.records) for run in row.runs]
        reached = {f"{target:g}": costs[i] for target, costs in self.costs.items()}
        return {
            **row.values,
            "task": row.task,
            "method": row.label,
            "seeds": len(row.runs),
            "rounds": row.rounds,
            "objective": {"name": row.objective.name, "higher_is_better": row.objective.higher_is_better},
            **{name: value and value._asdict() for name, value in means.items()},
            "failed": row.failed,
            **{f"bytes_{key}": row.total(f"bytes_{key}") for key in BYTES.values()},
            "seconds": row.total("seconds"),
            "bytes_total": row.bytes,
            "ratio": self.ratio(row),
            "compared_with": self.baseline.label,
            "targets": {target: cost and cost.by_seed for target, cost in reached.items()},
            "seconds_by_link": {name: statistics.fmean(time[name] for time in times) for name in times[0]},
            "settings": dict(row.settings),
            "runs": [str(run.path) for run in row.runs],
            **({"search": row.search._asdict()} if row.search else {}),
            **({"is_best": row is self.best} if self.ranked_by else {}),
        }

    def frame(self) -> Any:
        """The rows as a pandas DataFrame; means and standard deviations are columns of their own: `final_mean`."""
        import pandas  # type: ignore[import-untyped]

        return pandas.json_normalize(self.plain(), sep="_")

    # -- figures -------------------------------------------------------------------------------------------------------

    def plot(self) -> Figure:
        """The objective against bytes, as a matplotlib Figure."""
        return self.drawing(self.objective.key).draw()

    def drawing(self, metric: str, by_bytes: bool = True) -> Drawing:
        """A metric of a part against bytes, with targets marked, or against rounds."""
        objective, task = self.objective, self.rows[0].task
        ranked, percent = metric == objective.key, metric in ("accuracy", "client_accuracy")
        name = objective_name(objective) if ranked else _NAMES.get(metric) or metric.partition(".")[2]
        notes = [BAND] if any(len(row.runs) > 1 for row in self.rows) else []
        if by_bytes and (percent or ranked):
            notes.append(f"{'Up' if percent or objective.higher_is_better else 'Down'} and left is better.")
        return curve_drawing(
            f"{capital(name)} against {'bytes' if by_bytes else 'rounds'}, {task}",
            [_curve(row, metric, by_bytes) for row in self.rows],
            percent,
            notes,
            x="total bytes (log scale)" if by_bytes else "rounds",
            y=name,
            log_x=by_bytes,
            integer_x=not by_bytes,
            x_text=human_bytes if by_bytes else "{:g}".format,
            marks={f"target {target_text(objective, one)}": one for one in self.targets if ranked},
        )

    def __repr__(self) -> str:
        import pandas

        texts = [
            f"{cells.caption}\n{pandas.DataFrame(cells.rows, columns=cells.heads).to_string(index=False)}"
            for cells in self.cells()
        ]
        return "\n\n".join(texts)

    def _repr_html_(self) -> str:
        return "".join(map(table_html, self.cells()))


def curve_drawing(title: str, lines: Sequence[figures.Curve], percent: bool, notes: list[str], **axes: Any) -> Drawing:
    """Curves; unless in percent, with limits that leave out what would flatten the others."""
    limits = None if percent else figures.scale_limits(lines)
    low, high = limits or (-math.inf, math.inf)
    if outside := [line.label for line in lines if any(not low <= y <= high for _, y, _, _ in line.points)]:
        notes = [*notes, f"Values outside the scale are drawn at its edge: {', '.join(outside)}."]
    y_text = percent_text if percent else partial(number_text, digits=3)
    return Drawing(title, " ".join(notes), partial(figures.curves, lines, y_text=y_text, limits=limits, **axes))


def _curve(row: Row, metric: str, by_bytes: bool) -> figures.Curve:
    """The curve of a row, over its seeds that did not fail; if all failed, it is marked."""
    broken, runs, label = row.broken, row.runs, row.label
    if broken and len(broken) < len(runs):
        row = row._replace(runs=[run for run in runs if run not in broken])
        label = f"{label} ({len(row.runs)} of {len(runs)} seeds; the others failed)"
    elif broken:
        label = f"{label} ({' or '.join(dict.fromkeys(run.verdict.status for run in broken))})"
    return figures.Curve(label, row.curve(metric, by_bytes), len(broken) == len(runs))


def capital(text: str) -> str:
    """A text with a capital letter first, and all else as it is."""
    return f"{text[:1].upper()}{text[1:]}"


def _difference(value: MeanInterval | None, by: Objective) -> str:
    """The distance to the best setting and half its 95 % interval; percentage points for an accuracy."""
    if value is None or (value.mean == 0 and not value.std):
        return "-" if value is None else "0"
    scale, form = (100, "+.2f") if by == ACCURACY else (1, "+.3g")
    half = "" if value.half is None else f" ± {scale * value.half:{form}}".replace("+", "")
    return f"{scale * value.mean:{form}}{half}"
