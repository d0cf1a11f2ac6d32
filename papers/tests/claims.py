"""Find the numbers in prose and compare them with the runs that they come from.

A claim is an accuracy, a share or a number of bytes in a paragraph of the documentation. The paragraph links to tables
in docs/results or to docs/reproduction.md, whose tables are in papers/archive; the JSON file of a
table has the values of its runs. A claim holds if some value of those runs, rounded like the claim, equals it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from papers.tables import FOLDER
from thinwire.reports.rows import MeanInterval
from thinwire.runs.collapse import is_broken

SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
ACCURACIES = ("best_accuracy", "final_accuracy", "last_accuracy", "best_client_accuracy", "final_client_accuracy")
FINAL = ("final_accuracy", "last_accuracy", "final_client_accuracy")
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


def table_page(page: Path) -> Path:
    """The page with the tables: of the page of claims, that in papers/archive."""
    return FOLDER / "archive/tables.md" if page.stem == "reproduction" else page


def runs_of(page: Path) -> dict[str, dict]:
    """The runs of a page by name, from its JSON file: those of an archive, or the whole file."""
    content = json.loads(table_page(page).with_suffix(".json").read_text())
    return content.get("runs", content)


def rows(page: Path) -> Iterator[tuple[str, list[dict]]]:
    """(method, its runs) of each row of the tables on a page; unfinished runs are left out."""
    known = runs_of(page)
    for line in table_page(page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if runs := [known[name] for name in cells[-1].split() if name in known]:
            yield cells[0], runs


class Table:
    """The values of some tables: means over seeds, their 95 % intervals, and shares of FedAvg's best by seed.

    Args:
        pages: the tables.
        sound: exclude rows in which a run collapsed, diverged or never got above chance.
        accuracies: those that count.
    """

    def __init__(self, pages: list[Path], sound: bool = False, accuracies: Sequence[str] = ACCURACIES) -> None:
        self.text = "" if sound else "".join(table_page(page).read_text() for page in pages)
        self.shares: set[float] = set()
        self.sizes: set[float] = set()
        for page in pages:
            lines = [(name, runs) for name, runs in rows(page) if not (sound and any(map(is_broken, runs)))]
            plain: dict[int, float] = {}  # FedAvg at its best rate, by seed
            for run in (run for name, runs in lines for run in runs if name == "fedavg"):
                plain[run["seed"]] = max(plain.get(run["seed"], 0.0), run["best_accuracy"])
            for _, runs in lines:
                for key in accuracies:
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
