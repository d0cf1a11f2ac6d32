"""Write the tables of published pages again, from the numbers that lie beside them; nothing is run.

    python benchmarks/published.py                             # docs/results, docs/reproduction.md, part of results.md
    python benchmarks/published.py --chance --data-dir DATA    # first docs/chance.json, from the test sets

The runs behind a page are in the JSON file beside it, with the curve of each. This program judges every curve against
the chance of its test set (`thinwire/experiments/collapse.py`), notes task and status in the JSON, and gives the tables final
beside best and a column of runs that broke down. Sentences above tables are those of the grids and of the presets.
Cells that need more than the JSON holds (bytes until an accuracy) stay as they were written from run directories.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.experiments.collapse import BROKEN, Chance, judge
from thinwire.experiments.grid import Grid, markdown
from thinwire.experiments.presets import presets
from thinwire.experiments.repro import load
from thinwire.reports.finals import ended, judged_on, spread, trial_words, widened
from thinwire.reports.repro_page import page_head

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.page import write_part

ROOT = Path(__file__).parent.parent
TASKS = ("digits", "mnist", "fashion-mnist", "cifar10", "text-classification")
Runs = dict[str, dict[str, Any]]
Where = tuple[str, bool]  # the task of a run, and whether clients keep a part of the model to themselves


class Tabled(NamedTuple):
    """A table of a page: what stands before it, its columns and its rows."""

    before: str
    head: list[str]
    rows: list[list[str]]

    @property
    def text(self) -> str:
        """As it is written."""
        return markdown(self.head, self.rows, plain=False)


def tables(text: str) -> Iterator[Tabled | str]:
    """The tables of a page in turn, each with the text before it, and then the text after the last."""
    at = 0
    for found in re.finditer(r"(?:^\|.*\n)+", text, re.M):
        lines = [line.strip()[1:-1].strip().split(" | ") for line in found[0].splitlines()]
        cells = [[cell.strip() for cell in line] for line in lines]
        yield Tabled(text[at : found.start()], cells[0], cells[2:])
        at = found.end()
    yield text[at:]


def status(run: dict[str, Any], where: Where, chances: dict[str, Chance]) -> dict[str, Any]:
    """What is known of how a run ended. Of models that the server never sees no curve was kept: nothing is said."""
    task, personal = where
    if personal:
        return {"task": task, "status": None, "status_round": None, "chance_accuracy": None}
    curve = [{"round": point[0], "accuracy": point[-1]} for point in run.get("curve") or run["accuracy"]]
    verdict = judge(curve, chances[task])
    found = {"task": task, "status": verdict.status, "status_round": verdict.round}
    return {**found, "chance_accuracy": chances[task].share}


def of_grid(stem: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Where]]:
    """The grid of a page, and where a run of it belongs."""
    file = ROOT / f"benchmarks/grids/{stem}.toml"
    if not file.exists():  # of a program of its own
        return {}, lambda run: ("text-classification", False)
    content = tomllib.loads(file.read_text())
    personal = {line.label: _personal(line.runs[0]) for line in Grid(content).lines()}
    return content, lambda run: (content["on"], personal[run["method"]])


def _personal(experiment: Any) -> bool:
    return bool(getattr(experiment.method.schedule, "private", ()))


def write_result(page: Path, chances: dict[str, Chance]) -> Runs:
    """One page of docs/results."""
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
            best = [spread([run["best_accuracy"] for run in some]) for some in mine]
            rows = [[*row[:3], cell, *row[3:]] for row, cell in zip(rows, best, strict=True)]
        text += part.before + markdown(*widened(head, rows, mine), plain=False)
    by = str(content.get("tune", {}).get("by", "best_accuracy"))
    said = re.compile(r"^(On seed [\d, ]+, [\d or]+ rounds)(?:, by [a-z ]+)?\.$", re.M)
    text = said.sub(rf"\1, by accuracy {judged_on(by)}.", text)
    if content:
        first = re.search(rf"^{re.escape(content['on'])}, \d+ clients", text, re.M)
        assert first, page
        text = f"# {content['title']}\n\n{content.get('text', '').strip()}\n\n" + text[first.start() :]
    page.write_text(text)
    _write(file, runs)
    return runs


def write_reproduction(page: Path, chances: dict[str, Chance]) -> Runs:
    """The page of the papers' tables."""
    file = page.with_suffix(".json")
    runs: Runs = json.loads(file.read_text())
    sections = re.split(r"^(?=## )", page.read_text(), flags=re.M)[1:]
    named = {one.table["paper"]: name for name, one in presets("repro").items() if "paper" in one.table}
    named |= {one.paper: name for name, one in presets("repro").items()}
    out = [page_head(page)]
    for section in sections:
        name = named[section[3:].split(":")[0]]
        out.append(_section(section, name, runs, chances))
    page.write_text("".join(out))
    _write(file, runs)
    return runs


