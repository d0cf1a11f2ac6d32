"""Regenerate the tables of published pages from their JSON files, without running anything.

    python -m papers published                             # docs/results, docs/reproduction.md, papers/archive
    python -m papers published --chance --data-dir DATA    # first docs/chance.json, from the test sets

The JSON file of a page has the values and the curve of each of its runs. Every curve is compared with the chance level
of its test set (`thinwire/runs/collapse.py`), task and status are written to the JSON, and the final accuracy
and the failed runs to the tables. The text above tables is that of the grids and of the presets. Cells that need more
than the JSON (bytes until an accuracy) are kept as they were written from run directories. The page of reproduced
tables, `papers/archive/tables.md`, is written again, as by `python -m papers repro --md`, and the page of claims.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page import write_part
from papers.archive import Archive
from papers.grid_page import load_grid, run_lines
from papers.markdown import markdown, mean_std_text, selection_set, widened
from papers.overview import overview
from papers.page import update_page
from papers.tables import FOLDER
from thinwire.core.registry import lookup
from thinwire.runs.collapse import FAILED_RUNS, Chance, chance_among, judge

TABLES = FOLDER / "archive" / "tables.md"
TASKS = ("digits", "mnist", "fashion-mnist", "cifar10", "text-classification", "shakespeare")
Runs = dict[str, dict[str, Any]]
Where = tuple[str, bool]  # the task of a run, and whether its method has private blocks


class PageTable(NamedTuple):
    """A table of a page: the text before it, its columns and its rows."""

    before: str
    head: list[str]
    rows: list[list[str]]

    @property
    def text(self) -> str:
        """The table as Markdown."""
        return markdown(self.head, self.rows, plain=False)


def tables(text: str) -> Iterator[PageTable | str]:
    """The tables of a page in order, each with the text before it, and then the text after the last."""
    at = 0
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.M):
        lines = [line.strip()[1:-1].strip().split(" | ") for line in found[0].splitlines()]
        cells = [[cell.strip() for cell in line] for line in lines]
        yield PageTable(text[at : found.start()], cells[0], cells[2:])
        at = found.end()
    yield text[at:]


def status(run: dict[str, Any], where: Where, chances: dict[str, Chance]) -> dict[str, Any]:
    """Task and status of a run; None for methods with private blocks, whose curves were not kept."""
    task, personal = where
    if personal:
        return {"task": task, "status": None, "status_round": None, "chance_accuracy": None}
    if task not in chances:  # answers of a language model have no most frequent class: what the run itself found
        return {"task": task, **{key: run.get(key) for key in ("status", "status_round", "chance_accuracy")}}
    curve = [{"round": point[0], "accuracy": point[-1]} for point in run.get("curve") or run["accuracy"]]
    verdict = judge(curve, chances[task])
    found = {"task": task, "status": verdict.status, "status_round": verdict.round}
    return {**found, "chance_accuracy": chances[task].share}


def of_grid(stem: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Where]]:
    """The grid of a page, and a function from a run to its task."""
    if not (FOLDER / f"grids/{stem}.toml").exists():  # `flasc-s`
        return {}, lambda run: ("text-classification", False)
    grid = load_grid(stem)
    content, personal = grid.content, {line.label: _personal(line.runs[0]) for line in grid.lines()}
    return content, lambda run: (content["on"], personal[run["method"]])


def _personal(experiment: Any) -> bool:
    return bool(getattr(experiment.method.schedule, "private", ()))


def write_result(page: Path, chances: dict[str, Chance]) -> Runs:
    """Regenerate one page of docs/results; returns its runs."""
    file = page.with_suffix(".json")
    runs: Runs = json.loads(file.read_text())
    content, where = of_grid(page.stem)
    for run in runs.values():
        run.update(status(run, where(run), chances))
    text = ""
    for part in tables(page.read_text()):
        if isinstance(part, str):
            text += part
            continue
        mine = [[runs[name] for name in row[-1].split() if name in runs] for row in part.rows]
        head, rows = list(part.head), part.rows
        if len(head) > 2 and head[2].startswith("bytes to 0.") and "best accuracy %" not in head:
            head.insert(3, "best accuracy %")
            best = [mean_std_text([run["best_accuracy"] for run in some]) for some in mine]
            rows = [[*row[:3], cell, *row[3:]] for row, cell in zip(rows, best, strict=True)]
        text += part.before + markdown(*widened(head, rows, mine), plain=False)
    by = str(content.get("tune", {}).get("by", "best_accuracy"))
    pattern = re.compile(r"^(On seed [\d, ]+, [\d or]+ rounds)(?:, by [a-z ]+)?\.$", re.M)
    text = pattern.sub(rf"\1, by accuracy {selection_set(by)}.", text)
    if content:
        first = re.search(rf"^{re.escape(content['on'])}, \d+ clients", text, re.M)
        assert first, page
        text = f"# {content['title']}\n\n{content.get('text', '').strip()}\n\n" + text[first.start() :]
    page.write_text(text)
    file.write_text(run_lines(runs))
    return runs


def write_reproduction(page: Path, tables: Path, chances: dict[str, Chance]) -> Runs:
    """Regenerate the page of claims and the page of tables from their archive; returns the runs that tables show."""
    file = tables.with_suffix(".json")
    archive = Archive.read(file)
    for run in archive.runs.values():
        early = "curve_ideal" not in run and run["status"] is not None  # of a time when runs had no status of their own
        if early and run["status"] != "diverged":
            run.update(status(run, (run["task"], False), chances))
    file.write_text(archive.text())
    sections = update_page(tables, [], Path("no run directories"))
    page.write_text(overview({part.name: part.rows for part in sections}, archive))
    return shown_runs(Archive.read(file))


def shown_runs(archive: Archive) -> Runs:
    """The runs that tables of a page show."""
    return {name: run for name, run in archive.runs.items() if run["tables"] and run["status"] != "diverged"}


def broken_part(found: dict[str, Runs]) -> str:
    """The section on published runs that collapsed or stayed at chance."""
    everything = [(page, name, run) for page, runs in found.items() for name, run in runs.items()]
    rows = []
    for page, name, run in everything:
        if run["status"] == "collapsed":
            of = f"[{page}]({page}.md)" if page == "reproduction" else f"[{page}](results/{page}.md)"
            ends = [f"{100 * run[key]:.2f}" for key in ("best_accuracy", "final_accuracy")]
            rows.append(
                [
                    of,
                    run["method"],
                    run["settings"].split(", ")[-1],
                    str(run["seed"]),
                    *ends,
                    str(run["status_round"]),
                    name,
                ]
            )
    head = [
        "page",
        "method",
        "learning rate",
        "seed",
        "best accuracy %",
        "final accuracy %",
        "at chance since round",
        "run",
    ]
    counts = Counter(run["status"] for _, _, run in everything)
    text = (
        f"Of {len(everything):,} published runs {counts['collapsed']} collapsed: they had learned and ended at chance. "
        f"{counts['at chance']} more never got above chance, most of them at the largest learning rates of a search. "
        f"The tables count them under '{FAILED_RUNS}'. Diverged runs are not counted: they did not finish.\n\n"
    )
    return text + markdown(head, rows, plain=False)


def data_of(task: str) -> str:
    """The dataset of a task."""
    return "20newsgroups" if task == "text-classification" else task


def write_chance(file: Path, data_dir: Path | None, tasks: Sequence[str] = TASKS) -> None:
    """Write the chance level of each test set."""
    found = {}
    for task in tasks:
        chance = chance_among(lookup("dataset", data_of(task)).make(data_dir).test.targets)
        assert chance
        found[task] = chance._asdict()
    file.write_text(json.dumps(found, indent=1) + "\n")


def read_chance(docs: Path) -> dict[str, Chance]:
    """Read the file of `write_chance`."""
    return {task: Chance(**values) for task, values in json.loads((docs / "chance.json").read_text()).items()}


def write_published(docs: Path) -> None:
    """Write all pages again."""
    chances = read_chance(docs)
    found = {page.stem: write_result(page, chances) for page in sorted((docs / "results").glob("*.md"))}
    found["reproduction"] = write_reproduction(docs / "reproduction.md", TABLES, chances)
    write_part(docs / "results.md", "broken", broken_part(found), "python -m papers published")
