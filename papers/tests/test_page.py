"""Reproduced tables: from runs, from counts, without runs, and continued after an interruption."""

import json
import os
import re
import shutil
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from papers.archive import Archive, Runs
from papers.figures import against_chart
from papers.grid import Grid, metrics, summary
from papers.measures import cost, measured
from papers.page import section, update_page, write_page
from papers.runs import run_grids
from papers.tables import Reproduction, load
from thinwire.errors import CheckpointError, ConfigError
from thinwire.runs.config import digest
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.link_time import seconds

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
    """A table of two methods on digits, which needs no download."""
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
def finished_runs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run_grids([small().grid], out)
    return out


def test_page_shows_the_values_of_its_runs(finished_runs, tmp_path) -> None:
    found = small()
    page = tmp_path / "page.md"
    write_page(page, [section(found, finished_runs, page), section(small("rounds to 0.2"), finished_runs, page)])
    text, runs = page.read_text(), json.loads(page.with_suffix(".json").read_text())["runs"]
    assert len(runs) == 2 + 4
    for line in found.grid.final(finished_runs):
        values = [runs[digest(e)[:8]] for e in line.runs]
        mean = statistics.fmean(one["values"]["best accuracy %"] for one in values)
        assert f"| {line.label} | lr {line.chosen['method.client_opt.lr']:g} | {mean:.2f} ± " in text
        paper = found.grid.content["rows"][line.row]["published"]
        assert f"| {paper:g} | {mean - paper:+.2f} | 0 1 |" in text
        for e, one in zip(line.runs, values, strict=True):
            s = summary(e, finished_runs)
            assert one["curve"][-1] == [6, s["bytes_total_honest"], s["final_accuracy"]]
            assert [number for number, _, _ in one["curve"]] == [2, 4, 6]
            assert "rounds to 0.2" in one["values"]
    assert "`python -m papers repro flasc-9 --scale gpu` makes this table" in text
    assert "| fedavg | lr 1e-06: " in text, "values tried"
    assert "| lr 0.1 | lr |" in text, "the best learning rate was the largest one tried"
    charts = list((tmp_path / "page").glob("*.svg"))
    assert [file.name for file in charts] == ["flasc-9-digits-8.svg"]
    assert "](page/flasc-9-digits-8.svg)" in text
    words = " ".join(ElementTree.fromstring(charts[0].read_text()).itertext())
    assert "fedavg" in words
    assert "topk" in words


def test_costs_as_papers_define_them(finished_runs) -> None:
    first, thin = column = small().grid.final(finished_runs)
    assert cost("bytes_up", first, column, finished_runs) == 100
    up = [summary(line.runs[0], finished_runs)["bytes_up"] for line in column]
    assert cost("bytes_up", thin, column, finished_runs) == pytest.approx(100 * up[1] / up[0], rel=0.05)
    assert cost("to_worst", first, column, finished_runs) == 100
    assert cost("numbers", thin, column, finished_runs) == 100
    honest = summary(first.runs[0], finished_runs)
    assert cost("gigabytes", first, column, finished_runs) <= honest["bytes_total_honest"] / 1e9 + 1e-9  # whole bytes
    assert cost("gigabytes", first, column, finished_runs / "nothing") is None


def test_measures_other_than_accuracy(finished_runs) -> None:
    run = small().grid.final(finished_runs)[0].runs[0]
    s = summary(run, finished_runs)
    weights = 4 * s["parameters"] / 1e6
    assert 2 * weights < measured("MB a round", run, finished_runs) < 2.1 * weights, "all weights up and down"
    line = {"clients": 1, "seconds": 0.0, "bytes_up": 1e6 * weights, "bytes_down": 1e6 * weights, "bytes_catchup": 0}
    least = seconds([line], "2 Mbps")
    assert measured("seconds a round at 2 Mbps", run, finished_runs) > least
    assert measured("rounds to 0.01", run, finished_runs) == 2
    assert (
        0
        < measured("minutes to 0.01 at 2 Mbps", run, finished_runs)
        < measured("seconds a round at 2 Mbps", run, finished_runs) / 10
    )
    assert measured("rounds to 0.999", run, finished_runs) is None
    assert measured("best_accuracy", run, finished_runs / "nothing") is None


