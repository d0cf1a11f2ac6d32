"""Runs that lose what they learned, or never learn anything: judged by curves, and by real runs on digits."""

import json
import math
import sys
import warnings

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.cli.app import main
from thinwire.errors import Diverged
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import chance_among, chance_of
from thinwire.experiments.collapse import Chance, Course, judge, known_verdict, news
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.grid import Grid, broke_down, broken, run_grids, score, status, summary
from thinwire.experiments.records import read_run
from thinwire.experiments.watch import follow
from thinwire.simulation.engine import LocalEngine

TEN = Chance(share=0.1, examples=10_000, classes=10)
FAST = {"cohort.size": 4, "local.epochs": 1, "engine.backend": "loop"}


def curve(*accuracies, every=1, **more):
    return [{"round": every * (i + 1), "loss": 1.0, "accuracy": a, **more} for i, a in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("records", "chance", "status", "number"),
    [
        (curve(0.2, 0.5, 0.52, 0.1, 0.1, every=20), TEN, "collapsed", 80),  # as FedPara's published runs
        (curve(*[0.1] * 10), TEN, "at chance", 10),
        (curve(*[0.1] * 9), TEN, "finished", None),  # too short to tell
        (curve(0.1, 0.12, 0.3, 0.1, 0.6, every=10), TEN, "finished", None),  # it dipped, and came back
        (curve(0.1, 0.11, 0.12, every=10), TEN, "finished", None),  # slow, but above chance
        (curve(0.1, 0.15, 0.1, every=10), TEN, "at chance", 30),  # a blip is no learning
        (curve(0.1, 0.1, test_loss=500.0), TEN, "at chance", 2),  # no slow start has such a loss
        (curve(0.1, 0.1, test_loss=5.0), TEN, "finished", None),
        (curve(None, None, 0.9, None), TEN, "finished", None),
        (curve(*[None] * 30), TEN, "finished", None),  # never tested
        (curve(*[0.05] * 30), None, "finished", None),  # regression, personal models: no accuracy can tell
        (curve(*[0.0115] * 30), Chance(0.01, 10_000, 100), "at chance", 30),
        (curve(*[0.02] * 30), Chance(0.01, 10_000, 100), "finished", None),  # many classes: 2 % are twice chance
        (curve(*[0.5] * 30), Chance(0.51, 800, 2), "at chance", 30),
        (curve(*[0.6] * 30), Chance(0.5, 20, 2), "finished", None),  # few examples do not hide what was learned
        (curve(*[0.95] * 30), Chance(0.9, 100, 2), "finished", None),
        (curve(0.3, 0.6, 0.2, 0.4), Chance(0.4, 12, 3), "finished", None),  # luck on twelve examples is no learning
        (curve(0.3, 1.0, 0.2), Chance(0.4, 12, 3), "collapsed", 3),
        (curve(0.8, math.nan), TEN, "finished", None),
        ([*curve(0.8), {"round": 2, "loss": math.nan, "accuracy": 0.8}], TEN, "diverged", 2),
        (curve(0.8, 0.8, test_loss=math.inf), TEN, "diverged", 1),
        (curve(0.8, 0.8, test_loss=math.inf), None, "diverged", 1),
        ([], TEN, "finished", None),
    ],
)
def test_curves_and_their_verdicts(records, chance, status, number):
    assert judge(records, chance)[:2] == (status, number)


def test_a_personal_method_is_judged_by_its_own_accuracy():
    home = Chance(0.5, 400, 10, "client_accuracy")
    good = [{**line, "client_accuracy": 0.9} for line in curve(*[0.1] * 20)]
    assert judge(good, home).status == "finished"
    lost = [*good, {"round": 21, "accuracy": 0.1, "client_accuracy": 0.5}]
    assert judge(lost, home)[:2] == ("collapsed", 21)
    assert "own accuracy 50.00 %" in judge(lost, home).why


def test_news_come_once_with_the_round_that_brings_them():
    course, told = Course(TEN), {}
    for record in curve(0.4, 0.1, 0.1, 0.4, 0.1):
        before, course = course, course.after(record)
        told[record["round"]] = news(before, course)
    assert told[1] is told[3] is None
    assert told[2].startswith("collapsed: accuracy 10.00 % is back at chance (10.00 % by a constant answer)")
    assert told[4] == "above chance again"
    assert "since round 5; 40.00 % in round 1" in told[5]


