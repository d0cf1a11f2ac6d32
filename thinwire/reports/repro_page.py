"""Page of reproduced tables: our value, the published value, their difference, seeds, and bytes sent.

All values are read from run directories. With the page come a `.json` file with the values and the curve of every run
that it names, and a folder of charts: accuracy against bytes, one for each column of a table.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.core.units import human_bytes
from thinwire.experiments.config import Experiment
from thinwire.experiments.execute import default_folder
from thinwire.experiments.files import write_all
from thinwire.experiments.grid import Line, at_edge, broken, markdown, metrics, summary, training_failed
from thinwire.experiments.presets import papers
from thinwire.experiments.records import honest_bytes, read_run
from thinwire.experiments.repro import Reproduction
from thinwire.reports.against_chart import against_chart
from thinwire.reports.counts import counted_heads, counted_rows
from thinwire.reports.curve_figure import curve_figure
from thinwire.reports.finals import FAILED_RUNS, failures_text, mean_std_text, selection_set, trial_text, widened
from thinwire.reports.measures import cost, heading, measured
from thinwire.reports.seed_groups import SeedGroup
from thinwire.reports.style import STANDALONE
from thinwire.reports.svg import standalone

SUMMARY_KEYS = (  # of each run, in the .json file
    *("best_accuracy", "final_accuracy", "best_client_accuracy", "final_client_accuracy", "trainable", "bytes_total"),
    *("bytes_catchup", "seconds", "task", "status", "status_round", "chance_accuracy", "nonzero_b"),
)
COSTS = {"bytes_up": "% up", "to_worst": "% to the worst's best", "gigabytes": "GB", "numbers": "% of the parameters"}


class Section(NamedTuple):
    """One table of the page."""

    paper: str
    text: str  # Markdown
    runs: dict[str, dict[str, Any]]  # the values of each of its runs, by short digest
    missing: int  # runs that did not finish and did not diverge
    figures: dict[str, str]  # SVG by file name


def section(repro: Reproduction, out: Path, folder: str = "") -> Section:
    """Write the section of a table from run directories; cells of missing runs are `-`.

    Args:
        repro: the table.
        out: folder of the run directories.
        folder: folder of its charts, relative to the page; "" for a text without charts.
    """
    content = repro.content
    text = f"## {content['paper']}: {content['about']}\n\n"
    text += f"{content['differs']}\n\n" if content.get("differs") else ""
    verdict = f"{content['verdict'].strip()}\n\n" if content.get("verdict", "").strip() else ""
    if content.get("counted"):
        text += markdown(counted_heads(content), counted_rows(content)) + f"\n{verdict}No training. "
        return Section(content["paper"], f"{text}`thinwire repro {repro.name}` makes this table.\n", {}, 0, {})
    lines, trials = repro.grid.final(out), repro.grid.trials()
    figures: dict[str, str] = {}
    for column in content["columns"]:
        rows = [i for i, row in enumerate(repro.grid.content["rows"]) if row["column"] == column["name"]]
        column_lines = [line for line in lines if line.row in rows]
        text += f"**{column['name']}** ({_workload(column_lines[0])})\n\n{_table(repro, column_lines, out)}\n"
        if folder and (drawn := _figure(repro, column["name"], column_lines, out)):
            name = f"{repro.name}-{_slug(column['name'])}.svg"
            figures[name] = drawn
            against = repro.content.get("against", {}).get("x", "bytes")
            text += f"![Accuracy against {against}, {column['name']}]({folder}/{name})\n\n"
        text += _search(repro, [line for line in trials if line.row in rows], column_lines, out)
    runs = _runs(repro, [*lines, *trials], out)
    ends = {e.digest(): training_failed(e, out) for line in (*lines, *trials) for e in line.runs if not summary(e, out)}
    diverged = sum(ends.values())
    missing = len(ends) - diverged
    text += verdict + f"Scale `{repro.scale}`"
    text += ": a smoke test, its values are not meaningful" if repro.scale == "quick" else ""
    text += f"; {_run_count(diverged)} diverged" if diverged else ""
    text += f"; {_run_count(missing)} did not finish" if missing else ""
    text += failures_text(list(runs.values()))
    return Section(content["paper"], f"{text}. `{_command(repro)}` makes this table.\n", runs, missing, figures)


def _run_count(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def write_page(path: Path, sections: Sequence[Section]) -> None:
    """Write the page, its `.json` file and its charts; tables are in the order of the papers."""
    text = page_head(path)
    order = {paper["name"]: i for i, paper in enumerate(papers())}
    ranked = sorted(sections, key=lambda part: order.get(part.paper.split(",")[0], len(order)))
    files = {path.name: text + "\n".join(part.text for part in ranked)}
    runs: dict[str, dict[str, Any]] = {}
    for part in ranked:
        for name, values in part.runs.items():
            first = runs.setdefault(name, values)
            first["tables"] = list(dict.fromkeys(first["tables"] + values["tables"]))
            first["values"] = {**first["values"], **values["values"]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(runs[name])}" for name in sorted(runs))
    files[path.with_suffix(".json").name] = "{\n" + lines + "\n}\n"
    for name, drawing in itertools.chain.from_iterable(part.figures.items() for part in ranked):
        files[f"{path.stem}/{name}"] = drawing
    write_all(path.parent, {name: text.encode() for name, text in files.items()})


def page_head(path: Path) -> str:
    """The text above the tables: where the values are from, and a verdict on each paper."""
    text = "# Tables of papers, reproduced\n\n"
    text += (
        "Written by `thinwire repro` from run directories; values and curves of all runs are in "
        f"[{path.stem}.json]({path.stem}.json). Runs that collapsed or ended at chance are counted under "
        f"'{FAILED_RUNS}' ([definition](reports.md#runs-that-diverge-or-collapse)). Hyperparameters were chosen on "
        "another seed than those of the tables, on the examples named there, mostly the test set.\n\n"
    )
    for paper in papers():
        text += f"**{paper['title']}.** "
        text += f"{paper['verdict'].strip()} " if paper.get("verdict", "").strip() else ""
        reasons = [f"{table} ({why})" for table, why in paper.get("not_made", {}).items()]
        text += f"Not reproduced: {'; '.join(reasons)}.\n\n" if reasons else "\n\n"
    return text


def _command(repro: Reproduction) -> str:
    device = [] if repro.grid.device == "cpu" else ["--device", repro.grid.device]
    changes = [word for change in repro.grid.changes for word in ("--set", change)]
    return shlex.join(["thinwire", "repro", repro.name, "--scale", repro.scale, *device, *changes])


def _runs(repro: Reproduction, lines: Sequence[Line], out: Path) -> dict[str, dict[str, Any]]:
    """The values of every finished run."""
    runs: dict[str, dict[str, Any]] = {}
    for line in lines:
        measure = repro.grid.content["rows"][line.row]["measure"]
        for e in line.runs:
            if s := summary(e, out):
                about = {"tables": [repro.name], "method": line.label, "settings": line.settings, "seed": e.seed}
                found = {**about, "rounds": s["rounds"], **{key: s.get(key) for key in SUMMARY_KEYS}, "values": {}}
                known = runs.setdefault(e.digest()[:8], {**found, "curve": _curve(e, out)})
                known["values"][heading(measure)] = measured(measure, e, out)
    return runs


def _curve(e: Experiment, out: Path) -> list[list[float]]:
    """Round, honest bytes so far and accuracy, for every evaluated round."""
    records = metrics(e, out)
    spent = itertools.accumulate(map(honest_bytes, records))
    rounds = zip(records, spent, strict=True)
    return [[r["round"], so_far, r["accuracy"]] for r, so_far in rounds if r["accuracy"] is not None]


def _workload(line: Line) -> str:
    """Rounds, clients, local training and device of a line."""
    e = line.runs[0]
    steps = f"{e.local.steps} steps" if e.local.steps else f"{e.local.epochs} epoch(s)"
    size = f"{e.task.clients} clients, {e.cohort.size} per round"
    return f"{e.rounds} rounds, {size}, {steps} of batch {e.local.batch}, device {e.engine.device}"


def _table(repro: Reproduction, lines: list[Line], out: Path) -> str:
    """One column of a published table, with our values, bytes and costs."""
    first = _mean_bytes(lines[0], out)
    cells = repro.grid.content["rows"]
    columns = {column["name"]: column for column in repro.content["columns"]}
    kind = columns[cells[lines[0].row]["column"]].get("cost", repro.content.get("cost"))
    measures = list(dict.fromkeys(heading(cells[line.row]["measure"]) for line in lines))
    rows, runs = [], []
    for line in lines:
        cell = cells[line.row]
        found = [(e, s) for e in line.runs if (s := summary(e, out))]
        runs.append([s for _, s in found])
        values = [measured(cell["measure"], e, out) for e, _ in found]
        paper = f"{cell['published']:g}" if cell["published"] else "-"
        difference = "-"
        if values and cell["published"] and None not in values:
            difference = f"{statistics.fmean(value for value in values if value is not None) - cell['published']:+.2f}"
        total = _mean_bytes(line, out)
        share = f"{100 * total / first:.2f}" if total and first else "-"
        ours = [mean_std_text(values, 1.0) if heading(cell["measure"]) == measure else "-" for measure in measures]
        row = [line.label, _chosen(line), *ours, paper, difference, " ".join(str(e.seed) for e, _ in found) or "none"]
        row += [human_bytes(total) if total else "-", share]
        if kind:
            value = cost(kind, line, lines, out)
            row += ["-" if value is None else f"{value:.3g}", f"{cell['traffic']:g}" if cell["traffic"] else "-"]
        rows.append([*row, " ".join(e.digest()[:8] for e, _ in found) or "-"])
    head = ["method", "tuned", *(f"our {measure}" for measure in measures), "paper's", "difference", "seeds"]
    head += ["honest bytes", "% of the first"]
    head += [f"cost as the paper counts, {COSTS.get(kind, kind)}", "paper's cost"] if kind else []
    return markdown(*widened([*head, "runs"], rows, runs))


def _search(repro: Reproduction, trials: list[Line], lines: list[Line], out: Path) -> str:
    """The hyperparameter search: values tried and chosen; empty if there was none."""
    rows = []
    for line in lines:
        line_trials = [trial for trial in trials if trial.row == line.row]
        if len(line_trials) < 2:
            continue
        over = repro.grid.content["rows"][line.row]["over"]
        tried = []
        for trial in line_trials:
            found = [s for e in trial.runs if (s := summary(e, out))]
            whole = len(found) == len(trial.runs)
            tried.append(f"{_chosen(trial)}: {trial_text(repro.grid.by(line.row), found) if whole else '-'}")
        edges = [key.rsplit(".", 1)[-1] for key, values in over.items() if at_edge(line.chosen[key], values)]
        finals = [repro.grid.line(trial.row, trial.chosen) for trial in line_trials]
        failed = [f"{_chosen(one)} on {' '.join(map(str, lost))}" for one in finals if (lost := broken(one, out))]
        rows.append([line.label, "; ".join(tried), _chosen(line), ", ".join(edges) or "no", "; ".join(failed) or "-"])
    if not rows:
        return ""
    tuning_seeds = ", ".join(str(seed) for seed in repro.grid.tune["seeds"])
    rounds = " or ".join(str(n) for n in sorted({trial.runs[0].rounds for trial in trials}))
    by = " or ".join(dict.fromkeys(heading(repro.grid.by(line.row)) for line in lines))
    text = (
        f"The search, by {by} {selection_set(by)} after {rounds} rounds on seed {tuning_seeds}, which is none of "
        "the table's (the final accuracy is given where it is another):\n\n"
    )
    return text + markdown(["method", "tried", "chosen", "at the edge", f"{FAILED_RUNS}, on seed"], rows) + "\n"


def _chosen(line: Line) -> str:
    """The values that a search chose."""
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value:g}" for key, value in line.chosen.items()) or "-"


def _figure(repro: Reproduction, column: str, lines: list[Line], out: Path) -> str:
    """The chart of a column as the contents of an SVG file; "" if there is nothing to draw.

    Accuracy against bytes, or as the preset of a figure says (`against_chart.py`).
    """
    measures = {repro.grid.content["rows"][line.row]["measure"] for line in lines}
    if "against" in repro.content and len(measures) == 1:
        measure = next(iter(measures))
        values = {line.label: [measured(measure, e, out) for e in line.runs] for line in lines}
        return against_chart(repro.content, column, heading(measure), values)
    metric = "client_accuracy" if all("client" in measure for measure in measures) else "accuracy"
    if not all(measure.endswith("_accuracy") for measure in measures):
        return ""
    recorded = [(line, [read_run(default_folder(e, out)) for e in line.runs if summary(e, out)]) for line in lines]
    groups = [SeedGroup(line.label, runs) for line, runs in recorded if runs]
    if not any(group.curve(metric) for group in groups):
        return ""
    figure = curve_figure(column, groups, metric, (), against="bytes")
    title = f"{repro.content['paper']}: {figure.title}"
    return standalone(figure.wide, title, figure.note, figure.legend, STANDALONE)


def _slug(text: str) -> str:
    """A text as a file name.

    >>> _slug("25 % active, Dirichlet 0.5")
    '25-active-dirichlet-0.5'
    """
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def _mean_bytes(line: Line, out: Path) -> float | None:
    known = [s["bytes_total"] for e in line.runs if (s := summary(e, out))]
    return statistics.fmean(known) if known else None
