"""Page of reproduced tables: our value, the published value, their difference, seeds, and bytes sent.

All values are read from run directories, or from the `.json` file of the page, which keeps the values and the curve of
every run (`archive.py`): `update_page` writes the tables that are asked for, and all others of the page
again from that file. Rows of different days stand side by side, with the commit that made each. A folder of charts
comes with the page: accuracy against bytes, one for each column of a table.
"""

from __future__ import annotations

import itertools
import re
import shlex
import statistics
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from papers.archive import Archive, Runs, kept_values, merged
from papers.figures import against_chart, bytes_chart
from papers.grid import Line, broken, status, summary, training_failed
from papers.markdown import (
    at_edge,
    cost_text,
    failures_text,
    made_text,
    markdown,
    mean_std_text,
    provenance_text,
    run_count,
    selection_set,
    trial_text,
    widened,
)
from papers.measures import cost, counted_heads, counted_rows, heading, measured
from papers.tables import Reproduction, load, names, papers, read
from papers.verdicts import MEASURES, Row, TableRows
from thinwire.core.text import human_bytes
from thinwire.runs.collapse import FAILED_RUNS
from thinwire.runs.config import digest
from thinwire.runs.files import write_all
from thinwire.runs.toml import Table

COSTS = {"bytes_up": "% up", "to_worst": "% to the worst's best", "gigabytes": "GB", "numbers": "% of the parameters"}


class Section(NamedTuple):
    """One table of the page."""

    paper: str
    text: str  # Markdown
    runs: dict[str, Table]  # what the archive keeps of its runs, by their names on the page
    missing: int  # runs that did not finish and did not diverge
    figures: dict[str, str]  # SVG by file name
    name: str  # of the table
    options: Table  # that make the table again
    rows: TableRows  # its values, for statements about them


def section(repro: Reproduction, out: Path | Runs, page: Path | None = None) -> Section:
    """Write the section of a table from its runs; cells of missing runs are `-`.

    Args:
        repro: the table.
        out: folder of the run directories, or runs with an archive.
        page: the page, whose charts are in a folder with its name beside it; None for a text without charts.
    """
    content, runs = repro.content, Runs.at(out)
    options = {"scale": repro.scale, "device": repro.grid.device, "set": repro.grid.changes}
    text = f"## {content['paper']}: {content['about']}\n\n"
    text += f"{content['differs']}\n\n" if content.get("differs") else ""
    if content.get("counted"):
        text += markdown(counted_heads(content), counted_rows(content)) + "\nNo training. "
        text += f"`python -m papers repro {repro.name}` makes this table.\n"
        return Section(content["paper"], text, {}, 0, {}, repro.name, options, {})
    lines, trials = repro.grid.shown(runs), repro.grid.trials(runs)
    figures: dict[str, str] = {}
    values: dict[tuple[str, str], Row] = {}
    for column in content["columns"]:
        rows = [i for i, row in enumerate(repro.grid.content["rows"]) if row["column"] == column["name"]]
        column_lines = [line for line in lines if line.row in rows]
        text += f"**{column['name']}** ({_workload(column_lines[0])})\n\n{_table(repro, column_lines, runs)}\n"
        values |= {(column["name"], line.label): _row(repro, line, column_lines, runs) for line in column_lines}
        name = f"{repro.name}-{_slug(column['name'])}.svg"
        if page is not None and (drawn := _figure(repro, column["name"], column_lines, runs)):
            figures[name] = drawn
        if page is not None and name in figures:
            against = content.get("against", {}).get("x", "bytes")
            text += f"![Accuracy against {against}, {column['name']}]({page.stem}/{name})\n\n"
        text += _search(repro, [line for line in trials if line.row in rows], column_lines, runs)
    replaced = [line for number in {line.row for line in trials} for line in repro.grid.tried(number, runs)]
    kept = archived_runs(repro, [*lines, *trials, *replaced], runs)
    needed = {digest(e): e for line in (*lines, *trials) for e in line.runs}
    missing = sum(not summary(e, runs) and not training_failed(e, runs) for e in needed.values())
    text += _end(repro, list(kept.values()), missing)
    return Section(content["paper"], text, kept, missing, figures, repro.name, options, values)


def _row(repro: Reproduction, line: Line, column: list[Line], runs: Runs) -> Row:
    """The values of a row for claims about it."""
    cell, kind = repro.grid.content["rows"][line.row], _cost_kind(repro, line)
    values = {
        word: {e.seed: value for e in line.runs if (value := measured(key, e, runs)) is not None}
        for word, key in MEASURES.items()
    }
    statuses = [status(e, runs) for e in line.runs if summary(e, runs) or training_failed(e, runs)]
    ours = cost(kind, line, column, runs) if kind else None
    dates = [runs.provenance(e)["date"] for e in line.runs if summary(e, runs)]
    old = next(filter(None, (fix_after(repro.name, line.label, date) for date in dates)), "")
    return Row(values, statuses, _mean_bytes(line, runs), cell["published"], ours, old)


