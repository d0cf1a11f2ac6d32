"""`python -m papers frontier` on digits: real runs, files, and that nothing is run twice."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest

from papers.archive import Archive
from papers.figures import frontier_chart
from papers.frontier import (
    SEARCH_SEED,
    Row,
    SeedCurve,
    Where,
    Work,
    _center,
    best_by_bytes,
    front,
    frontier_grid,
    reference_of,
    rows_of,
    winners,
)
from papers.frontier_page import _seeds, row_cells, win_cells
from papers.grid import summary
from papers.runs import run_grids
from papers.tables import FOLDER, read
from thinwire.errors import ConfigError
from thinwire.runs.config import resolve, to_table

SMALL = ("--set", "task.clients=4", "--set", "cohort.size=2", "--set", "local.steps=2")
CHANGES = tuple(word for word in SMALL if word != "--set")


def test_the_documented_set_is_large_and_every_row_has_the_same_search():
    rows = rows_of()
    assert len(rows) >= 14
    assert len({row["label"] for row in rows}) == len(rows)
    grid = frontier_grid(rows, Where("digits", changes=CHANGES), Work(rounds=8))
    thin = {row["label"]: row["set"].get("method.space.k") for row in grid.content["rows"] if row["method"] == "thin"}
    assert thin["thin, 4 k"] > 14 * thin["thin, k/4"] > 50 * thin["thin, k/16"]
    for row in grid.content["rows"]:
        ((key, values),) = row["over"].items()
        assert key.endswith("_opt.lr")
        assert values[2] == pytest.approx(2 * values[1]) == pytest.approx(4 * values[0])
    assert "thin, 16 k" not in thin  # more than the weights
    with pytest.raises(ConfigError, match="thin, 16 k: k would be above the 4,810 weights"):
        frontier_grid(rows_of(["thin, 16 k"]), Where("digits", changes=CHANGES), Work(rounds=8))
    trials = frontier_grid(rows[:2], Where("digits", changes=CHANGES), Work(rounds=8)).trials()
    assert len(trials) == 3 * 2
    assert {(e.seed, e.rounds, e.eval.every, e.task.validation_fraction) for line in trials for e in line.runs} == {
        (SEARCH_SEED, 4, 4, 0.1)
    }


def test_a_center_is_that_of_the_row_or_of_the_set_for_the_task():
    of_set = rows_of(["fedavg", "fetchsgd"])
    own = {"label": "own", "method": "fedavg", "center": {"digits": 0.7}}
    grid = frontier_grid([*of_set, own], Where("digits", changes=CHANGES), Work(rates=1, rounds=8))
    assert [list(row["over"].values()) for row in grid.content["rows"]] == [[[0.3]], [[1.0]], [[0.7]]]
    centers = read("frontier.toml")["center"]
    experiment = Where("fashion-mnist").experiment()
    assert _center(of_set[0], experiment, "method.client_opt.lr") == centers["fashion-mnist"]
    assert _center(of_set[1], experiment, "method.server_opt.lr") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [row["label"] for row in rows_of() if row["label"] != "thin, 16 k"])
def test_every_row_of_the_set_trains(name, tmp_path):
    grid = frontier_grid(rows_of([name]), Where("digits", changes=CHANGES), Work(1, 1, 1.0, 3))
    run_grids([grid], tmp_path)
    (line,) = grid.final(tmp_path)
    assert summary(line.runs[0], tmp_path)["rounds"] == 3


def test_frontier_writes_a_page_a_chart_and_values(papers, tmp_path):
    words = ("frontier", "fedavg", "thin, k/4", "--on", "digits", *SMALL, "--rounds", "10", "--seeds", "2", "-q")
    code, out, err = papers(*words, "--rates", "2", "--share", "0.2")
    assert code == 0, err
    page = (tmp_path / "runs/frontier/digits.md").read_text()
    assert page == out.rstrip("\n") + "\n"
    for part in ("## Which method wins where", "| fedavg |", "| thin, k/4 |", "## The search", "on seed 100"):
        assert part in page
    ElementTree.parse(tmp_path / "runs/frontier/digits.svg")
    values = json.loads((tmp_path / "runs/frontier/digits.json").read_text())
    assert [(row["label"], [values["runs"][name]["seed"] for name in row["runs"]]) for row in values["rows"]] == [
        ("fedavg", [0, 1]),
        ("thin, k/4", [0, 1]),
    ]
    folders = {folder: folder.stat().st_mtime_ns for folder in (tmp_path / "runs/frontier").glob("*/summary.json")}
    assert len(folders) == 2 * 2 + 2 * 2
    assert papers(*words, "--rates", "2", "--share", "0.2", "--no-run", "--json")[0] == 0
    assert folders == {folder: folder.stat().st_mtime_ns for folder in folders}


def test_a_page_goes_on_from_the_runs_of_its_json_file(papers, tmp_path):
    """Search and first seed in one folder, the second seed in an empty one, the page from the JSON file alone."""
    words = ("frontier", "fedavg", "--on", "digits", *SMALL, "--rounds", "2", "--rates", "2", "--md", "page.md", "-q")
    file = tmp_path / "page.json"
    assert papers(*words, "--seeds", "1", "--out", "one")[0] == 0
    first = Archive.read(file).runs
    assert sorted(run["seed"] for run in first.values()) == [0, SEARCH_SEED, SEARCH_SEED]
    assert all(run["date"] and run["digest"].startswith(name) for name, run in first.items())
    assert papers(*words, "--seeds", "2", "--out", "two")[0] == 0
    (folder,) = (tmp_path / "two").glob("*/summary.json")
    assert "-s1-" in folder.parent.name, "only the missing run"
    both, page = file.read_text(), (tmp_path / "page.md").read_text()
    assert Archive.read(file).runs.items() >= first.items()
    assert re.search(r"^\| fedavg \|.*\| 0 1 \|.*\| 1 \| yes \|", page, re.M)
    assert re.search(r"^Made on 20.* \(4 runs\)", page, re.M)
    assert papers(*words, "--seeds", "2", "--out", "gone")[0] == 0
    assert (file.read_text(), (tmp_path / "page.md").read_text()) == (both, page)
    assert not (tmp_path / "gone").exists()
    assert papers(*words, "--seeds", "1", "--out", "gone", "--no-run")[0] == 0
    left = [run for name, run in Archive.read(file).runs.items() if name not in first]
    assert [(run["seed"], run["tables"]) for run in left] == [(1, [])], "a run that the page no longer shows stays"


def test_a_task_without_accuracy_is_refused(tmp_path):
    (tmp_path / "mine.csv").write_text("a,b,y\n" + "".join(f"{i},{i * 2},{i * 0.3}\n" for i in range(60)))
    where = Where(str(tmp_path / "mine.csv"), changes=("task.target=y", "task.clients=2", "cohort.size=2"))
    with pytest.raises(ConfigError, match="a frontier compares accuracies on a test set, which"):
        frontier_grid(rows_of(["fedavg"]), where, Work())


# -- values, without training -----------------------------------------------------------------------------------------

CONFIG = {key: value for key, value in to_table(resolve("fedavg", "digits")).items() if key != "seed"}


def row(label, each, accuracies, seeds=(0, 1, 2), status="finished", noise=0.0):
    """A method that sends `each` bytes a round; seed s is better by s times the noise."""
    runs = []
    for seed in seeds:
        points = tuple((i + 1, each * (i + 1), a + noise * seed) for i, a in enumerate(accuracies))
        runs.append(SeedCurve(seed, f"{label}{seed}", status, points))
    return Row(label, "", CONFIG, tuple(runs))


FEDAVG = row("fedavg", 1000, [0.2, 0.4, 0.6, 0.8], noise=0.01)
THIN = row("thin", 10, [0.3, 0.5, 0.6, 0.7], noise=0.01)
WASTEFUL = row("wasteful", 500, [0.1, 0.2, 0.3, 0.4])
BROKEN = row("broken", 1, [0.9, 0.9, 0.9, 0.9], status="collapsed")
ROWS = [FEDAVG, THIN, WASTEFUL, BROKEN]


def test_the_front_has_the_rows_that_nothing_beats_and_no_failed_ones():
    assert [one.label for one in front(ROWS)] == ["thin", "fedavg"]
    assert reference_of(ROWS).label == "fedavg"
    assert reference_of([THIN, WASTEFUL]).label == "wasteful"
    steps = best_by_bytes(ROWS)
    assert [sent for sent, _ in steps] == [10, 20, 30, 40, 4000]
    assert all(later[1] > earlier[1] for earlier, later in itertools.pairwise(steps))


def test_winners_count_only_the_rounds_that_a_budget_pays():
    found = {one.share: one for one in winners(ROWS, (1, 2, 100, 1000))}
    assert found[1].first.label == "fedavg"
    assert found[1].second.label == "thin"
    assert found[1].ahead.mean == pytest.approx(0.1)
    assert found[1].clear, "the difference is the same on every seed"
    assert found[2].first.label == "thin", "FedAvg pays for two rounds only"
    assert found[100].second is None
    assert found[1000].first is None, "no round costs so little"
    cells = win_cells(ROWS)
    assert cells[0][:4] == ["4 kB", "all", "fedavg", "81.00 ± 1.00"]
    assert cells[-1] == ["4 B", "1/1000", "none"]


def test_a_difference_within_the_spread_of_seeds_is_not_clear():
    mixed = Row(
        "mixed", "", CONFIG, tuple(SeedCurve(s, "", "finished", ((1, 10, 0.69 + 0.02 * s),)) for s in (0, 1, 2))
    )
    steady = row("steady", 10, [0.705])
    (one,) = winners([mixed, steady], (1,))
    assert one.first.label == "mixed"
    assert not one.clear
    (single,) = winners([row("a", 1, [0.9], seeds=[0]), row("b", 1, [0.1], seeds=[0])], (1,))
    assert not single.clear, "one seed shows no spread"


def test_rows_with_fewer_seeds_are_named_and_compared_by_the_seeds_of_both():
    short = row("short", 1000, [0.2, 0.4, 0.6, 0.7], seeds=[1], noise=0.01)
    assert win_cells([FEDAVG, short])[0][2:] == ["fedavg", "81.00 ± 1.00", "short", "10.00", "1", "no"]
    assert _seeds([FEDAVG, short, Row("none", "", CONFIG, ())]).startswith(" Rows: 1 with 3 seeds, 1 with 1 seed. ")
    assert _seeds([FEDAVG, THIN]) == ""


def test_the_table_has_shares_and_failures():
    cells = {line[0]: line for line in row_cells(ROWS)}
    assert cells["thin"][5:8] == ["40 B", "1/100", "yes"]
    assert cells["broken"][4] == "3 of 3 collapsed"
    assert cells["broken"][7] == "no"
    assert cells["wasteful"][7] == "no"
    drawing = frontier_chart(ROWS, "digits")
    assert [name for name in ("fedavg", "thin", "wasteful", "broken") if f">{name}</text>" in drawing][-1] == "wasteful"


def test_the_table_of_rates_is_that_of_its_runs(papers):
    docs = FOLDER.parent / "docs"
    code, out, _ = papers("rates", "--no-run", "--json", str(docs / "frontier/rates.jsonl"))
    assert code == 0
    assert out.strip() in (docs / "frontier.md").read_text()
