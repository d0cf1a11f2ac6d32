"""Tables and pages that compare runs: their objective, such as accuracy, and its cost in bytes, rounds and seconds.

    ratio    bytes of FedAvg (of the first row, without one) on the same task divided by those of the row

The page is one HTML file without scripts or external resources; the tables are also available as Markdown. Equal runs
give equal pages, byte for byte.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.core.text import visible
from thinwire.errors import ConfigError
from thinwire.federation.settings import Accounting
from thinwire.metrics.objective import Objective
from thinwire.reports.chapters import Section, capital, chapters_of, curve_drawing, definitions, setting_text
from thinwire.reports.page import Cells, Chapter, as_html, as_markdown, table_html
from thinwire.reports.rows import (
    ACCURACY,
    MeanInterval,
    Row,
    baseline_of,
    byte_columns,
    group,
    mean_text,
    objective_key,
    objective_name,
    read_runs,
    result_columns,
)
from thinwire.reports.targets import Costs, choose_targets, cost_to_reach
from thinwire.runs.collapse import BROKEN
from thinwire.runs.files import write_atomically
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOTALS = (
    *("bytes_up", "bytes_down", "bytes_catchup", "bytes_abandoned", "bytes_total_honest", "bytes_total_ideal"),
    "seconds",
)


@dataclass(frozen=True, eq=False)
class Table:
    """Runs side by side.

    Args:
        title: what is compared.
        rows: one for each method; of a sweep one for each setting, the best first, those that failed last.
        ranked_by: of a sweep, what ranks: the objective, or accuracy or loss on validation examples.
        accounting: which bytes `ratio` compares.
        compute: training seconds of a client per round, for modeled times; as measured by default.
    """

    title: str
    rows: list[Row]
    ranked_by: Objective | None = None
    accounting: Accounting = "honest"
    compute: float | None = None

    @property
    def best(self) -> Row | None:
        """The best setting of a sweep; None if every setting failed."""
        return self.rows[0] if self.rows[0].difference is not None else None

    @property
    def runs(self) -> list[SavedRun]:
        """The runs of all rows."""
        return [run for row in self.rows for run in row.runs]

    @property
    def by_validation(self) -> bool:
        """Whether examples that clients hold out rank a sweep."""
        return any(row.validation for row in self.rows)

    @property
    def how(self) -> str:
        """What ranks, in words."""
        if self.by_validation and self.ranked_by:
            return f"{self.ranked_by.name} on examples that the clients hold out"
        return f"final {self.rows[0].objective.label}"

    def label(self, row: Row) -> str:
        """The name of a row; with its task if there are several."""
        return f"{row.task}: {row.label}" if len({one.task for one in self.rows}) > 1 else row.label

    def baseline(self, row: Row) -> Row:
        """The row with which one is compared: of the same task and objective."""
        return baseline_of([one for one in self.rows if (one.task, one.objective) == (row.task, row.objective)])

    def ratio(self, row: Row) -> float | None:
        """Bytes of the baseline divided by those of a row."""
        theirs, own = (one.total(f"bytes_total_{self.accounting}") for one in (self.baseline(row), row))
        return theirs / own if own else None

    def cells(self) -> Cells:
        """The table as text."""
        rows, by = self.rows, self.ranked_by
        names = {name: [value_text(row.values[name]) for row in rows] for name in rows[0].values}
        names = names or {"method": [visible(self.label(row), 200) for row in rows]}
        columns, sent = names | result_columns(rows), byte_columns(rows)
        if by is None:
            ratios = [self.ratio(row) for row in rows]
            columns |= sent | {"ratio": ["-" if ratio is None else f"{ratio:.3g}x" for ratio in ratios]}
        else:
            if self.by_validation:
                columns[f"validation {by.name}"] = [mean_text(row.validation, by) for row in rows]
            columns |= {"total": sent["total"], "to the best": [_difference(row.difference, by) for row in rows]}
        if any(row.broken for row in rows):
            columns["failed"] = [row.failed for row in rows]
        return Cells.of(self.title, columns, len(names))

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
        names = list(dict.fromkeys(objective_name(row.objective).removeprefix("test ") for row in self.rows))
        lost = " and abandoned rounds" if any(row.total("bytes_abandoned") for row in self.rows) else ""
        baseline = visible(" or ".join(dict.fromkeys(self.label(self.baseline(row)) for row in self.rows)), 200)
        by = f"by {'total' if self.accounting == 'honest' else 'ideal'} ({self.accounting} accounting)"
        mixed = f"the rows have different objectives, which cannot be compared: {', '.join(names)}"
        return [
            *([mixed] if len(names) > 1 else []),
            f"final and best {' or '.join(names)}; bytes of all messages (total), and without catch-up{lost} (ideal); "
            f"ratio: bytes of {baseline} divided by these, {by}",
        ]

    def plain(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON; the values of a sweep are keys."""
        return [self._plain(row) for row in self.rows]

    def _plain(self, row: Row) -> dict[str, Any]:
        means = {"final": row.final, "best": row.best, "validation": row.validation, "difference": row.difference}
        times = [seconds_by_link(run.records, self.compute) for run in row.runs]
        return {
            **row.values,
            "method": self.label(row),
            "seeds": len(row.runs),
            "objective": {"name": row.objective.name, "higher_is_better": row.objective.higher_is_better},
            **{name: value and value._asdict() for name, value in means.items()},
            "failed": row.failed,
            "final_metrics": {name: value._asdict() for name, value in row.metrics.items()},
            "final_clients_eval": {name: value._asdict() for name, value in row.clients.items()},
            **{key: row.total(key) for key in TOTALS},
            "accounting": self.accounting,
            "bytes_total": row.total(f"bytes_total_{self.accounting}"),
            "ratio": self.ratio(row),
            "compared_with": self.label(self.baseline(row)),
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

    def report(self, html: Path | str | None = None, md: Path | str | None = None, **options: Any) -> None:
        """Write the page of `tw.report` about all runs."""
        report([run.path for run in self.runs], html, md, **options)

    def plot(self) -> Figure:
        """The objective against bytes, as a matplotlib Figure."""
        return curve_drawing(self.rows[0].task, self.rows, objective_key(self.rows[0].objective)).draw()

    def __repr__(self) -> str:
        import pandas

        cells = self.cells()
        return f"{self.title}\n{pandas.DataFrame(cells.rows, columns=cells.heads).to_string(index=False)}"

    def _repr_html_(self) -> str:
        return table_html(self.cells())


def report(
    runs: Sequence[Any],
    html: Path | str | None = None,
    md: Path | str | None = None,
    *,
    targets: Sequence[float] = (),
    compute: float | None = None,
) -> Table:
    """Write a page that compares runs; returns their table.

    Args:
        runs: run directories, folders of run directories, or results of `tw.simulate(..., out=...)`.
        html: file of the page.
        md: file of its tables as Markdown.
        targets: values of the objective whose cost is compared, such as accuracies from 0 to 1; chosen from the data
            by default.
        compute: training seconds of a client per round; as measured on this machine by default.
    """
    check_page([file for file in (html, md) if file is not None])
    if compute is not None and not 0 <= compute < math.inf:
        raise ConfigError(f"compute must be 0 or more seconds, not {compute}")
    read = read_runs(runs)
    lost = [run for run in read if not run.records and run.verdict.status in BROKEN]
    tasks = list(dict.fromkeys(run.task for run in read if run.records))
    if not tasks:
        why = f"; {lost[0].name} {lost[0].verdict.status}: {lost[0].verdict.why}" if lost else " yet"
        raise ConfigError(f"nothing to report: these runs have no finished round{why}")
    rows = group([run for task in tasks for run in read if run.records and run.task == task])
    check_page([], targets, next((row.objective.name for row in rows if row.objective != ACCURACY), ""))
    sections = _sections(rows, targets, compute) if html is not None or md is not None else []
    chapters = [one for part in sections for one in chapters_of(part, f"{part.name}: " if len(sections) > 1 else "")]
    if lost:
        texts = [f"{run.name} on {run.task}, seed {run.table.get('seed', 0)}: {run.verdict.why}." for run in lost]
        chapters.append(Chapter("Diverged in the first round", texts))
    chapters.append(definitions(compute))
    names = dict.fromkeys(objective_name(section.objective).removeprefix("test ") for section in sections)
    for file, text in ((html, as_html), (md, as_markdown)):
        if file is not None:
            page = text(f"thinwire: {' and '.join(tasks)}", chapters, capital(" and ".join(names)))
            write_atomically(Path(file), page.encode())
            Path(file).chmod(0o644)  # readable for other users
    return Table(", ".join(tasks), rows, compute=compute)


def _sections(rows: Sequence[Row], targets: Sequence[float], compute: float | None) -> list[Section]:
    """One section for each task and objective, so that the runs of a section fit on one axis."""
    parts: dict[tuple[str, Objective], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.task, row.objective), []).append(row)
    sections = []
    for (task, objective), own in parts.items():
        same = {objective_name(other): rows for (theirs, other), rows in parts.items() if theirs == task}
        lists = "; ".join(f"{name} ({', '.join(row.label for row in rows)})" for name, rows in same.items())
        note = f"Note: the runs of {task} have different objectives, so they are not on one axis: {lists}."
        baseline = baseline_of(own)
        goals = [goal for goal in targets if objective != ACCURACY or 0 < goal <= 1] or choose_targets(own, baseline)
        costs: Costs = {goal: [cost_to_reach(row, goal, compute) for row in own] for goal in goals}
        name = f"{task} by {objective_name(objective)}" if len(same) > 1 else task
        sections.append(Section(name, own, baseline, costs, [note] if len(same) > 1 else []))
    return sections