def fix_after(table: str, label: str, date: str) -> str:
    """A fix that touches a row, and is younger than a run of that date; empty if there is none."""
    fixes = [fix for fix in read("papers.toml")["fixes"] if date < fix["date"]]
    return next((fix["what"] for fix in fixes if any(fnmatchcase(f"{table}; {label}", row) for row in fix["rows"])), "")


def without_old(archive: Archive) -> Archive:
    """An archive without the runs that are older than a fix: they are made again."""
    kept = {
        name: run
        for name, run in archive.runs.items()
        if not any(fix_after(table, run["method"], run.get("date") or "") for table in run["tables"])
    }
    return Archive(archive.tables, kept)


def _end(repro: Reproduction, kept: Sequence[Table], missing: int) -> str:
    """The last paragraph of a table: failed runs, cost, when it was made, and the command."""
    diverged = sum(run["status"] == "diverged" for run in kept)
    text = f"Scale `{repro.scale}`"
    text += ": a smoke test, its values are not meaningful" if repro.scale == "quick" else ""
    text += f"; {run_count(diverged)} diverged" if diverged else ""
    text += f"; {run_count(missing)} did not finish" if missing else ""
    text += failures_text(kept) + ". " + cost_text(kept, repro.grid.device) + provenance_text(kept)
    return f"{text}`{_command(repro)}` makes this table.\n"


def update_page(path: Path, asked: Sequence[Reproduction], out: Path) -> list[Section]:
    """Write tables to a page, whose others are written again from the archive; returns all, those asked for first."""
    archive = Archive.read(path.with_suffix(".json"))
    asked_names, known = {one.name for one in asked}, names()
    others = [
        load(name, options["scale"], options["device"], options["set"])
        for name, options in archive.tables.items()
        if name in known and name not in asked_names
    ]
    sections = [section(one, Runs(out, archive), path) for one in (*asked, *others)]
    write_page(path, sections, archive)
    return sections


def write_page(path: Path, sections: Sequence[Section], archive: Archive | None = None) -> None:
    """Write the page, its `.json` file and its charts; tables are in the order of the papers, then of their names.

    Args:
        path: the page.
        sections: all its tables.
        archive: runs that are kept in the `.json` file, also those that no table shows.
    """
    order = {paper["name"]: i for i, paper in enumerate(papers())}
    ranked = sorted(sections, key=lambda part: (order.get(part.paper.split(",")[0], len(order)), part.name))
    kept = merged(archive or Archive(), [part.runs for part in ranked])
    head = page_head(path)
    files = {path.name: head + "\n".join(part.text for part in ranked)}
    files[path.with_suffix(".json").name] = Archive({part.name: part.options for part in ranked}, kept).text()
    for name, drawing in itertools.chain.from_iterable(part.figures.items() for part in ranked):
        files[f"{path.stem}/{name}"] = drawing
    write_all(path.parent, {name: text.encode() for name, text in files.items()})


def page_head(path: Path) -> str:
    """The text above the tables: where the values are from, and what is not reproduced."""
    text = "# Tables of papers, reproduced\n\n"
    text += (
        "Written by `python -m papers repro` from run directories; values and curves of all runs are in "
        f"[{path.stem}.json]({path.stem}.json), each with its date and the commit that made it. Runs that collapsed "
        f"or ended at chance are counted under '{FAILED_RUNS}' (docs/reports.md). Hyperparameters were chosen on "
        "another seed than those of the tables, on the examples named there, mostly the test set.\n\n"
    )
    for paper in papers():
        reasons = [f"{table} ({why})" for table, why in paper.get("not_made", {}).items()]
        text += f"**{paper['title']}.** Not reproduced: {'; '.join(reasons)}.\n\n" if reasons else ""
    return text


def _command(repro: Reproduction) -> str:
    device = [] if repro.grid.device == "cpu" else ["--device", repro.grid.device]
    changes = [word for change in repro.grid.changes for word in ("--set", change)]
    return shlex.join(["python", "-m", "papers", "repro", repro.name, "--scale", repro.scale, *device, *changes])


def _workload(line: Line) -> str:
    """Rounds, clients, local training and device of a line."""
    e = line.runs[0]
    steps = f"{e.local.steps} steps" if e.local.steps else f"{e.local.epochs} epoch(s)"
    size = f"{e.task.clients} clients, {e.cohort.size} per round"
    return f"{e.rounds} rounds, {size}, {steps} of batch {e.local.batch}, device {e.engine.device}"


