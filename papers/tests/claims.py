"""Find the numbers in prose and compare them with the runs that they come from.

A claim is an accuracy, a share or a number of bytes in a paragraph of the documentation. The paragraph links to tables
in docs/results or to docs/reproduction.md; the JSON file of a table has the values of its runs. A claim holds if some
value of those runs, rounded like the claim, equals it.

Statements are the sentences that `papers/verdicts.py` writes into the verdicts of docs/reproduction.md. Here
they are read from the text of the page again, and compared with the tables of the page: rows, numbers, direction, and
whether failed runs are mentioned.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from papers.tables import papers
from thinwire.experiments.collapse import is_broken
from thinwire.reports.seed_groups import MeanInterval

SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
ACCURACIES = ("best_accuracy", "final_accuracy", "last_accuracy", "best_client_accuracy", "final_client_accuracy")
BYTES = ("bytes_up", "bytes_down", "bytes_catchup", "bytes_total")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


def paragraphs(text: str) -> list[str]:
    """The paragraphs, list items and table rows of a page, without code and generated sections."""
    text = re.sub(r"<!-- begin .*?<!-- end [\w-]+ -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"^    .*$", "", text, flags=re.M)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=- |\| )", text) if part.strip()]


def claims(paragraph: str) -> list[tuple[str, str]]:
    """(number, unit) of each accuracy, share and size; the numbers of a list have the unit of the last one.

    >>> claims("it is 94.97, 94.99 and 95.04 %, of 1.5 MB; `lr = 0.1`")
    [('94.97', '%'), ('94.99', '%'), ('95.04', '%'), ('1.5', 'MB')]
    """
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|95 % interval", " ", paragraph)
    found = []
    lists = rf"((?:{NUMBER}(?:, | and | to | against | ± ))*{NUMBER}) (%|kB|MB|GB)(?!\w)"
    for match in re.finditer(lists, plain):
        found += [(number, match[2]) for number in re.findall(NUMBER, match[1])]
    bare = re.sub(lists, " ", plain)  # an accuracy may have no % sign
    return found + [(number, "%") for number in re.findall(r"(?<![\d.,])\d\d\.\d{1,2}(?![\d.]| \w)", bare)]


def runs_of(page: Path) -> dict[str, dict]:
    """The runs of a page by name, from its JSON file: those of an archive, or the whole file."""
    content = json.loads(page.with_suffix(".json").read_text())
    return content.get("runs", content)


def rows(page: Path) -> Iterator[tuple[str, list[dict]]]:
    """(method, its runs) of each row of the tables on a page; unfinished runs are left out."""
    known = runs_of(page)
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if runs := [known[name] for name in cells[-1].split() if name in known]:
            yield cells[0], runs


class Table:
    """The values of some tables: means over seeds, their 95 % intervals, and shares of FedAvg's best by seed.

    Args:
        pages: the tables.
        sound: exclude rows in which a run collapsed, diverged or never got above chance.
    """

    def __init__(self, pages: list[Path], sound: bool = False) -> None:
        self.text = "" if sound else "".join(page.read_text() for page in pages)
        self.shares: set[float] = set()
        self.sizes: set[float] = set()
        for page in pages:
            lines = [(name, runs) for name, runs in rows(page) if not (sound and any(map(is_broken, runs)))]
            plain: dict[int, float] = {}  # FedAvg at its best rate, by seed
            for run in (run for name, runs in lines for run in runs if name == "fedavg"):
                plain[run["seed"]] = max(plain.get(run["seed"], 0.0), run["best_accuracy"])
            for _, runs in lines:
                for key in ACCURACIES:
                    if mean := MeanInterval.of(None if run.get(key) is None else 100 * run[key] for run in runs):
                        half = mean.half or 0.0
                        self.shares |= {mean.mean, mean.mean - half, mean.mean + half}
                self.sizes |= {statistics.fmean(run[key] for run in runs) for key in BYTES if key in runs[0]}
                known = [run for run in runs if run["seed"] in plain]
                ratios = [100 * run["best_accuracy"] / plain[run["seed"]] for run in known]
                self.shares |= {*ratios, statistics.fmean(ratios or [0.0])}

    def by_runs(self, number: str) -> bool:
        """Whether the runs of some row, or their mean, have this share."""
        value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
        return any(round(known, digits) == value for known in self.shares)

    def holds(self, number: str, unit: str) -> bool:
        """Whether some run, or a mean over seeds, has this value."""
        value, digits = float(number.replace(",", "")), len(number.partition(".")[2])
        if unit == "%":
            asked = re.search(rf"(?:to|reached|at) {re.escape(number)} %", self.text)  # a target, not a result
            printed = f"| {number} |" in self.text  # a whole cell, such as a share of bytes; other tests check those
            return bool(asked) or printed or self.by_runs(number)
        return any(round(known / SIZES[unit], digits) == value for known in self.sizes)


# -- statements of verdicts ------------------------------------------------------------------------------------------

_DATA = r"\((?P<notes>[^()]*(?:\([^()]*\)[^()]*)*)\)"
_RELATIONS = (
    r"is (?:(?P<gap>[\d.]+) points )?(?P<relation>ahead of|behind|level with) (?P<other>LABEL)",
    r"is (?:(?P<gap>[\d.]+) points )?(?P<relation>above the paper|below the paper|as in the paper)",
    r"(?P<relation>sends) (?P<share>[\d.e+-]+) % of the bytes of (?P<other>LABEL)",
    r"(?P<relation>costs) (?P<cost>[\d.e+-]+) (?:%|GB|MB) as the paper counts",
    r"(?P<relation>reaches) (?P<value>[\d.]+) ± (?P<std>[\d.]+) %",
)
_FAILED = r"(?P<failed>\d+ of \d+) runs of (?P<row>LABEL) (?P<how>collapsed|ended at chance|diverged)"


class PageRow(NamedTuple):
    """A row of a table on the page: its cells by column head."""

    cells: dict[str, str]

    @property
    def mean_std(self) -> tuple[float, float]:
        """Of the measure, which is the first of our values."""
        mean, _, std = next(cell for head, cell in self.cells.items() if head.startswith("our ")).partition(" ± ")
        return float(mean), float(std)


def tables_of(text: str) -> dict[str, dict[str, dict[str, PageRow]]]:
    """The rows of every table, by paper, by place (`Table 1, alpha 1`) and by label."""
    out: dict[str, dict[str, dict[str, PageRow]]] = {}
    for part in re.split(r"^(?=## )", text, flags=re.M)[1:]:
        paper, _, title = part[3:].split(":")[0].partition(", ")
        for column in re.split(r"^(?=\*\*.*?\*\* \(\d+ rounds)", part, flags=re.M)[1:]:
            body = column.split("The search, by")[0]
            lines = [line.strip("| \n").split(" | ") for line in body.splitlines() if line.startswith("| ")]
            found = {cells[0]: PageRow(dict(zip(lines[0], cells, strict=True))) for cells in lines[1:]}
            out.setdefault(paper, {})[f"{title}, {column[2:].split('**')[0]}"] = found
    return out


def statements(text: str) -> list[tuple[str, re.Match[str]]]:
    """(paper, match) of every statement in the verdicts of a page."""
    titles = {paper["title"]: paper["name"] for paper in papers()}
    out = []
    for words in paragraphs(text):
        head = re.match(r"\*\*([^*]*)\.\*\* ", words)
        if not head or head[1] not in titles:
            continue
        places = tables_of(text).get(titles[head[1]], {})
        labels = sorted({label for found in places.values() for label in found}, key=len, reverse=True)
        label = "|".join(map(re.escape, labels))
        verdict = words[head.end() :].split(" Not reproduced: ")[0]
        for relation in _RELATIONS:
            pattern = rf"(?P<row>LABEL) {relation} {_DATA}".replace("LABEL", label)
            out += [(titles[head[1]], match) for match in re.finditer(pattern, verdict)]
        out += [(titles[head[1]], one) for one in re.finditer(f"{_FAILED} {_DATA}".replace("LABEL", label), verdict)]
    return out


def statement_troubles(text: str) -> list[str]:
    """What is wrong with the statements of a page, one text for each."""
    tables = tables_of(text)
    out = []
    for paper, match in statements(text):
        details = match["notes"].split("; ")
        place = next((name for name in tables[paper] if match["notes"].endswith(name)), "")
        if not place:
            out.append(f"no such table: {match[0]}")
            continue
        found = match.groupdict()
        labels = [found["row"], *([found["other"]] if found.get("other") else [])]
        if not set(labels) <= set(tables[paper][place]):
            out.append(f"no such row: {match[0]}")
            continue
        rows = [tables[paper][place][label] for label in labels]
        out += [f"{why}: {match[0]}" for why in _troubles(found, labels, rows, details)]
    return out


def _troubles(found: dict[str, str], labels: list[str], rows: list[PageRow], details: list[str]) -> Iterator[str]:
    """What is wrong with one statement."""
    row = rows[0]
    broken = [one.cells["diverged or collapsed"] for one in rows]
    if found.get("failed"):
        if found["failed"] not in broken[0] and found["how"] != "diverged":
            yield "other runs failed"
        return
    for label, cell in zip(labels, broken, strict=True):
        if re.match(r"(\d+) of \1 ", cell):
            yield f"all runs of {label} failed"
        counts = re.findall(r"(\d+ of \d+) (?:collapsed|at chance)", cell)
        if not all(any(part.startswith(f"{count} runs of {label} ") for part in details) for count in counts):
            yield f"runs of {label} failed, which is not mentioned"
    if found["relation"] == "sends":
        share = float(row.cells["% of the first"]) / float(rows[1].cells["% of the first"])
        if abs(100 * share / float(found["share"]) - 1) > 0.03:
            yield "another share of bytes"
        return
    if found["relation"] == "costs":
        ours = next(cell for head, cell in row.cells.items() if head.startswith("cost as the paper counts"))
        theirs = row.cells["paper's cost"]
        if float(ours) != float(found["cost"]) or not details[0].startswith(f"the paper has {theirs} "):
            yield "another cost"
        return
    mean, std = row.mean_std
    if found["relation"] == "reaches":
        if (float(found["value"]), float(found["std"])) != (mean, std):
            yield "another value"
        return
    if found.get("other"):
        (other, spread), said = rows[1].mean_std, "{:.2f} ± {:.2f} against {:.2f} ± {:.2f}"
        expected = said.format(mean, std, other, spread)
    else:
        other, spread = float(row.cells["paper's"]), 0.0
        expected = f"{mean:.2f} ± {std:.2f} against {other:g}"
    gap, noise = mean - other, (std**2 + spread**2) ** 0.5
    up = found["relation"] in ("ahead of", "above the paper")
    level = found["relation"] in ("level with", "as in the paper")
    if details[0] != expected:
        yield "other values"
    if level == bool(found["gap"]) or (level and abs(gap) > noise + 0.01) or (not level and abs(gap) < noise - 0.01):
        yield "the spread says otherwise"
    if not level and ((gap > 0) != up or abs(abs(gap) - float(found["gap"] or 0)) > 0.011):
        yield "the direction or the number is wrong"


def numbered(words: str) -> set[tuple[str, int]]:
    """The tables and figures that a text names.

    >>> sorted(numbered("Tables 2, 5, 9 to 11")), numbered("Figure 5, scenario 3")
    ([('Table', 2), ('Table', 5), ('Table', 9), ('Table', 10), ('Table', 11)], {('Figure', 5)})
    """
    kind, _, rest = words.partition(" ")
    if not kind.endswith("s"):
        return {(kind, int(re.match(r"\d+", rest)[0]))}
    out = set()
    for part in re.match(r"[\d]+(?:(?:, | and | to )\d+)*", rest)[0].replace(" and ", ", ").split(", "):
        first, _, last = part.partition(" to ")
        out |= {(kind.removesuffix("s"), i) for i in range(int(first), int(last or first) + 1)}
    return out