def check_page(files: Sequence[Path | str], targets: Sequence[float] = (), objective: str = "") -> None:
    """Raise an error for files that cannot be written and targets out of range, before anything is trained.

    Args:
        files: files of the page.
        targets: values of the objective.
        objective: its name; "" for accuracy.
    """
    for path in map(Path, files):
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"{path} cannot be written: {reason}; name a file such as page.html")
    for target in targets:
        if objective in ("", "accuracy") and not 0 < target <= 1:
            other = "for a run with another objective, state it with --set eval.objective=loss"
            raise ConfigError(f"a target is an accuracy above 0 and at most 1, such as 0.8, not {target}; {other}")
        if not math.isfinite(target):
            raise ConfigError(f"a target is a finite value of the objective, such as 0.8, not {target}")


def value_text(value: Any) -> str:
    """The value of a setting of a sweep or a search: the kind of a part, `as it is` for None."""
    return "as it is" if value is None else setting_text(value.get("kind", value) if isinstance(value, dict) else value)


def _difference(value: MeanInterval | None, by: Objective) -> str:
    """The distance to the best setting and half its 95 % interval; percentage points for an accuracy."""
    if value is None or (value.mean == 0 and not value.std):
        return "-" if value is None else "0"
    scale, form = (100, "+.2f") if by == ACCURACY else (1, "+.3g")
    half = "" if value.half is None else f" ± {scale * value.half:{form}}".replace("+", "")
    return f"{scale * value.mean:{form}}{half}"