def test_chance_comes_from_the_test_set():
    assert chance_among(torch.tensor([[0, 1], [1, -100]])) == Chance(2 / 3, 3, 2)
    assert chance_among(torch.tensor([0.5, 1.0])) is None
    assert chance_among(torch.tensor([3, 3])) is None
    job = build_job(resolve("fedavg", "digits", FAST))
    counts = torch.bincount(job.task.test.targets)
    found = chance_of(LocalEngine().prepare(job))
    assert (found.share, found.examples, found.classes) == (int(counts.max()) / int(counts.sum()), 359, 10)
    assert chance_of(LocalEngine().prepare(build_job(resolve("local", "digits", FAST)))) is None
    own = chance_of(
        LocalEngine().prepare(build_job(resolve("local", "digits", {**FAST, "task.validation_fraction": 0.2})))
    )
    assert own.metric == "client_accuracy"
    assert found.share < own.share < 0.8


@pytest.fixture
def thinwire(monkeypatch, capsys, tmp_path):
    """Call the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["thinwire", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


WILD = ("--set", "method.client_opt.lr=1000", "--set", "local.epochs=1", "--cohort", "4")


def test_a_rate_of_a_thousand_on_digits_does_not_pass_in_silence(thinwire, tmp_path):
    code, out, err = thinwire("run", "fedavg", *WILD, "--rounds", "4", "--out", "run", "--json")
    told = json.loads(out)
    assert code == 3
    assert told["status"] == json.loads((tmp_path / "run/summary.json").read_text())["status"] == "at chance"
    assert told["chance_accuracy"] == pytest.approx(37 / 359)
    assert "round 1/4  at chance: accuracy" in err, "as it happens"
    last = err.splitlines()[-1]
    assert last.startswith("thinwire: run at chance: accuracy ")
    assert "not above chance (10.31 % by a constant answer)" in last
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["alarm"].startswith("at chance: ")
    assert "at chance: accuracy" in thinwire("watch", "run", "--once")[1]
    code, out, _ = thinwire("run", "fedavg", *WILD, "--rounds", "4", "--out", "run", "-q")
    assert code == 3, "a finished run says so again"
    assert "at chance" in out


def test_a_rate_that_grows_until_nothing_is_left_is_told_as_it_happens(thinwire, tmp_path):
    rate = (
        "--set",
        'method.lr_schedule={kind="warmup", rounds=100}',
        "--set",
        "method.client_opt.lr=40",
    )  # 0.4, 0.8, 1.2, ...
    code, out, err = thinwire("run", "fedavg", *rate, "--set", "local.epochs=1", "--rounds", "16", "--out", "run")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert (code, found["status"]) == (3, "collapsed")
    assert found["final_accuracy"] < 0.14 < 0.2 < found["best_accuracy"]
    assert f"round {found['status_round']}/16  collapsed: accuracy" in err
    assert "final accuracy" in out
    assert "best accuracy" in out


def test_a_comparison_marks_what_broke_down_and_goes_on(thinwire, tmp_path):
    words = ("compare", "fedavg", "fedprox", "--rounds", "4", "--set", "method.client_opt.lr=1000", *WILD[2:], "-q")
    code, out, err = thinwire(*words)
    assert code == 3
    assert "1 of 1 at chance" in out
    assert "1 of 1 diverged" in out
    assert err.count(" at chance: accuracy ") == 1
    assert err.count(" diverged: round ") == 1
    page = (tmp_path / "runs/compare.html").read_text()
    assert "Note: fedavg, seed 0, at chance: accuracy " in page
    assert "<td>1 of 1 at chance</td>" in page
    assert "Cheapest way" not in page, "what it reached is lost again"
    rows = json.loads(thinwire(*words, "--json")[1])
    assert [row["broken"] for row in rows] == ["1 of 1 at chance", "1 of 1 diverged"]


def test_a_diverged_run_has_a_summary_and_is_not_run_again(tmp_path):
    experiment = resolve("fedavg", "digits", {**FAST, "rounds": 3, "method.client_opt.lr": 1e30})
    path = default_folder(experiment, tmp_path)
    with pytest.raises(Diverged, match="round 1") as first:
        execute(experiment, path)
    found = json.loads((path / "summary.json").read_text())
    assert (found["status"], found["status_round"], found["status_why"]) == ("diverged", 1, str(first.value))
    assert found["rounds"] == 0
    with pytest.raises(Diverged, match="found before"):
        execute(experiment, path, resume=True)
    with pytest.raises(Diverged, match="round 1"):
        execute(experiment, path, again=True)
    assert summary(experiment, tmp_path) is None
    assert status(experiment, tmp_path) == "diverged"
    assert read_run(path).verdict.status == "diverged"
    assert [now.state for now in follow(path, 0.05)] == ["finished"], "whoever watches it is not kept waiting"


def test_a_grid_counts_a_run_at_chance_as_broken_and_takes_the_next_best(tmp_path):
    rows = [{"method": "fedavg", "over": {"method.client_opt.lr": [0.05, 1000.0]}}]
    settings = {"task.clients": 4, "cohort.size": 2, "local.epochs": 1, "engine.backend": "loop"}
    tune = {"seeds": [100], "by": "best_accuracy"}
    grid = Grid({"on": "digits", "rounds": 3, "seeds": [0], "tune": tune, "set": settings, "rows": rows})
    run_grids([grid], tmp_path)
    slow, wild = grid.trials()
    assert score(wild, tmp_path, "best_accuracy") == 0.0
    assert score(wild, tmp_path, "bytes to 0.01") == -math.inf
    assert summary(wild.runs[0], tmp_path)["best_accuracy"] > 0
    assert broke_down(wild.runs[0], tmp_path)
    assert [line.chosen for line in grid.final(tmp_path)] == [slow.chosen]
    # a rate that breaks down on the seeds of the table only, whatever its search said
    path = default_folder(grid.final(tmp_path)[0].runs[0], tmp_path)
    held = json.loads((path / "summary.json").read_text())
    (path / "SHA256SUMS").unlink()
    (path / "summary.json").write_text(json.dumps({**held, "status": "collapsed"}))
    assert broken(grid.line(0, slow.chosen), tmp_path) == [0]
    assert [line.chosen for line in grid.final(tmp_path)] == [wild.chosen], "the next best takes its place"


def test_a_script_is_warned_and_the_run_says_why():
    torch.manual_seed(0)
    clients = [(torch.randn(30, 4), torch.randint(0, 3, (30,))) for _ in range(2)]
    wild = tw.Method(client_opt=tw.SGD(1e4))
    test = torch.zeros(200, 4), 2 * (torch.arange(200) % 2)  # inputs that say nothing
    with pytest.warns(RuntimeWarning, match="round 1: at chance"):
        run = tw.simulate(nn.Linear(4, 3), clients, wild, rounds=2, test=test)
    assert run.status == "at chance"
    assert "not above chance" in run.why
    assert run.history[0].alarm
    few = tuple(half[:99] for half in test)
    assert tw.simulate(nn.Linear(4, 3), clients, wild, rounds=2, test=few).status == "finished", "too few to tell"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = tw.simulate(nn.Linear(4, 3), clients, tw.Method(client_opt=tw.SGD(0.1)), rounds=2, test=clients[0])
    assert (fine.status, fine.why) == ("finished", "")


def test_what_files_say_is_not_trusted(tmp_path, write_run):
    assert known_verdict({"status": "wonderful"}) is None
    assert known_verdict({"status": "collapsed", "status_round": "x", "status_why": 3}) == ("collapsed", None, "")
    path = write_run("odd", best=0.1, rounds=12)
    (path / "environment.json").write_text(json.dumps({"chance": {"share": 2.0, "examples": 5, "classes": 2}}))
    assert read_run(path).verdict.status == "finished"
    (path / "environment.json").write_text(json.dumps({"chance": TEN._asdict()}))
    assert read_run(path).verdict.status == "at chance", "a run of which only records are there"


@pytest.mark.parametrize(("density", "dead"), [(0.1, True), (0.75, False)])
def test_adapters_that_a_mask_has_left_dead_are_named(density, dead, tmp_path):
    """After a small first step all of B is smaller than A: a mask of the largest tenth leaves nothing of it."""
    small = {"task.clients": 4, "cohort.size": 2, "rounds": 2, "engine.backend": "loop"}
    chosen = {"method.mask.density": density, "method.server_opt.lr": 1e-4}
    total = execute(resolve("sparse-adapter", "digits", {**small, **chosen}), tmp_path / "run")
    assert total.get("dead_adapters", []) == (["fc1.weight", "head.weight"] if dead else [])