def test_interrupted_table_continues_and_estimates_the_time_left(finished_runs, tmp_path) -> None:
    """Only missing runs are run; the estimate covers the final runs, from the first trial on."""
    run = small().grid.final(finished_runs)[0].runs[0]
    folder = default_folder(run, finished_runs)
    whole = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    assert section(small(), finished_runs).missing == 1
    progress = []
    run_grids([small().grid], finished_runs, on_run=progress.append)
    assert [(p.done, p.todo, p.name) for p in progress] == [(1, 1, folder.name)]
    run_grids([small("rounds to 0.2").grid], finished_runs, on_run=progress.append)
    assert len(progress) == 1, "another table with the same runs"
    assert json.loads((folder / "summary.json").read_text())["final_accuracy"] == json.loads(whole)["final_accuracy"]
    run_grids([small().grid], tmp_path, on_run=progress.append)
    lefts = [p.seconds_left for p in progress[1:]]
    assert lefts[1] > 0, "after the last trial, the runs of the table are left"
    assert lefts[-1] == 0


def test_table_without_training() -> None:
    text = section(load("fedpara-1"), Path("nowhere")).text
    assert "| linear, FedPara | 16,384 | 16 K | +2.4 | 256 | 256 | +0.0 |" in text
    assert "| linear, low rank | 16,384 | 16 K | +2.4 | 32 | 32 | +0.0 |" in text


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="THINWIRE_DATA names no folder with MNIST")
def test_published_table_is_reproduced(tmp_path: Path) -> None:
    found = load("pfedpara-3", "quick", changes=SMALL)
    assert section(found, tmp_path).missing == 4
    run_grids([found.grid], tmp_path, data_dir=DATA)
    part = section(found, tmp_path)
    assert part.missing == 0
    for name, values in part.runs.items():
        assert f"{values['values']['final client accuracy %']:.2f}" in part.text
        assert name in part.text


# -- the archive -----------------------------------------------------------------------------------------------------


def page_of(found, out, page, archive=None):
    """Write a page of one table; returns its text and its archive."""
    archive = archive or Archive()
    write_page(page, [section(found, Runs(out, archive), page)], archive)
    return page.read_text(), Archive.read(page.with_suffix(".json"))


def test_rows_stay_when_run_directories_are_gone(finished_runs, tmp_path) -> None:
    """From the archive alone the same page is written, chart included, and nothing is run again."""
    page = tmp_path / "page.md"
    text, archive = page_of(small(), finished_runs, page)
    chart = (tmp_path / "page/flasc-9-digits-8.svg").read_text()
    again, kept = page_of(small(), tmp_path / "gone", page, archive)
    assert again == text
    assert kept.text() == archive.text()
    assert (tmp_path / "page/flasc-9-digits-8.svg").read_text() == chart
    runs = Runs(tmp_path / "gone", archive)
    first, thin = column = small().grid.final(runs)
    for kind in ("bytes_up", "to_worst", "numbers", "gigabytes"):
        assert cost(kind, thin, column, runs) == cost(kind, thin, column, finished_runs)
    assert measured("rounds to 0.2", first.runs[0], runs) == measured("rounds to 0.2", first.runs[0], finished_runs)
    assert measured("MB a round", first.runs[0], runs) is None, "it was not in a table"
    started = []
    run_grids([small().grid], tmp_path / "gone", on_run=started.append, archive=archive)
    assert started == []
    assert not (tmp_path / "gone").exists()


def test_a_changed_table_shows_only_runs_with_its_settings(finished_runs, tmp_path) -> None:
    page = tmp_path / "page.md"
    _, archive = page_of(small(), finished_runs, page)
    changed = small()
    changed.grid.content["rows"][1]["set"] = {"local.batch": 7}
    text, kept = page_of(changed, tmp_path / "gone", page, archive)
    assert "| topk | lr 0.1 | - | - | - | 80 | - | none |" in text
    assert "2 runs did not finish" in text
    assert kept.runs.keys() == archive.runs.keys(), "runs of earlier settings are kept"
    assert {run["method"] for run in kept.runs.values() if not run["tables"]} == {"topk"}


def test_rows_of_different_days_stand_together_with_their_commits(finished_runs, tmp_path) -> None:
    page = tmp_path / "page.md"
    text, archive = page_of(small(), finished_runs, page)
    assert "| made |" not in text, "all runs are of one commit"
    assert re.search(r"Cost: 6 runs, .* of training on cpu .*, [\d.]+ [kM]B of messages\. Made on \d{4}-", text)
    for run in archive.runs.values():
        assert run["date"].startswith("20")
        assert run["seconds"] > 0
        if run["method"] == "topk":
            run |= {"commit": "0123456789ab", "date": "2020-02-02T00:00:00Z"}
    later, _ = page_of(small(), tmp_path / "gone", page, archive)
    assert re.search(r"^\| topk .* \| 2020-02-02, 0123456 \| [0-9a-f ]+ \|$", later, re.M)
    assert "Made on 2020-02-02, 0123456 (2 runs); 20" in later


