"""Tables that are really made: from runs, from counts, from nothing yet; killed and gone on with."""

import json
import os
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from thinwire.experiments.check import check
from thinwire.experiments.execute import default_folder
from thinwire.experiments.grid import Grid, run_grids, summary
from thinwire.experiments.link_time import link, round_seconds
from thinwire.experiments.presets import presets
from thinwire.experiments.repro import SCALES, Reproduction, load
from thinwire.reports.measures import cost, measured
from thinwire.reports.repro_page import section, write_page

DATA = Path(os.environ.get("THINWIRE_DATA", "no data"))
SMALL = [
    "task.clients=400",
    "task.participating_clients=2",
    "cohort.size=2",
    "rounds=1",
    "local.steps=1",
    "task.validation_fraction=0.1",
]

SETTINGS = {"task.clients": 8, "cohort.size": 2, "local.steps": 2, "engine.backend": "loop", "eval.every": 2}
ROWS = [
    {"method": "fedavg", "over": {"method.client_opt.lr": [1e-6, 0.1]}, "published": 90.0, "traffic": 100},
    {"method": "topk", "over": {"method.client_opt.lr": [0.1]}, "published": 80.0, "traffic": 10},
]


def small(measure: str = "best_accuracy") -> Reproduction:
    """A table of two methods on the digits that are always at hand."""
    content = {
        "paper": "FLASC, Table 9",
        "about": "a test",
        "on": "digits",
        "rounds": 6,
        "seeds": [0, 1],
        "tune": {"seeds": [100], "share": 0.5},
        "set": SETTINGS,
        "cost": "bytes_up",
        "columns": [{"name": "digits, 8"}],
    }
    rows = [{**row, "label": row["method"], "column": "digits, 8", "measure": measure} for row in ROWS]
    return Reproduction("flasc-9", "gpu", content, Grid({**content, "rows": rows}))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run_grids([small().grid], out)
    return out


def test_the_page_says_what_the_runs_say(made, tmp_path) -> None:
    found = small()
    page = tmp_path / "page.md"
    write_page(page, [section(found, made, "page"), section(small("rounds to 0.2"), made, "page")])
    text, runs = page.read_text(), json.loads(page.with_suffix(".json").read_text())
    assert len(runs) == 2 + 4
    for line in found.grid.final(made):
        mine = [runs[e.digest()[:8]] for e in line.runs]
        mean = statistics.fmean(one["values"]["best accuracy %"] for one in mine)
        assert f"| {line.label} | lr {line.chosen['method.client_opt.lr']:g} | {mean:.2f} ± " in text
        paper = found.grid.content["rows"][line.row]["published"]
        assert f"| {paper:g} | {mean - paper:+.2f} | 0 1 |" in text
        for e, one in zip(line.runs, mine, strict=True):
            s = summary(e, made)
            assert one["curve"][-1] == [6, s["bytes_total_honest"], s["final_accuracy"]]
            assert [number for number, _, _ in one["curve"]] == [2, 4, 6]
            assert "rounds to 0.2" in one["values"]
    assert "`thinwire repro flasc-9 --scale gpu` makes this table" in text
    assert "| fedavg | lr 1e-06: " in text, "what was tried"
    assert "| lr 0.1 | lr |" in text, "the best rate was the largest that was tried"
    pictures = list((tmp_path / "page").glob("*.svg"))
    assert [file.name for file in pictures] == ["flasc-9-digits-8.svg"]
    assert "](page/flasc-9-digits-8.svg)" in text
    words = " ".join(ElementTree.fromstring(pictures[0].read_text()).itertext())
    assert "fedavg" in words
    assert "topk" in words


def test_what_papers_call_cost(made) -> None:
    first, thin = column = small().grid.final(made)
    assert cost("bytes_up", first, column, made) == 100
    up = [summary(line.runs[0], made)["bytes_up"] for line in column]
    assert cost("bytes_up", thin, column, made) == pytest.approx(100 * up[1] / up[0], rel=0.05)
    assert cost("to_worst", first, column, made) == 100
    assert cost("numbers", thin, column, made) == 100
    honest = summary(first.runs[0], made)
    assert cost("gigabytes", first, column, made) <= honest["bytes_total_honest"] / 1e9
    assert cost("gigabytes", first, column, made / "nothing") is None


def test_measures_other_than_accuracy(made) -> None:
    run = small().grid.final(made)[0].runs[0]
    s = summary(run, made)
    weights = 4 * s["parameters"] / 1e6
    assert 2 * weights < measured("MB a round", run, made) < 2.1 * weights, "all of them up, all of them down"
    least = round_seconds(link("2 Mbps"), 0.0, bytes_up=1e6 * weights, bytes_down=1e6 * weights)
    assert measured("seconds a round at 2 Mbps", run, made) > least
    assert measured("rounds to 0.01", run, made) == 2
    assert 0 < measured("minutes to 0.01 at 2 Mbps", run, made) < measured("seconds a round at 2 Mbps", run, made) / 10
    assert measured("rounds to 0.999", run, made) is None
    assert measured("best_accuracy", run, made / "nothing") is None


def test_a_killed_table_goes_on_and_says_how_long(made, tmp_path) -> None:
    """Only what is missing runs again, and time is told from the first run on, of the final runs too."""
    run = small().grid.final(made)[0].runs[0]
    folder = default_folder(run, made)
    whole = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    assert section(small(), made).missing == 1
    told = []
    run_grids([small().grid], made, on_run=told.append)
    assert [(p.done, p.todo, p.name) for p in told] == [(1, 1, folder.name)]
    run_grids([small("rounds to 0.2").grid], made, on_run=told.append)
    assert len(told) == 1, "another table of the same runs"
    assert json.loads((folder / "summary.json").read_text())["final_accuracy"] == json.loads(whole)["final_accuracy"]
    run_grids([small().grid], tmp_path, on_run=told.append)
    lefts = [p.seconds_left for p in told[1:]]
    assert lefts[1] > 0, "the last run of the search: those of the table are still to come"
    assert lefts[-1] == 0


def test_a_table_without_training() -> None:
    text = section(load("fedpara-1"), Path("nowhere")).text
    assert "| linear, FedPara | 16,384 | 16 K | +2.4 | 256 | 256 | +0.0 |" in text
    assert "| linear, low rank | 16,384 | 16 K | +2.4 | 32 | 32 | +0.0 |" in text


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="THINWIRE_DATA names no folder with MNIST")
def test_a_printed_table_is_made(tmp_path: Path) -> None:
    found = load("pfedpara-3", "quick", changes=SMALL)
    assert section(found, tmp_path).missing == 4
    run_grids([found.grid], tmp_path, data_dir=DATA)
    part = section(found, tmp_path)
    assert part.missing == 0
    for digest, numbers in part.runs.items():
        assert f"{numbers['values']['final own accuracy %']:.2f}" in part.text
        assert digest in part.text


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="THINWIRE_DATA names no folder")
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", presets("repro"))
def test_every_run_of_every_table_could_run(name, scale) -> None:
    grid = load(name, scale).grid
    firsts = [{key: values[0] for key, values in row.get("over", {}).items()} for row in grid.content["rows"]]
    ready = {e.digest(): e for i, chosen in enumerate(firsts) for e in grid.line(i, chosen, [0]).runs}
    for experiment in ready.values():
        assert check(experiment, DATA)["trainable"] > 0