def _section(text: str, name: str, runs: Runs, chances: dict[str, Chance]) -> str:
    """One table of a paper, column by column."""
    repro = load(name, "gpu", "cuda")
    content = repro.content
    if content.get("counted"):
        return text
    on = {column["name"]: column.get("on", content.get("on")) for column in content["columns"]}
    personal = {
        row["label"]: _personal(repro.grid.line(i, _first(row)).runs[0])
        for i, row in enumerate(repro.grid.content["rows"])
    }
    out, column, own = "", "", False
    fell: dict[str, str] = {}  # by method, the seeds on which what was taken broke down
    for part in tables(text):
        before = part if isinstance(part, str) else part.before
        if found := re.findall(r"^\*\*(.*?)\*\* \(", before, re.M):
            column = found[-1]
        if isinstance(part, str):
            out += part
        elif part.head[-1] == "runs":
            mine = [[runs[one] for one in row[-1].split() if one in runs] for row in part.rows]
            for row, some in zip(part.rows, mine, strict=True):
                for run in some:
                    run.update(status(run, (on[column], personal[row[0]]), chances))
                fell[row[0]] = " ".join(str(run["seed"]) for run in some if run["status"] in BROKEN)
            head, rows = widened(part.head, part.rows, mine)
            own = own or ("our final own accuracy %" in head and "our best own accuracy %" not in head)
            out += before + markdown(head, rows, plain=False)
        else:
            by = re.findall(r"The search, by (.*? %)", before)[-1].removesuffix(" %").replace(" ", "_")
            for row in part.rows:
                where = on[column], personal[row[0]]
                row[1] = "; ".join(
                    _tried(runs, name, row[0], words, by, where, chances) for words in row[1].split("; ")
                )
                if (said := f"{row[2]} on {fell[row[0]]}") and fell[row[0]] and said not in row[-1].split("; "):
                    row[-1] = said if row[-1] == "-" else f"{row[-1]}; {said}"
            out += before + part.text
    return _words(out, content, [run for run in runs.values() if name in run["tables"]], OWN if own else "")


def _words(text: str, content: dict[str, Any], runs: list[dict[str, Any]], own: str) -> str:
    """A section with the sentences of its preset, and how many of its runs broke down."""
    said = re.compile(r"(The search, by [^\n]*? %) (?:on [a-z ]+ )?(after [^\n]*? the table's)[^\n]*:\n")
    also = " (the final accuracy is given where it is another):\n"
    text = said.sub(lambda found: f"{found[1]} {judged_on(found[1])} {found[2]}{also}", text)
    first = re.search(r"^\*\*.*?\*\* \(\d+ rounds", text, re.M)
    differs = f"{content['differs']}\n\n" if content["differs"] else ""
    verdict = f"{content['verdict'].strip()}\n\n" if content.get("verdict", "").strip() else ""
    body, _, end = text.rpartition("Scale `gpu`")
    table = body.rindex("\n|")
    body = body[: body.index("\n\n", table) + 2]  # what stood between the last table and the end is written again
    end = re.sub(r"(?:; \d+ runs? (?:collapsed|ended at chance))+(?=\. `thinwire)", "", end)
    end = re.sub(r"(?=\. `thinwire)", ended(runs), end, count=1)
    assert first, content["paper"]
    body = f"## {content['paper']}: {content['about']}\n\n{differs}" + body[first.start() :]
    return f"{body}{own}{verdict}Scale `gpu`{end}"