def test_runs_that_diverged_are_kept_and_not_run_again(tmp_path) -> None:
    content = {**small().content, "tune": {}, "seeds": [0], "rounds": 2}
    row = {**ROWS[0], "label": "fedavg", "column": "digits, 8", "measure": "best_accuracy", "over": {}}
    row["set"] = {"method.client_opt.lr": 1e30, "method.norm_bound": 0.0}
    found = Reproduction("flasc-9", "gpu", content, Grid({**content, "rows": [row]}))
    run_grids([found.grid], tmp_path / "runs")
    text, archive = page_of(found, tmp_path / "runs", tmp_path / "page.md")
    assert "; 1 run diverged" in text
    assert [run["status"] for run in archive.runs.values()] == ["diverged"]
    again, _ = page_of(found, tmp_path / "gone", tmp_path / "page.md", archive)
    assert again == text
    run_grids([found.grid], tmp_path / "gone", archive=archive)
    assert not (tmp_path / "gone").exists()


def test_a_page_keeps_its_other_tables(tmp_path) -> None:
    page = tmp_path / "page.md"
    for name in ("fedpara-5", "fedpara-1"):
        update_page(page, [load(name)], tmp_path)
    text = page.read_text()
    assert text.index("## FedPara, Table 1:") < text.index("## FedPara, Table 5:")
    assert "**FLASC: Federated LoRA with Sparse Communication.** Not reproduced: " in text
    assert set(Archive.read(tmp_path / "page.json").tables) == {"fedpara-1", "fedpara-5"}


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"runs": {"a": 1}, "tables": {}}', '{"tables": {"a": {}}, "runs": {}}']
)
def test_damaged_archives_are_refused_in_one_line(content, tmp_path) -> None:
    (tmp_path / "page.json").write_text(content)
    with pytest.raises(CheckpointError) as error:
        update_page(tmp_path / "page.md", [], tmp_path)
    assert "page.json" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "page.md").exists()


def test_a_choice_of_the_search_that_was_not_run_is_named(finished_runs, tmp_path) -> None:
    found, out, page = small(), tmp_path / "runs", tmp_path / "page.md"
    shutil.copytree(finished_runs, out)
    chosen = found.grid.final(out)[0]
    for e in chosen.runs:
        shutil.rmtree(default_folder(e, out))
    one = {**found.grid.content["rows"][0], "over": {"method.client_opt.lr": [1e-6]}}
    run_grids([Grid({**found.content, "tune": {}, "rows": [one]})], out)
    write_page(page, [section(found, out, page)])
    assert "| lr 0.1, not run; the table has lr 1e-06 |" in page.read_text()


# -- figures -----------------------------------------------------------------------------------------------------------

FIGURE_SETTINGS = {"task.clients": 8, "cohort.size": 4, "local.steps": 4, "engine.backend": "loop", "eval.every": 1}


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """A figure of two points and a line on digits, with its runs."""
    rows = [
        {"method": "fedavg", "label": "FedAvg"},
        {"method": "topk-plain", "label": "1/2", "x": 0.5, "series": "top-k", "set": {"method.up.density": 0.5}},
        {"method": "topk-plain", "label": "1/8", "x": 0.125, "series": "top-k", "set": {"method.up.density": 0.125}},
    ]
    content = {
        "paper": "FLASC, Figure 99",
        "about": "a test",
        "on": "digits",
        "rounds": 4,
        "seeds": [0],
        "set": FIGURE_SETTINGS,
        "against": {"x": "density", "log": True},
        "columns": [{"name": "digits", "cost": "MB to 50 % of the first"}],
        "rows": rows,
    }
    cells = [{**row, "column": "digits", "measure": "final_accuracy", "published": 0, "traffic": 0} for row in rows]
    found = Reproduction("flasc-figure-99", "gpu", content, Grid({**content, "rows": cells}))
    out = tmp_path_factory.mktemp("runs")
    for line in found.grid.final(out):
        execute(line.runs[0], default_folder(line.runs[0], out))
    return found, out


