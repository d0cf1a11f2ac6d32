"""Grids: the search, the final lines, and that no run is repeated."""

import json
import math
import time
from pathlib import Path

import pytest

import papers.runs
from papers.grid import Grid, broken, metrics, score, status, summary, to_target, training_failed
from papers.grid_page import load_grid
from papers.markdown import widened
from papers.runs import Progress, run_grids
from papers.tables import FOLDER
from thinwire.errors import ThinwireError
from thinwire.runs import jobs
from thinwire.runs.config import digest, to_table
from thinwire.runs.execute import default_folder
from thinwire.runs.jobs import run_one
from thinwire.runs.run_directory import RunFolder

CONTENT = {
    "on": "digits",
    "rounds": 4,
    "seeds": [0, 1],
    "tune": {"seeds": [100], "share": 0.5, "by": "final_accuracy"},
    "set": {"task.clients": 4, "cohort.size": 2, "local.epochs": 1, "engine.backend": "loop"},
    "rows": [{"method": "fedavg", "over": {"method.client_opt.lr": [1e-6, 0.1]}}, {"method": "local", "rounds": 2}],
}


def test_the_best_of_a_search_is_run_on_other_seeds_and_no_run_is_repeated(tmp_path: Path) -> None:
    grid, progress = Grid(CONTENT), []
    run_grids([grid], tmp_path, on_run=progress.append)
    assert [line.chosen for line in grid.final(tmp_path)] == [{"method.client_opt.lr": 0.1}, {}]
    assert {e.seed for line in grid.final(tmp_path) for e in line.runs} == {0, 1}
    assert [len(line.runs) for line in grid.trials()] == [1, 1], "a row with one combination needs no search"
    assert all(summary(e, tmp_path)["rounds"] == 2 for line in grid.trials() for e in line.runs)
    counts = [(i + 1, 2, "") for i in range(2)] + [(i + 1, 4, "") for i in range(4)]
    assert [(p.done, p.todo, p.trouble) for p in progress] == counts
    assert progress[-1].seconds_left == 0
    run_grids([grid], tmp_path, on_run=progress.append)
    assert len(progress) == 6


def test_a_search_can_use_validation_examples_of_clients(tmp_path: Path) -> None:
    tune = {"seeds": [100], "share": 0.5, "validation_fraction": 0.2}
    grid = Grid({**CONTENT, "tune": tune, "seeds": [0], "rows": CONTENT["rows"][:1]})
    run_grids([grid], tmp_path)
    assert grid.by(0) == "best_client_accuracy"
    for line in grid.trials():
        found = summary(line.runs[0], tmp_path)
        assert score(line, tmp_path, grid.by(0)) == found["best_client_accuracy"] != found["best_accuracy"]
    assert [e.task.validation_fraction for line in grid.final(tmp_path) for e in line.runs] == [0.0], (
        "the final runs train on all examples"
    )


def test_killed_runs_continue_and_failed_runs_do_not_stop_others(tmp_path: Path) -> None:
    rows = [{"method": "fedavg", "set": {"method.client_opt.lr": 1e30}}, {"method": "fedavg"}]
    grid, progress = Grid({**CONTENT, "tune": {}, "seeds": [0], "rows": rows}), list[Progress]()
    run_grids([grid], tmp_path, on_run=progress.append)
    assert "learning rate" in progress[0].trouble
    assert not progress[1].trouble
    folder = default_folder(grid.lines()[1].runs[0], tmp_path)
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()  # as if killed before the end
    run_grids([grid], tmp_path, on_run=progress.append)
    after = json.loads((folder / "summary.json").read_text())
    assert after["final_accuracy"] == before["final_accuracy"]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_end_at_their_target_and_parallel_runs_are_equal(tmp_path: Path, count: int) -> None:
    rows = [{"method": "fedavg", "set": {"eval.target_accuracy": 0.3}}]
    grid = Grid({**CONTENT, "tune": {}, "rounds": 12, "rows": rows})
    run_grids([grid], tmp_path / "one")
    run_grids([grid], tmp_path / "two", jobs=count)
    for e in grid.lines()[0].runs:
        one, two = (summary(e, tmp_path / name) for name in ("one", "two"))
        assert one["rounds"] < 12
        assert one["final_accuracy"] >= 0.3
        assert (one["final_accuracy"], one["bytes_total"]) == (two["final_accuracy"], two["bytes_total"])
        assert to_target(e, tmp_path / "one", 0.3)[0] == one["rounds"]
        assert to_target(e, tmp_path / "one", 0.99) is None