def _table(repro: Reproduction, lines: list[Line], runs: Runs) -> str:
    """One column of a published table, with our values, bytes and costs."""
    first = _mean_bytes(lines[0], runs)
    cells = repro.grid.content["rows"]
    kind = _cost_kind(repro, lines[0])
    measures = list(dict.fromkeys(heading(cells[line.row]["measure"]) for line in lines))
    found = [[(e, s) for e in line.runs if (s := summary(e, runs))] for line in lines]
    made = [" and ".join(sorted({made_text(runs.provenance(e)) for e, _ in finished})) for finished in found]
    rows = []
    for line, finished, when in zip(lines, found, made, strict=True):
        cell = cells[line.row]
        values = [measured(cell["measure"], e, runs) for e, _ in finished]
        paper = f"{cell['published']:g}" if cell["published"] else "-"
        difference = "-"
        if values and cell["published"] and None not in values:
            difference = f"{statistics.fmean(value for value in values if value is not None) - cell['published']:+.2f}"
        total = _mean_bytes(line, runs)
        share = f"{100 * total / first:.2f}" if total and first else "-"
        ours = [mean_std_text(values, 1.0) if heading(cell["measure"]) == measure else "-" for measure in measures]
        seeds = " ".join(str(e.seed) for e, _ in finished) or "none"
        row = [line.label, _chosen(line), *ours, paper, difference, seeds, human_bytes(total) if total else "-", share]
        if kind:
            value = cost(kind, line, lines, runs)
            row += ["-" if value is None else f"{value:.3g}", f"{cell['traffic']:g}" if cell["traffic"] else "-"]
        row += [when or "-"] if len(set(made) - {""}) > 1 else []
        rows.append([*row, " ".join(runs.archive.name(digest(e)) for e, _ in finished) or "-"])
    head = ["method", "tuned", *(f"our {measure}" for measure in measures), "paper's", "difference", "seeds"]
    head += ["honest bytes", "% of the first"]
    head += [f"cost as the paper counts, {COSTS.get(kind, kind)}", "paper's cost"] if kind else []
    head += ["made"] if len(set(made) - {""}) > 1 else []
    return markdown(*widened([*head, "runs"], rows, [[s for _, s in finished] for finished in found]))


def _cost_kind(repro: Reproduction, line: Line) -> str | None:
    """The paper's definition of cost for the column of a line."""
    columns = {column["name"]: column for column in repro.content["columns"]}
    kind: str | None = columns[repro.grid.content["rows"][line.row]["column"]].get("cost", repro.content.get("cost"))
    return kind


def _search(repro: Reproduction, trials: list[Line], lines: list[Line], runs: Runs) -> str:
    """The hyperparameter search: values tried and chosen; empty if there was none."""
    rows, best = [], {line.row: _chosen(line) for line in repro.grid.final(runs)} if repro.grid.tune else {}
    for line in lines:
        line_trials = [trial for trial in trials if trial.row == line.row]
        if len(line_trials) < 2:
            continue
        tried = []
        for trial in line_trials:
            found = [s for e in trial.runs if (s := summary(e, runs))]
            whole = len(found) == len(trial.runs)
            tried.append(f"{_chosen(trial)}: {trial_text(repro.grid.by(line.row), found) if whole else '-'}")
        over = {key: [trial.chosen[key] for trial in line_trials] for key in line.chosen}
        edges = [key.rsplit(".", 1)[-1] for key, values in over.items() if at_edge(line.chosen[key], values)]
        lost = {_chosen(one): broken(one, runs) for one in repro.grid.tried(line.row, runs)}
        failed = [f"{one} on {' '.join(map(str, lost[one]))}" for one in map(_chosen, line_trials) if lost.get(one)]
        used, chosen = _chosen(line), best[line.row]
        chosen += "" if chosen == used else f", not run; the table has {used}"
        rows.append([line.label, "; ".join(tried), chosen, ", ".join(edges) or "no", "; ".join(failed) or "-"])
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


def _figure(repro: Reproduction, column: str, lines: list[Line], runs: Runs) -> str:
    """The chart of a column as the contents of an SVG file; "" if there is nothing to draw.

    Accuracy against bytes, or as the preset of a figure says (`figures.py`).
    """
    measures = {repro.grid.content["rows"][line.row]["measure"] for line in lines}
    if "against" in repro.content and len(measures) == 1:
        measure = next(iter(measures))
        values = {line.label: [measured(measure, e, runs) for e in line.runs] for line in lines}
        return against_chart(repro.content, column, heading(measure), values)
    metric = "client_accuracy" if all("client" in measure for measure in measures) else "accuracy"
    if not all(measure.endswith("_accuracy") for measure in measures):
        return ""
    recorded = {line.label: [runs.recorded(e) for e in line.runs if summary(e, runs)] for line in lines}
    return bytes_chart(repro.content["paper"], column, recorded, metric)


def _slug(text: str) -> str:
    """A text as a file name.

    >>> _slug("25 % active, Dirichlet 0.5")
    '25-active-dirichlet-0.5'
    """
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def _mean_bytes(line: Line, runs: Runs) -> float | None:
    known = [s["bytes_total"] for e in line.runs if (s := summary(e, runs))]
    return statistics.fmean(known) if known else None


def archived_runs(repro: Reproduction, lines: Sequence[Line], runs: Runs) -> dict[str, Table]:
    """The values of every run that finished or diverged, by its name on the page."""
    out: dict[str, Table] = {}
    for line in lines:
        measure = repro.grid.content["rows"][line.row]["measure"]
        for e in line.runs:
            if (known := kept_values(e, runs)) is None:
                continue
            about = {"tables": [repro.name], "method": line.label, "settings": line.settings}
            entry = out.setdefault(runs.archive.name(digest(e)), known | about)
            if entry["status"] != "diverged":
                entry["values"] = {**entry["values"], heading(measure): measured(measure, e, runs)}
    return out