def test_a_figure_is_drawn_against_the_number_of_its_rows(figure):
    found, out = figure
    part = section(found, out, Path("page.md"))
    assert list(part.figures) == ["flasc-figure-99-digits.svg"]
    assert "![Accuracy against density, digits](page/flasc-figure-99-digits.svg)" in part.text
    chart = ElementTree.fromstring(part.figures["flasc-figure-99-digits.svg"])
    texts = " ".join(chart.itertext())
    finals = {line.label: 100 * summary(line.runs[0], out)["final_accuracy"] for line in found.grid.final(out)}
    assert "top-k" in texts
    assert f"FedAvg {finals['FedAvg']:.2f}" in texts
    assert against_chart(found.content, "digits", "final accuracy %", {"FedAvg": [90.0], "1/2": [None]}) == ""


def test_the_cost_until_a_share_of_the_first_rows_accuracy(figure):
    found, out = figure
    lines = found.grid.final(out)
    goal = 0.5 * summary(lines[0].runs[0], out)["final_accuracy"]
    for line in lines:
        records, sent, up = metrics(line.runs[0], out), 0, 0
        for record in records:
            sent, up = sent + record["bytes_up"] + record["bytes_down"], up + record["bytes_up"]
            if record["accuracy"] >= goal:
                break
        assert record["accuracy"] >= goal
        assert cost("MB to 50 % of the first", line, lines, out) == pytest.approx(sent / 1e6)
        assert cost("MB up to 50 % of the first", line, lines, out) == pytest.approx(up / 1e6)
        assert cost("MB to 400 % of the first", line, lines, out) is None
    assert "cost as the paper counts, MB to 50 % of the first" in section(found, out).text
    with pytest.raises(ConfigError, match=r"cost must be one of bytes_up, .*, not 'MB to the first'"):
        cost("MB to the first", lines[0], lines, out)


def test_the_uploads_of_a_client_until_an_accuracy(figure):
    found, out = figure
    run = found.grid.final(out)[0].runs[0]
    rounds = measured("rounds to 0.5", run, out)
    records = metrics(run, out)[: int(rounds)]
    assert [record["accuracy"] >= 0.5 for record in records] == [False] * (len(records) - 1) + [True]
    assert measured("MB up a client to 0.5", run, out) == sum(r["bytes_up"] / r["clients"] for r in records) / 1e6
    assert measured("rounds to 0.5 of clients", run, out) is None, "its clients are not evaluated"


# -- the command line --------------------------------------------------------------------------------------------------


def test_verbs_list_and_reproduce_tables(papers, tmp_path, monkeypatch):
    code, out, _ = papers("list", "--json")
    listed = {row["paper"]: row for row in json.loads(out)}
    assert code == 0
    assert listed["FedLAMA, Table 4"]["name"] == "fedlama-4"
    assert listed["MAPA, Table 6"]["about"].startswith("not made: ")
    assert papers("repro", "fedpara-1", "--md", "page.md")[0] == 0
    assert "| linear, FedPara | 16,384 |" in (tmp_path / "page.md").read_text()
    monkeypatch.setenv("THINWIRE_DATA", str(tmp_path))
    code, out, err = papers("repro", "pfedpara-3", "-q")
    assert (code, err.count("\n")) == (1, 4), "a line for each run that did not finish, even if quiet"
    assert "4 runs did not finish" in out
    assert json.loads(papers("repro", "pfedpara-3", "--no-run", "--json")[1])["pfedpara-3"]["missing"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("repro", "mapo-33"), "did you mean 'mapo-3'"),
        (("repro", "fedpara-1", "--md", "/dev/null/x.md"), "File exists"),
        (("repro", "mapo-3", "--budget", "long"), "a duration is written as 30m"),
        (("frontier", "fedavgg", "--on", "digits"), "unknown method 'fedavgg': did you mean 'fedavg'"),
        (("frontier", "thin", "thin", "--on", "digits"), "thin is given twice; write it once"),
        (("frontier", "thin", "--on", "digits", "--share", "2"), "share must be above 0 and at most 1"),
        (("grid", "mapo"), "unknown grid 'mapo'"),
        (("fedlama-share", "nothing"), "nothing"),
        (("repro", "mapo-3", "--what"), "No such option: --what (see `python -m papers repro --help`)"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, message, papers, tmp_path):
    code, out, err = papers(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