def test_a_diverged_run_is_replaced_by_the_next_best_and_not_repeated(tmp_path: Path) -> None:
    rows = [{"method": "fedavg", "over": {"method.client_opt.lr": [0.01, 0.1]}}]
    grid, progress = Grid({**CONTENT, "seeds": [0], "rows": rows}), list[Progress]()
    best = grid.line(0, {"method.client_opt.lr": 0.1})
    folder = RunFolder(default_folder(best.runs[0], tmp_path), to_table(best.runs[0]))
    folder.path.mkdir()
    folder.create()
    sent = dict.fromkeys(("bytes_up", "bytes_down", "bytes_catchup"), 0)
    why = "round 3: the training loss is nan"
    folder.finish({"rounds": 2, "status": "diverged", "status_why": why, **sent}, {})
    run_grids([grid], tmp_path, on_run=progress.append)
    assert [line.chosen for line in grid.final(tmp_path)] == [{"method.client_opt.lr": 0.01}]
    assert broken(best, tmp_path) == [0]
    assert len(progress) == 3
    diverging = Grid(
        {**CONTENT, "tune": {}, "seeds": [0], "rows": [{"method": "fedavg", "set": {"method.client_opt.lr": 1e30}}]}
    )
    run_grids([diverging], tmp_path, on_run=progress.append)
    run_grids([diverging], tmp_path, on_run=progress.append)
    assert broken(diverging.lines()[0], tmp_path) == [0]
    assert status(diverging.lines()[0].runs[0], tmp_path) == "diverged"
    assert len(progress) == 4


def test_a_search_can_use_the_mean_of_the_last_evaluations(tmp_path: Path) -> None:
    tune = {"seeds": [100], "by": "mean of the last 2"}
    grid = Grid({**CONTENT, "tune": tune, "seeds": [0], "rows": CONTENT["rows"][:1]})
    run_grids([grid], tmp_path)
    for line in grid.trials():
        known = [record["accuracy"] for record in metrics(line.runs[0], tmp_path)]
        assert len(known) == 4
        assert score(line, tmp_path, grid.by(0)) == sum(known[-2:]) / 2
    assert [line.chosen for line in grid.final(tmp_path)] == [{"method.client_opt.lr": 0.1}]


class Clock:
    """A clock that is advanced by hand; takes the place of the module `time`."""

    now = 0.0
    perf_counter = staticmethod(time.perf_counter)

    def time(self) -> float:
        return self.now


def test_a_budget_is_spent_seed_by_seed_and_the_next_call_goes_on(tmp_path: Path, monkeypatch) -> None:
    rows = [{"method": "fedavg"}, {"method": "local"}]
    grids = [Grid({**CONTENT, "tune": {}, "rows": rows, "on": "digits"}), Grid({**CONTENT, "tune": {}, "seeds": [7]})]
    clock, ended = Clock(), list[Progress]()
    for module in (papers.runs, jobs):
        monkeypatch.setattr(module, "time", clock)

    def count(progress: Progress) -> None:
        ended.append(progress)
        clock.now += 1.0

    run_grids(grids, tmp_path, on_run=count, budget=2.5)
    names = [progress.name.rsplit("-", 1)[0] for progress in ended]
    assert names == ["fedavg-digits-s0", "local-digits-s0", "fedavg-digits-s1"], "each row on the first seed first"
    run_grids(grids, tmp_path, on_run=count, budget=1000.0)
    assert [one.name.rsplit("-", 1)[0] for one in ended[3:]][:1] == ["local-digits-s1"]
    assert all(summary(e, tmp_path) for grid in grids for line in grid.final(tmp_path) for e in line.runs)


def test_a_run_that_the_budget_interrupts_is_continued_to_the_same_result(tmp_path: Path, monkeypatch) -> None:
    experiment = Grid({**CONTENT, "tune": {}, "rows": [{"method": "fedavg"}]}).lines()[0].runs[0]
    clock = Clock()
    for module in (papers.runs, jobs):
        monkeypatch.setattr(module, "time", clock)
    asked = iter(range(100))

    def time_passes() -> float:  # before the run, then after each of its rounds
        return float(next(asked))

    monkeypatch.setattr(clock, "time", time_passes)
    with pytest.raises(ThinwireError, match="the budget is spent"):
        run_one(experiment, tmp_path, until=2.5)
    assert summary(experiment, tmp_path) is None
    assert RunFolder.open(default_folder(experiment, tmp_path)).history()[-1].round < experiment.rounds
    monkeypatch.undo()
    run_one(experiment, tmp_path)
    run_one(experiment, tmp_path / "whole")
    assert _accuracies(experiment, tmp_path) == _accuracies(experiment, tmp_path / "whole")


