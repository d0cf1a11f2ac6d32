"""`tw.compare`: several methods on one task over the same seeds, as a table, a frame or a page.

>>> import thinwire as tw, tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     found = tw.compare(["fedavg", "mapo"], on="digits", seeds=1, rounds=1, cohort=2, out=folder)
>>> [row.method for row in found.rows]
['fedavg', 'mapo']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.core.frames import data_frame
from thinwire.core.units import human_bytes
from thinwire.errors import ConfigError
from thinwire.experiments.compare import Compared, compare_methods, watcher
from thinwire.experiments.request import maker
from thinwire.experiments.search_record import SearchRecord
from thinwire.experiments.tune_rate import RATES, SEARCH_SEED, RateSearch
from thinwire.metrics.objective import Objective
from thinwire.protocol.method import Method
from thinwire.reports.compare import ComparisonRow, MeanStd, as_json, table
from thinwire.reports.report import check_page, report
from thinwire.reports.text_table import Cells


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of a comparison.

    Args:
        rows: one for each method; means over seeds.
        runs: the totals of every run by its directory.
        searches: the search of each method, if there was one.
    """

    rows: list[ComparisonRow]
    runs: dict[str, dict[str, Any]]
    searches: dict[str, SearchRecord]

    @classmethod
    def of(cls, compared: Compared) -> Comparison:
        """The table of some runs."""
        return cls(table(list(compared.summaries.values())), compared.summaries, compared.searches)

    @property
    def objective(self) -> Objective:
        """What the runs are ranked by."""
        found = next(iter(self.runs.values())).get("objective") or {}
        return Objective(found.get("name", "accuracy"), found.get("higher_is_better", True))

    def cells(self) -> Cells:
        """The table as text: final and best objective, bytes, ratio of bytes, failed runs."""
        objective = self.objective
        failed = any(row.broken != "-" for row in self.rows)
        heads = ["method", f"final {objective.label}", "best", "total", "ratio", *(["failed"] if failed else [])]
        rows = []
        for row in self.rows:
            own = [run.get("objective") or {} for run in self.runs.values() if run["method"] == row.method]
            values = [_text(MeanStd.of(one.get(key) for one in own), objective) for key in ("final", "best")]
            ratio = "-" if row.ratio is None else f"{row.ratio:.3g}x"
            cells = [row.method, *values, human_bytes(row.bytes_total), ratio]
            rows.append([*cells, *([row.broken] if failed else [])])
        return Cells(heads, rows)

    def frame(self) -> Any:
        """The rows as a pandas DataFrame; means and standard deviations are columns of their own."""
        return data_frame([_flat(row) for row in self.plain()])

    def plain(self) -> list[dict[str, Any]]:
        """The rows as plain values, for JSON."""
        searches = {name: {"search": record._asdict()} for name, record in self.searches.items()}
        return [{**row, **searches.get(row["method"], {})} for row in as_json(self.rows)]

    def report(self, html: Path | str | None = None, md: Path | str | None = None, **options: Any) -> None:
        """Write the page of `tw.report` about all runs."""
        report(list(self.runs), html, md, **options)

    def __repr__(self) -> str:
        return self.cells().text()

    def _repr_html_(self) -> str:
        return self.cells().html()


def _text(value: MeanStd | None, objective: Objective) -> str:
    if value is None:
        return "-"
    scale, form = (100, ".2f") if objective.name == "accuracy" else (1, ".4g")
    spread = f" ± {scale * value.std:{form}}" if value.std else ""
    return f"{scale * value.mean:{form}}{spread}{' %' if scale == 100 else ''}"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the values of inner tables as columns: `final_accuracy_mean`."""
    out: dict[str, Any] = {}
    for key, value in row.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        out |= {key: value} if inner is None else {f"{key}_{name}": one for name, one in inner.items()}
    return out


def compare(
    methods: Sequence[str] | Mapping[str, str | Method],
    on: Any = None,
    *,
    seeds: int = 3,
    rounds: int | None = None,
    clients: int | None = None,
    cohort: int | None = None,
    seed: int = 0,
    tune: bool = False,
    tune_rates: int = RATES,
    tune_share: float = 1.0,
    tune_seed: int = SEARCH_SEED,
    out: Path | str = "runs/compare",
    html: Path | str | None = None,
    targets: Sequence[float] = (),
    overrides: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    device: str | None = None,
    data_dir: Path | str | None = None,
    again: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Train several methods on the same clients and batches, and compare the objective and bytes.

    Args:
        methods: names of methods, combinations with `+`, experiment files; or a name for each Method:
            `{"mine": tw.methods.mapo(k=64), "fedavg": "fedavg"}`.
        on: a task by name or reference, a Task, or a function of a seed that returns one.
        seeds: number of seeds, from `seed` upward.
        rounds: number of rounds.
        clients: number of clients.
        cohort: clients in a round.
        seed: the first seed.
        tune: first search the learning rate of every method with the same budget.
        tune_rates: number of rates that each method may try.
        tune_share: rounds of the last rung of the search, as a fraction.
        tune_seed: the seed of the search; none of the seeds of the comparison.
        out: the folder of the runs; finished ones are used again.
        html: the file of a page.
        targets: values of the objective whose cost the page compares.
        overrides: settings of all methods by dotted path.
        recipe: the name of a recipe.
        device: `cpu` or `cuda`.
        data_dir: the folder of datasets.
        again: run even if a run is finished.
        progress: print a line for each run; by default in a terminal.
    """
    check_page([html] if html else [], ())
    if isinstance(methods, str | Method) or not methods:
        raise ConfigError(f"methods must be a list such as ['fedavg', 'mapo'], not {methods!r}")
    if seeds < 1:
        raise ConfigError(f"seeds must be 1 or more, not {seeds}")
    named = dict(methods) if isinstance(methods, Mapping) else {}
    pairs: list[tuple[str, Any]] = list(named.items()) or [("", one) for one in methods]
    options: dict[str, Any] = {"rounds": rounds, "clients": clients, "cohort": cohort, "device": device}
    makes = [maker(one, on, name=name, recipe=recipe, overrides=overrides, **options) for name, one in pairs]
    check_page([], targets, makes[0]({}).eval.objective)
    compared = compare_methods(
        makes,
        range(seed, seed + seeds),
        Path(out),
        watcher(progress),
        search=RateSearch(rates=tune_rates, share=tune_share, extend=0) if tune else None,
        search_seed=tune_seed,
        data_dir=None if data_dir is None else Path(data_dir),
        again=again,
    )
    found = Comparison.of(compared)
    if html:
        found.report(html, targets=targets)
    return found
