"""The table of runs: one row for each method or setting, with means over seeds.

    ratio        bytes of FedAvg (of the first row, without one) on the same task divided by those of the row
    difference   mean over seeds of (value - value of the best row with the same seed), with its 95 % interval

`tw.compare` and `tw.sweep` return it, and verbs print it. The rows of a sweep are settings, ranked by the mean of the
final objective on the test set or, with `task.validation_fraction`, of the clients' accuracy (or loss) on the examples
that they hold out. A setting of which a run diverged, collapsed or is at chance is listed after the others and is never
the best.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.text import visible
from thinwire.federation.settings import Accounting
from thinwire.metrics.objective import Objective
from thinwire.reports.page import Cells
from thinwire.reports.report import plot, report
from thinwire.reports.seed_groups import (
    ACCURACY,
    MeanInterval,
    SeedGroup,
    baseline_of,
    byte_columns,
    objective_name,
    result_columns,
    value_text,
)
from thinwire.runs.collapse import count_broken
from thinwire.runs.link_time import seconds_by_link
from thinwire.runs.records import SavedRun
from thinwire.runs.search_record import SearchRecord
from thinwire.search import candidates

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