def _accuracies(experiment, out: Path) -> list[float | None]:
    return [record["accuracy"] for record in metrics(experiment, out)]


def test_a_grid_replaces_a_run_at_chance_by_the_next_best(tmp_path):
    rows = [{"method": "fedavg", "over": {"method.client_opt.lr": [0.05, 1000.0]}}]
    settings = {"task.clients": 4, "cohort.size": 2, "local.epochs": 1, "engine.backend": "loop"}
    tune = {"seeds": [100], "by": "best_accuracy"}
    grid = Grid({"on": "digits", "rounds": 3, "seeds": [0], "tune": tune, "set": settings, "rows": rows})
    run_grids([grid], tmp_path)
    low, high = grid.trials()
    assert score(high, tmp_path, "best_accuracy") == 0.0
    assert score(high, tmp_path, "bytes to 0.01") == -math.inf
    assert summary(high.runs[0], tmp_path)["best_accuracy"] > 0
    assert training_failed(high.runs[0], tmp_path)
    assert [line.chosen for line in grid.final(tmp_path)] == [low.chosen]
    # a learning rate that fails only on the seeds of the table
    path = default_folder(grid.final(tmp_path)[0].runs[0], tmp_path)
    written = json.loads((path / "summary.json").read_text())
    (path / "SHA256SUMS").unlink()
    (path / "summary.json").write_text(json.dumps({**written, "status": "collapsed"}))
    assert broken(grid.line(0, low.chosen), tmp_path) == [0]
    assert [line.chosen for line in grid.final(tmp_path)] == [high.chosen], "the next best replaces it"


def test_a_search_goes_on_beyond_an_edge_until_its_best_value_is_inside(tmp_path):
    """Both rates of either row are too small, or too large and failing; values beyond are tried until one is worse."""
    rows = [{"method": "fedavg", "over": {"method.client_opt.lr": rates}} for rates in ([0.001, 0.01], [100.0, 1000.0])]
    settings = {"task.clients": 4, "cohort.size": 2, "local.epochs": 1, "engine.backend": "loop"}
    tune = {"seeds": [100], "extend": 8}
    grid = Grid({"on": "digits", "rounds": 3, "seeds": [0], "tune": tune, "set": settings, "rows": rows})
    run_grids([grid], tmp_path)
    for number in (0, 1):
        tried = [line.chosen["method.client_opt.lr"] for line in grid.trials(tmp_path) if line.row == number]
        chosen = grid.final(tmp_path)[number].chosen["method.client_opt.lr"]
        assert min(tried) < chosen < max(tried)
        assert 0.01 < chosen < 100
    assert len(grid.trials()) == 4


def test_tables_show_the_share_of_b_that_is_left():
    runs = [[{"final_accuracy": 0.1, "nonzero_b": share}] for share in (0.0, 0.25)]
    head, rows = ["method", "our final accuracy %", "runs"], [["a", "1", "x"], ["b", "2", "y"]]
    heads, cells = widened(head, rows, runs)
    assert [row[heads.index("% of B left")] for row in cells] == ["0.00", "25.00"]
    assert "% of B left" not in widened(head, rows, [[{"final_accuracy": 0.1}]] * 2)[0]


# -- published grids ---------------------------------------------------------------------------------------------------


def test_the_page_of_a_grid_is_written_from_the_runs_of_its_json_file(papers, tmp_path):
    docs, name = FOLDER.parent / "docs/results", "recipe-cifar10"
    (tmp_path / f"{name}.json").write_text((docs / f"{name}.json").read_text())
    words = ("grid", name, "--device", "cuda", "--no-run", "--out", "runs", "--docs", ".")
    assert papers(*words)[0] == 0
    for kind in ("md", "json"):
        assert (tmp_path / f"{name}.{kind}").read_text() == (docs / f"{name}.{kind}").read_text()
    (tmp_path / f"{name}.json").write_text("{}")  # without it there are no runs
    assert "did not finish" in papers(*words)[1]


def test_published_grids_resolve_to_the_runs_they_were_made_of():
    """Digests of the first values of each row with the recipe `paper`, without the setting that was added since."""
    known = json.loads((Path(__file__).parent / "old_tables.json").read_text())
    for name, lines in known.items():
        found, grid = [], load_grid(name)
        for number, row in enumerate(grid.content["rows"]):
            first = {key: values[0] for key, values in row.get("over", {}).items()}
            table = to_table(grid.line(number, first, [0]).runs[0])
            if table["method"]["space"].get("scale") == "unit":
                del table["method"]["space"]["scale"]
            found.append(f"{row.get('label', row['method'])}: {digest(table)}")
        assert found == lines, name
