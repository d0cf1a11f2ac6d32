"""Page of a frontier: which method wins where, all methods, the search; with a chart and a JSON file.

All values are read from run directories, or from the JSON file of an earlier call. That file has the configuration of
every row, and is an archive of runs (`archive.py`), those of the search included: rows and seeds of
different days and machines stand on one page.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.archive import Archive, Runs, kept_values, merged
from papers.figures import frontier_chart
from papers.frontier import (
    Row,
    front,
    missing,
    plain,
    reference_of,
    rows_of_grid,
    winners,
)
from papers.grid import Grid, summary
from papers.markdown import at_edge, markdown, mean_std_text, provenance_text
from thinwire.core.text import human_bytes
from thinwire.errors import Diverged
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.collapse import FAILED_RUNS, count_broken
from thinwire.runs.config import digest, resolve
from thinwire.runs.files import write_all
from thinwire.runs.toml import Table
from thinwire.search.tune import SEARCH_SEED, VALIDATION_FRACTION

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
    return FrontierPage(text, frontier_chart(rows, task), values, left)


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
        runs.archive.name(digest(e)): {**known, **page, "method": line.label, "settings": line.settings}
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


# -- where a search should be centered: rates over orders of magnitude, in short runs, for docs/frontier.md ------------


def rate_tried(task: str, row: dict[str, Any], factor: float, rounds: int, steps: int) -> dict[str, Any]:
    """The accuracy of clients on held-out examples after a short run with the rate of the row times a factor."""
    quick = {
        "rounds": rounds,
        "eval.every": rounds,
        "seed": SEARCH_SEED,
        "task.validation_fraction": VALIDATION_FRACTION,
        **({"local.steps": steps} if steps else {}),
        **row["set"],
    }
    key, centers = next(iter(row["over"].items()))
    rate = float(f"{factor * centers[0]:.6g}")
    experiment = resolve(row["method"], task, {**quick, key: rate})
    simulation = make_simulation(experiment.engine, build_job(experiment))
    state, accuracy = simulation.start(), None
    try:
        for _ in range(rounds):
            state, record = simulation.round(state)
        accuracy = record.client_accuracy
    except Diverged:
        pass
    return {"task": task, "row": row["label"], "key": key, "rate": rate, "rounds": rounds, "accuracy": accuracy}


def rates_table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: for each task and row the rates that were tried, with their accuracies in percent."""
    groups: dict[tuple[str, str, str, int], dict[float, float | None]] = {}
    for one in found:
        key = (one["task"], one["row"], one["key"].removeprefix("method."), one["rounds"])
        groups.setdefault(key, {})[one["rate"]] = one["accuracy"]
    rows = [
        [task, row, name, str(rounds), "; ".join(f"{rate:g}: {_percent(tried[rate])}" for rate in sorted(tried))]
        for (task, row, name, rounds), tried in groups.items()
    ]
    return markdown(["task", "row", "rate", "rounds", "rate: accuracy on held-out examples, %"], rows)


def _percent(accuracy: float | None) -> str:
    return "diverged" if accuracy is None else f"{100 * accuracy:.1f}"
