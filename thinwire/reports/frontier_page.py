"""Page of a frontier: which method wins where, all methods, the search; with a chart and a JSON file.

All values are read from run directories, or from the JSON file of an earlier call. That file has the configuration of
every row, and is an archive of runs (`experiments/archive.py`), those of the search included: rows and seeds of
different days and machines stand on one page, and `thinwire plan` can use it in place of the run directories.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.units import human_bytes
from thinwire.experiments.archive import Archive, Runs
from thinwire.experiments.collapse import count_broken
from thinwire.experiments.files import write_all
from thinwire.experiments.grid import Grid, at_edge, markdown, summary
from thinwire.experiments.toml import Table
from thinwire.reports.charts import PlotArea
from thinwire.reports.finals import FAILED_RUNS, mean_std_text
from thinwire.reports.frontier import (
    Row,
    best_by_bytes,
    front,
    missing,
    plain,
    reference_of,
    rows_of_grid,
    winners,
)
from thinwire.reports.objectives import percent_text
from thinwire.reports.repro_runs import kept_values, merged, provenance_text
from thinwire.reports.scatter import Dot, scatter
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import standalone, swatch

VALUE = "accuracy %"
WIN_HEADS = ("bytes at most", "share", "best", VALUE, "next", "ahead by, points", "seeds of both", "clear")
ROW_HEADS = ("method", "settings", "seeds", VALUE, FAILED_RUNS, "honest bytes", "share", "on the front", "runs")


class FrontierPage(NamedTuple):
    """The contents of a page: its text, its chart and its JSON file, and the number of runs that are missing."""

    text: str
    chart: str
    values: dict[str, Any]
    missing: int

    def write(self, path: Path) -> None:
        """Write the page, and beside it the chart (.svg) and the values (.json)."""
        texts = {path.name: self.text, path.with_suffix(".svg").name: self.chart}
        texts[path.with_suffix(".json").name] = _json(self.values)
        write_all(path.parent, {name: text.encode() for name, text in texts.items()})


def frontier_page(grid: Grid, out: Path | Runs, command: Sequence[str], name: str = "frontier") -> FrontierPage:
    """The page of a frontier.

    Args:
        grid: the grid of the frontier.
        out: the folder of the run directories, or runs with an archive, which stay in the JSON file.
        command: the words of the command that writes the page.
        name: the name of the page without its suffix, for the link to the chart.
    """
    runs = Runs.at(out)
    rows, left, kept = rows_of_grid(grid, runs), missing(grid, runs), _kept(grid, runs)
    task = grid.lines()[0].runs[0].task.label
    text = f"# Accuracy against bytes: {task}\n\n{_about(grid)}\n\n"
    if left:
        text += f"{left} run{'s' if left > 1 else ''} did not finish; the same command continues.{_seeds(rows)}\n\n"
    text += f"![Accuracy against bytes, {task}]({name}.svg)\n\n"
    text += f"## Which method wins where\n\n{WINS}\n\n{markdown(WIN_HEADS, win_cells(rows))}\n"
    text += f"## All methods\n\n{markdown(ROW_HEADS, row_cells(rows))}\n"
    text += _search(grid, runs)
    text += f"{provenance_text(kept.values())}Written by `{shlex.join(command)}`; "
    text += f"the values of all runs are in [{name}.json]({name}.json).\n"
    values = {"task": task, "command": shlex.join(command), "rows": plain(rows), "runs": merged(runs.archive, [kept])}
    return FrontierPage(text, chart(rows, task), values, left)


def _json(values: dict[str, Any]) -> str:
    """The values with one row or run a line."""
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items() if key not in ("rows", "runs")]
    rows = ",\n".join(map(json.dumps, values["rows"]))
    return "{\n" + ",\n".join([*head, f'"rows": [\n{rows}\n]', Archive(runs=values["runs"]).runs_text()]) + "\n}\n"


def _kept(grid: Grid, runs: Runs) -> dict[str, Table]:
    """What the JSON file keeps of the runs of the page, by their names; also those of rates that were replaced."""
    tried = [line for number in range(len(grid.content["rows"])) for line in grid.tried(number, runs)]
    page = {"tables": [grid.lines()[0].runs[0].task.label]}
    return {
        runs.archive.name(e.digest()): {**known, **page, "method": line.label, "settings": line.settings}
        for line in (*grid.trials(), *tried)
        for e in line.runs
        if (known := kept_values(e, runs)) is not None
    }


def _seeds(rows: Sequence[Row]) -> str:
    """How many rows have how many seeds, as a sentence; empty if all with runs have the same number."""
    counts = Counter(len(row.runs) for row in rows if row.runs)
    if len(counts) < 2:
        return ""
    parts = [f"{counts[n]} with {n} seed{'s' if n > 1 else ''}" for n in sorted(counts, reverse=True)]
    return (
        f" Rows: {', '.join(parts)}. The mean of a row is over its own seeds, so ranks of rows with different seeds "
        "depend on the seeds too; a difference is over those of both rows. Fewer `--seeds` leave out those of few rows."
    )


WINS = (
    "The best method within a share of the bytes of FedAvg (without it, of the method with the most). Runs may be "
    "stopped early, so a method with long messages counts with the rounds that it can pay for. The difference to the "
    "next one is paired by seed; it is clear if its 95 % interval excludes zero."
)


def win_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table of winners."""
    cells = []
    for one in winners(rows):
        share = "all" if one.share == 1 else f"1/{one.share}"
        if one.first is None:
            cells.append([human_bytes(one.budget), share, "none"])
            continue
        own = mean_std_text([run.value(one.budget) for run in one.first.runs])
        ahead = "-" if one.ahead is None else f"{100 * one.ahead.mean:.2f}"
        other, seeds = one.second.label if one.second else "-", " ".join(map(str, one.seeds))
        clear = "yes" if one.clear else "no"
        cells.append([human_bytes(one.budget), share, one.first.label, own, other, ahead, seeds, clear])
    return cells


