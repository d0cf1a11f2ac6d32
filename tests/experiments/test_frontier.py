"""`thinwire frontier` and `thinwire plan` on digits: real runs, files, and that nothing is run twice."""

from __future__ import annotations

import json
import re
import tomllib
from xml.etree import ElementTree

import pytest

from thinwire.errors import ConfigError
from thinwire.experiments.archive import Archive
from thinwire.experiments.frontier import SEARCH_SEED, Where, Work, _center, frontier_grid, rows_of
from thinwire.experiments.grid import summary
from thinwire.experiments.presets import preset

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
    centers = preset("frontiers", "default").table["center"]
    experiment = Where("fashion-mnist").experiment()
    assert _center(of_set[0], experiment, "method.client_opt.lr") == centers["fashion-mnist"]
    assert _center(of_set[1], experiment, "method.server_opt.lr") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [row["label"] for row in rows_of() if row["label"] != "thin, 16 k"])
def test_every_row_of_the_set_trains(name, tmp_path):
    from thinwire.experiments.run_grids import run_grids

    grid = frontier_grid(rows_of([name]), Where("digits", changes=CHANGES), Work(1, 1, 1.0, 3))
    run_grids([grid], tmp_path)
    (line,) = grid.final(tmp_path)
    assert summary(line.runs[0], tmp_path)["rounds"] == 3


def test_frontier_writes_a_page_a_chart_and_values_and_plan_uses_them(thinwire, tmp_path):
    words = ("frontier", "fedavg", "thin, k/4", "--on", "digits", *SMALL, "--rounds", "10", "--seeds", "2", "-q")
    code, out, err = thinwire(*words, "--rates", "2", "--share", "0.2")
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
    assert thinwire(*words, "--rates", "2", "--share", "0.2", "--no-run", "--json")[0] == 0
    assert folders == {folder: folder.stat().st_mtime_ns for folder in folders}

    least = min(values["runs"][name]["curve"][-1][2] for name in values["rows"][0]["runs"])
    plan = ("plan", "--on", "digits", *SMALL, "--rounds", "10", "--target", f"{least / 2:.3f}")
    code, out, err = thinwire(*plan, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["estimates"][0]["method"].startswith("thin")
    assert found["estimates"][0]["measured"]
    table = tomllib.loads((tmp_path / found["file"]).read_text())
    assert table["method"]["space"]["kind"] == "mapo"
    assert table["eval"]["target_accuracy"] == pytest.approx(float(plan[-1]))
    code, out, err = thinwire(*plan, "--runs", "runs/frontier/digits.json")
    assert code == 0, err
    assert out.rstrip().endswith("thinwire run runs/frontier/plan-digits.toml")
    assert "measured, 2 seeds" in out
    assert thinwire("run", "runs/frontier/plan-digits.toml", "-q", "--out", "planned")[0] == 0
    assert json.loads((tmp_path / "planned/summary.json").read_text())["rounds"] <= 10
    code, out, err = thinwire(*plan[:-1], "0.999")
    assert (code, out) == (1, "")
    assert err.startswith("thinwire: none of 2 methods is expected to do an accuracy of 99.90 %")
    assert err.count("\n") == 1


def test_a_page_goes_on_from_the_runs_of_its_json_file(thinwire, tmp_path):
    """Search and first seed in one folder, the second seed in an empty one, the page from the JSON file alone."""
    words = ("frontier", "fedavg", "--on", "digits", *SMALL, "--rounds", "2", "--rates", "2", "--md", "page.md", "-q")
    file = tmp_path / "page.json"
    assert thinwire(*words, "--seeds", "1", "--out", "one")[0] == 0
    first = Archive.read(file).runs
    assert sorted(run["seed"] for run in first.values()) == [0, SEARCH_SEED, SEARCH_SEED]
    assert all(run["date"] and run["digest"].startswith(name) for name, run in first.items())
    assert thinwire(*words, "--seeds", "2", "--out", "two")[0] == 0
    (folder,) = (tmp_path / "two").glob("*/summary.json")
    assert "-s1-" in folder.parent.name, "only the missing run"
    both, page = file.read_text(), (tmp_path / "page.md").read_text()
    assert Archive.read(file).runs.items() >= first.items()
    assert re.search(r"^\| fedavg \|.*\| 0 1 \|.*\| 1 \| yes \|", page, re.M)
    assert re.search(r"^Made on 20.* \(4 runs\)", page, re.M)
    assert thinwire(*words, "--seeds", "2", "--out", "gone")[0] == 0
    assert (file.read_text(), (tmp_path / "page.md").read_text()) == (both, page)
    assert not (tmp_path / "gone").exists()
    assert thinwire(*words, "--seeds", "1", "--out", "gone", "--no-run")[0] == 0
    left = [run for name, run in Archive.read(file).runs.items() if name not in first]
    assert [(run["seed"], run["tables"]) for run in left] == [(1, [])], "a run that the page no longer shows stays"


def test_plan_runs_a_pilot_where_there_are_no_runs(thinwire, tmp_path):
    words = ("plan", "fedavg", "thin", "--on", "digits", *SMALL, "--rounds", "16", "--pilot", "0.25", "-q")
    code, out, err = thinwire(*words, "--budget", "1MB")
    assert code == 0, err
    assert "from a pilot of 2 methods" in out
    assert len(list((tmp_path / "runs/frontier/pilot").glob("*/summary.json"))) == 4
    assert (tmp_path / "runs/frontier/plan-digits.toml").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--on", "digits"), "give a target or a budget: --target 0.84, or --budget 5MB"),
        (("plan", "--on", "digits", "--target", "84"), "target must be an accuracy between 0 and 1, not 84"),
        (("plan", "--on", "digits", "--budget", "much"), "a number of bytes is written as 500MB"),
        (("plan", "--on", "digits", "--target", "0.5", "--pilot", "0.01"), "the pilot needs 2 rounds or more"),
        (("plan", "--on", "digits", "--target", "0.5", "--runs", "none.json"), "none.json"),
        (("frontier", "fedavgg", "--on", "digits"), "unknown method 'fedavgg': did you mean 'fedavg'"),
        (("frontier", "thin", "thin", "--on", "digits"), "thin is given twice; write it once"),
        (("frontier", "thin", "--on", "digits", "--share", "2"), "share must be above 0 and at most 1"),
        (("frontier", "thin", "--on", "digits", "--budget", "long"), "a duration is written as 30m"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, message, thinwire, tmp_path):
    code, out, err = thinwire(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_task_without_accuracy_is_refused(tmp_path):
    (tmp_path / "mine.csv").write_text("a,b,y\n" + "".join(f"{i},{i * 2},{i * 0.3}\n" for i in range(60)))
    where = Where(str(tmp_path / "mine.csv"), changes=("task.target=y", "task.clients=2", "cohort.size=2"))
    with pytest.raises(ConfigError, match="a frontier compares accuracies on a test set, which"):
        frontier_grid(rows_of(["fedavg"]), where, Work())