OWN = "The best accuracy of clients' own models was not kept for these runs: the table has the final one only.\n\n"


def _first(row: dict[str, Any]) -> dict[str, Any]:
    return {key: values[0] for key, values in row.get("over", {}).items()}


def _tried(runs: Runs, table: str, method: str, words: str, by: str, where: Where, chances: dict[str, Chance]) -> str:
    """One choice of a search, from the run that gave the printed value."""
    chosen, _, value = words.partition(": ")
    if not (printed := re.match(r"\d+\.\d\d", value)):
        return words
    rate = float(chosen.split()[-1])
    fits = [
        run
        for run in runs.values()
        if table in run["tables"] and run["method"] == method and run["seed"] == 100
        if float(run["settings"].split()[-1]) == rate and f"{100 * (run[by] or 0):.2f}" == printed[0]
        if run.get("task") in (None, where[0])
    ]
    for run in fits:  # columns of one task may share a method, a rate and a value
        run.update(status(run, where, chances))
    told = {trial_words(by, [run]) for run in fits}
    if len(told) != 1:
        raise SystemExit(f"{table}, {method}, {words}: {len(fits)} runs gave this, and they differ")
    return f"{chosen}: {told.pop()}"


def _write(file: Path, runs: Runs) -> None:
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    file.write_text("{\n" + body + "\n}\n")


def broken_part(found: dict[str, Runs]) -> str:
    """The published runs that collapsed, and how many never got above chance."""
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
    head = ["page", "method", "rate", "seed", "best accuracy %", "final accuracy %", "at chance since round", "run"]
    counts = Counter(run["status"] for _, _, run in everything)
    text = (
        f"Of {len(everything):,} published runs {counts['collapsed']} collapsed: they had learned and ended at chance. "
        f"{counts['at chance']} more never got above chance, most of them at the largest rates of a search. Rows are "
        "marked under 'broke down'. Runs whose numbers stopped being finite are not counted: they never finished.\n\n"
    )
    return text + markdown(head, rows, plain=False)


def data_of(task: str) -> str:
    """The data of a task: that of a pretrained model has the test half of the data set itself."""
    return "20newsgroups" if task == "text-classification" else task


def write_chance(file: Path, data_dir: Path | None, tasks: Sequence[str] = TASKS) -> None:
    """What guessing gets on each test set."""
    from thinwire.core.registry import lookup
    from thinwire.experiments.chance import chance_among

    found = {}
    for task in tasks:
        chance = chance_among(lookup("task", data_of(task)).make(data_dir).test.targets)
        assert chance
        found[task] = chance._asdict()
    file.write_text(json.dumps(found, indent=1) + "\n")


def read_chance(docs: Path) -> dict[str, Chance]:
    """What `write_chance` wrote."""
    return {task: Chance(**values) for task, values in json.loads((docs / "chance.json").read_text()).items()}


def main() -> None:  # noqa: D103
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--chance", action="store_true", help="first write chance.json from the data sets")
    parser.add_argument("--data-dir", type=Path, default=None)
    options = parser.parse_args()
    if options.chance:
        write_chance(options.docs / "chance.json", options.data_dir)
    chances = read_chance(options.docs)
    found = {page.stem: write_result(page, chances) for page in sorted((options.docs / "results").glob("*.md"))}
    found["reproduction"] = write_reproduction(options.docs / "reproduction.md", chances)
    write_part(options.docs / "results.md", "broken", broken_part(found), "python benchmarks/published.py")


if __name__ == "__main__":
    main()