def row_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table of all methods, the most bytes first."""
    reference, on_front = reference_of(rows), front(rows)
    cells = []
    for row in sorted(rows, key=lambda row: -row.bytes if row.runs else 0):
        if not row.runs or reference is None:
            cells.append([row.label, row.settings or "-", "none"])
            continue
        ratio = reference.bytes / row.bytes
        cells.append(
            [
                row.label,
                row.settings or "-",
                " ".join(str(run.seed) for run in row.runs),
                mean_std_text([run.value() for run in row.runs]),
                count_broken(run.status for run in row.runs),
                human_bytes(row.bytes),
                f"1/{ratio:.3g}" if ratio > 1 else f"{1 / ratio:.3g}",
                "yes" if row in on_front else "no",
                " ".join(run.run for run in row.runs),
            ]
        )
    return cells


def chart(rows: Sequence[Row], task: str) -> str:
    """The chart as the contents of an SVG file."""
    dots, legend = [], []
    for series, row in enumerate(rows):
        if row.failed or not (value := row.value()):
            continue
        seeds = [known for run in row.runs if (known := run.value()) is not None]
        dots.append(Dot(row.label, series, row.bytes, value.mean, min(seeds), max(seeds)))
        legend.append((swatch(series), row.label))
    title = f"Accuracy against bytes, {task}"
    ends = "; ".join(f"{dot.label} {percent_text(dot.y)} with {human_bytes(dot.x)}" for dot in dots)
    low = min((dot.low for dot in dots), default=0.0)
    steps = [step for step in best_by_bytes(rows) if step[1] >= low]
    area = PlotArea(
        title,
        f"x axis: bytes of all messages of a run; y axis: test accuracy; {ends}.",
        "total bytes (log scale)",
        "test accuracy",
        ident="frontier",
        height=520,
        log_x=True,
        x_text=human_bytes,
        y_text=percent_text,
    )
    note = "One mark a method: mean of the seeds, line from the lowest to the highest. Gray: best with so many bytes."
    return standalone(scatter(dots, steps, area), title, note, legend, STANDALONE)


def _about(grid: Grid) -> str:
    """The workload and the search in words."""
    line = grid.lines()[0]
    e, rates = line.runs[0], len(next(iter(grid.content["rows"][0]["over"].values())))
    steps = f"{e.local.steps} steps" if e.local.steps else f"{e.local.epochs} epoch(s)"
    text = (
        f"{len(grid.content['rows'])} methods and densities; {e.rounds} rounds, {e.task.clients or 'own'} clients, "
        f"{e.cohort.size} a round, {steps} of batch {e.local.batch}, seeds "
        f"{' '.join(map(str, grid.content['seeds']))}, device {e.engine.device}. Bytes are those of all messages, "
        "catch-up included. Accuracy is the mean of the last evaluations on the test set."
    )
    if rates < 2:
        return f"{text} Every method trained with its own learning rate: nothing was searched."
    tune = grid.tune
    return (
        f"{text} Every method tried {rates} learning rates, a factor of 2 apart, on seed {tune['seeds'][0]}, over "
        f"{max(1, round(tune['share'] * e.rounds))} rounds; the choice was by the accuracy on the "
        f"{100 * tune['validation_fraction']:g} % of each client's examples that were held out there."
    )


def _search(grid: Grid, out: Runs) -> str:
    """The table of the search; empty if nothing was searched."""
    chosen, rows = {line.row: line.chosen for line in grid.final(out)}, []
    for number, row in enumerate(grid.content["rows"]):
        trials = [line for line in grid.trials() if line.row == number]
        if not trials:
            continue
        ((key, values),) = row["over"].items()
        tried = []
        for trial in trials:
            found = [s for e in trial.runs if (s := summary(e, out))]
            score = mean_std_text([s.get(grid.by(number)) for s in found])
            broken = [str(s["status"]) for s in found if s.get("status") != "finished"]
            tried.append(f"{trial.chosen[key]:g}: {' '.join([score, *broken])}")
        value = chosen[number][key]
        edge = "yes" if at_edge(value, values) else "no"
        rows.append([row["label"], key.removeprefix("method."), "; ".join(tried), f"{value:g}", edge])
    if not rows:
        return ""
    heads = ["method", "setting", f"{VALUE} on held-out examples", "chosen", "at the edge"]
    return f"## The search\n\n{markdown(heads, rows)}\n"
