"""A page of the papers' tables: our number, the paper's, the difference, the seeds, the bytes that were really sent.

Everything is read from run directories. Unmerged the page go a `.json` file with the numbers and the curve of every run
that it names, and a folder of pictures: accuracy against bytes, for each column of a table.
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
from thinwire.experiments.grid import Line, at_edge, broke_down, broken, markdown, metrics, summary
from thinwire.experiments.presets import papers
from thinwire.experiments.records import read_run
from thinwire.experiments.repro import Reproduction
from thinwire.reports.charts import alone
from thinwire.reports.counts import counted_heads, counted_rows
from thinwire.reports.finals import ended, judged_on, spread, trial_words, widened
from thinwire.reports.measures import cost, heading, measured
from thinwire.reports.report import curve_figure
from thinwire.reports.seed_groups import Line as Seeds
from thinwire.reports.style import ALONE

KEPT = (
    *("best_accuracy", "final_accuracy", "best_client_accuracy", "final_client_accuracy", "trainable", "bytes_total"),
    *("bytes_catchup", "seconds", "task", "status", "status_round", "chance_accuracy"),
)
COSTS = {"bytes_up": "% up", "to_worst": "% to the worst's best", "gigabytes": "GB", "numbers": "% of the weights"}


class Section(NamedTuple):
    """A table as it stands."""

    paper: str
    text: str  # of the page
    runs: dict[str, dict[str, Any]]  # the numbers of each run behind it, by its short digest
    missing: int  # runs that did not finish, though nothing is known to be wrong with them
    figures: dict[str, str]  # pictures by the name of their file


def section(repro: Reproduction, out: Path, folder: str = "") -> Section:
    """The table from run directories, with what is missing left open.

    Args:
        repro: the table.
        out: the folder of the run directories.
        folder: where its pictures are going to be, seen from the page; "" for a text without pictures.
    """
    content = repro.content
    text = f"## {content['paper']}: {content['about']}\n\n"
    text += f"{content['differs']}\n\n" if content.get("differs") else ""
    verdict = f"{content['verdict'].strip()}\n\n" if content.get("verdict", "").strip() else ""
    if content.get("counted"):
        text += markdown(counted_heads(content), counted_rows(content)) + f"\n{verdict}Nothing is trained. "
        return Section(content["paper"], f"{text}`thinwire repro {repro.name}` makes this table.\n", {}, 0, {})
    lines, trials = repro.grid.final(out), repro.grid.trials()
    figures: dict[str, str] = {}
    for column in content["columns"]:
        numbers = [i for i, row in enumerate(repro.grid.content["rows"]) if row["column"] == column["name"]]
        mine = [line for line in lines if line.row in numbers]
        text += f"**{column['name']}** ({_work(mine[0])})\n\n{_table(repro, mine, out)}\n"
        if folder and (drawn := _figure(repro, column["name"], mine, out)):
            name = f"{repro.name}-{_slug(column['name'])}.svg"
            figures[name] = drawn
            text += f"![Accuracy against bytes, {column['name']}]({folder}/{name})\n\n"
        text += _search(repro, [line for line in trials if line.row in numbers], mine, out)
    everything = [*lines, *trials]
    runs = _runs(repro, everything, out)
    without = {e.digest(): broke_down(e, out) for line in everything for e in line.runs if not summary(e, out)}
    fell = sum(without.values())
    missing = len(without) - fell
    text += verdict + f"Scale `{repro.scale}`"
    text += ": it shows that the table is made, its numbers mean nothing" if repro.scale == "quick" else ""
    text += f"; in {_runs_of(fell)} training broke down" if fell else ""
    text += f"; {_runs_of(missing)} did not finish" if missing else ""
    text += ended(list(runs.values()))
    return Section(content["paper"], f"{text}. `{_command(repro)}` makes this table.\n", runs, missing, figures)


def _runs_of(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def write_page(path: Path, sections: Sequence[Section]) -> None:
    """A page of tables under their papers, beside it its numbers and pictures."""
    text = page_head(path)
    order = {paper["name"]: i for i, paper in enumerate(papers())}
    ranked = sorted(sections, key=lambda part: order.get(part.paper.split(",")[0], len(order)))
    files = {path.name: text + "\n".join(part.text for part in ranked)}
    runs: dict[str, dict[str, Any]] = {}
    for part in ranked:
        for name, numbers in part.runs.items():
            first = runs.setdefault(name, numbers)
            first["tables"] = list(dict.fromkeys(first["tables"] + numbers["tables"]))
            first["values"] = {**first["values"], **numbers["values"]}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(runs[name])}" for name in sorted(runs))
    files[path.with_suffix(".json").name] = "{\n" + lines + "\n}\n"
    for name, drawing in itertools.chain.from_iterable(part.figures.items() for part in ranked):
        files[f"{path.stem}/{name}"] = drawing
    write_all(path.parent, {name: text.encode() for name, text in files.items()})


def page_head(path: Path) -> str:
    """What stands above the tables: where the numbers are from, and what came out of each paper."""
    text = "# The papers' tables, and ours\n\n"
    text += (
        "Written by `thinwire repro` from run directories; the numbers and the curve of every run that is named are "
    )
    text += (
        f"in [{path.stem}.json]({path.stem}.json). Runs that collapsed, or ended at chance, are counted under 'broke "
        "down' ([what that means](reports.md#runs-that-break-down)). Rates were chosen on another seed than those of "
        "the tables, by the examples that are named there, mostly the test set.\n\n"
    )
    for paper in papers():
        text += f"**{paper['title']}.** "
        text += f"{paper['verdict'].strip()} " if paper.get("verdict", "").strip() else ""
        reasons = [f"{table} ({why})" for table, why in paper.get("not_made", {}).items()]
        text += f"Not made: {'; '.join(reasons)}.\n\n" if reasons else "\n\n"
    return text


def _command(repro: Reproduction) -> str:
    device = [] if repro.grid.device == "cpu" else ["--device", repro.grid.device]
    changes = [word for change in repro.grid.changes for word in ("--set", change)]
    return shlex.join(["thinwire", "repro", repro.name, "--scale", repro.scale, *device, *changes])


def _runs(repro: Reproduction, lines: Sequence[Line], out: Path) -> dict[str, dict[str, Any]]:
    """The few numbers of every finished run."""
    runs: dict[str, dict[str, Any]] = {}
    for line in lines:
        measure = repro.grid.content["rows"][line.row]["measure"]
        for e in line.runs:
            if s := summary(e, out):
                about = {"tables": [repro.name], "method": line.label, "settings": line.settings, "seed": e.seed}
                found = {**about, "rounds": s["rounds"], **{key: s.get(key) for key in KEPT}, "values": {}}
                known = runs.setdefault(e.digest()[:8], {**found, "curve": _curve(e, out)})
                known["values"][heading(measure)] = measured(measure, e, out)
    return runs


def _curve(e: Experiment, out: Path) -> list[list[float]]:
    """Round, honest bytes so far, accuracy: where it was measured."""
    records = metrics(e, out)
    spent = itertools.accumulate(r["bytes_up"] + r["bytes_down"] + r["bytes_catchup"] for r in records)
    rounds = zip(records, spent, strict=True)
    return [[r["round"], so_far, r["accuracy"]] for r, so_far in rounds if r["accuracy"] is not None]


def _work(line: Line) -> str:
    """How much one run of a line does."""
    e = line.runs[0]
    steps = f"{e.local.steps} steps" if e.local.steps else f"{e.local.epochs} epoch(s)"
    size = f"{e.task.clients} clients, {e.cohort.size} a round"
    return f"{e.rounds} rounds, {size}, {steps} of batch {e.local.batch}, device {e.engine.device}"


def _table(repro: Reproduction, lines: list[Line], out: Path) -> str:
    """One column of a printed table, with more columns of our own."""
    kind = repro.content.get("cost")
    first = _mean(lines[0], out)
    cells = repro.grid.content["rows"]
    words = list(dict.fromkeys(heading(cells[line.row]["measure"]) for line in lines))
    rows, runs = [], []
    for line in lines:
        cell = cells[line.row]
        found = [(e, s) for e in line.runs if (s := summary(e, out))]
        runs.append([s for _, s in found])
        values = [measured(cell["measure"], e, out) for e, _ in found]
        paper = f"{cell['published']:g}" if cell["published"] else "-"
        apart = "-"
        if values and cell["published"] and None not in values:
            apart = f"{statistics.fmean(value for value in values if value is not None) - cell['published']:+.2f}"
        total = _mean(line, out)
        share = f"{100 * total / first:.2f}" if total and first else "-"
        ours = [spread(values, 1.0) if heading(cell["measure"]) == word else "-" for word in words]
        row = [line.label, _chosen(line), *ours, paper, apart, " ".join(str(e.seed) for e, _ in found) or "none"]
        row += [human_bytes(total) if total else "-", share]
        if kind:
            value = cost(kind, line, lines, out)
            row += ["-" if value is None else f"{value:.3g}", f"{cell['traffic']:g}" if cell["traffic"] else "-"]
        rows.append([*row, " ".join(e.digest()[:8] for e, _ in found) or "-"])
    head = ["method", "tuned", *(f"our {word}" for word in words), "paper's", "difference", "seeds"]
    head += ["honest bytes", "% of the first"]
    head += [f"as the paper counts, {COSTS[kind]}", "paper's cost"] if kind else []
    return markdown(*widened([*head, "runs"], rows, runs))


def _search(repro: Reproduction, trials: list[Line], lines: list[Line], out: Path) -> str:
    """What was tried, and what was taken; nothing where nothing was searched."""
    rows = []
    for line in lines:
        mine = [trial for trial in trials if trial.row == line.row]
        if len(mine) < 2:
            continue
        over = repro.grid.content["rows"][line.row]["over"]
        tried = []
        for trial in mine:
            found = [s for e in trial.runs if (s := summary(e, out))]
            whole = len(found) == len(trial.runs)
            tried.append(f"{_chosen(trial)}: {trial_words(repro.grid.by(line.row), found) if whole else '-'}")
        edges = [key.rsplit(".", 1)[-1] for key, values in over.items() if at_edge(line.chosen[key], values)]
        finals = [repro.grid.line(trial.row, trial.chosen) for trial in mine]
        fell = [f"{_chosen(final)} on {' '.join(map(str, seeds))}" for final in finals if (seeds := broken(final, out))]
        rows.append([line.label, "; ".join(tried), _chosen(line), ", ".join(edges) or "no", "; ".join(fell) or "-"])
    if not rows:
        return ""
    apart = ", ".join(str(seed) for seed in repro.grid.tune["seeds"])
    rounds = " or ".join(str(n) for n in sorted({trial.runs[0].rounds for trial in trials}))
    what = " or ".join(dict.fromkeys(heading(repro.grid.by(line.row)) for line in lines))
    text = (
        f"The search, by {what} {judged_on(what)} after {rounds} rounds on seed {apart}, which is none of the table's"
    )
    text += " (the final accuracy is given where it is another):\n\n"
    return text + markdown(["method", "tried", "taken", "at the edge", "broke down, on seed"], rows) + "\n"


def _chosen(line: Line) -> str:
    """The values that a search chose."""
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value:g}" for key, value in line.chosen.items()) or "-"


def _figure(repro: Reproduction, column: str, lines: list[Line], out: Path) -> str:
    """Accuracy against bytes as the text of an SVG file; "" where there is nothing to draw."""
    measures = {repro.grid.content["rows"][line.row]["measure"] for line in lines}
    metric = "client_accuracy" if all("own" in measure for measure in measures) else "accuracy"
    if not all(measure.endswith("_accuracy") for measure in measures):
        return ""
    recorded = [(line, [read_run(default_folder(e, out)) for e in line.runs if summary(e, out)]) for line in lines]
    drawn = [Seeds(line.label, runs) for line, runs in recorded if runs]
    if not any(line.curve(metric) for line in drawn):
        return ""
    figure = curve_figure(column, drawn, metric, (), against="bytes")
    return alone(figure.wide, f"{repro.content['paper']}: {figure.title}", figure.note, figure.legend, ALONE)


def _slug(words: str) -> str:
    """A name for a file.

    >>> _slug("25 % active, Dirichlet 0.5")
    '25-active-dirichlet-0.5'
    """
    return "-".join(re.findall(r"[a-z0-9.]+", words.lower()))


def _mean(line: Line, out: Path) -> float | None:
    known = [s["bytes_total"] for e in line.runs if (s := summary(e, out))]
    return statistics.fmean(known) if known else None
