"""Runs that collapse, stay at chance or diverge: hand-made curves, and real runs on digits."""

import json
import math
import warnings

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import Diverged
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.collapse import (
    Chance,
    chance_among,
    chance_of,
    judge,
    known_verdict,
    news,
)
from thinwire.runs.config import resolve
from thinwire.runs.execute import default_folder, execute
from thinwire.runs.records import read_run
from thinwire.runs.watch import follow, standing

TEN = Chance(share=0.1, examples=10_000, classes=10)
FAST = {"cohort.size": 4, "local.epochs": 1, "engine.backend": "loop"}


def curve(*accuracies, every=1, **more):
    return [{"round": every * (i + 1), "loss": 1.0, "accuracy": a, **more} for i, a in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("records", "chance", "status", "number"),
    [
        (curve(0.2, 0.5, 0.52, 0.1, 0.1, every=20), TEN, "collapsed", 80),  # like FedPara's published runs
        (curve(*[0.1] * 10), TEN, "at chance", 10),
        (curve(*[0.1] * 9), TEN, "finished", None),  # too short
        (curve(0.1, 0.12, 0.3, 0.1, 0.6, every=10), TEN, "finished", None),  # it recovered
        (curve(0.1, 0.11, 0.12, every=10), TEN, "finished", None),  # slow, but above chance
        (curve(0.1, 0.15, 0.1, every=10), TEN, "at chance", 30),  # a single low peak is not learning
        (curve(0.1, 0.1, test_loss=500.0), TEN, "at chance", 2),  # the loss is too high for a slow start
        (curve(0.1, 0.1, test_loss=5.0), TEN, "finished", None),
        (curve(None, None, 0.9, None), TEN, "finished", None),
        (curve(*[None] * 30), TEN, "finished", None),  # never evaluated
        (curve(*[0.05] * 30), None, "finished", None),  # regression or personal models: no chance accuracy
        (curve(*[0.0115] * 30), Chance(0.01, 10_000, 100), "at chance", 30),
        (curve(*[0.02] * 30), Chance(0.01, 10_000, 100), "finished", None),  # many classes: 2 % is twice chance
        (curve(*[0.5] * 30), Chance(0.51, 800, 2), "at chance", 30),
        (curve(*[0.6] * 30), Chance(0.5, 20, 2), "finished", None),  # above chance on few examples
        (curve(*[0.95] * 30), Chance(0.9, 100, 2), "finished", None),
        (curve(0.3, 0.6, 0.2, 0.4), Chance(0.4, 12, 3), "finished", None),  # within the error of twelve examples
        (curve(0.3, 1.0, 0.2), Chance(0.4, 12, 3), "collapsed", 3),
        (curve(0.8, math.nan), TEN, "finished", None),
        ([*curve(0.8), {"round": 2, "loss": math.nan, "accuracy": 0.8}], TEN, "diverged", 2),
        (curve(0.8, 0.8, test_loss=math.inf), TEN, "diverged", 1),
        (curve(0.8, 0.8, test_loss=math.inf), None, "diverged", 1),
        ([], TEN, "finished", None),
    ],
)
def test_status_of_curves(records, chance, status, number):
    assert judge(records, chance)[:2] == (status, number)


def test_a_personal_method_is_judged_by_client_accuracy():
    chance = Chance(0.5, 400, 10, "client_accuracy")
    good = [{**line, "client_accuracy": 0.9} for line in curve(*[0.1] * 20)]
    assert judge(good, chance).status == "finished"
    collapsed = [*good, {"round": 21, "accuracy": 0.1, "client_accuracy": 0.5}]
    assert judge(collapsed, chance)[:2] == ("collapsed", 21)
    assert "client accuracy 50.00 %" in judge(collapsed, chance).why


def test_a_change_of_status_is_reported_once():
    records = curve(0.4, 0.1, 0.1, 0.4, 0.1)
    verdicts = [judge(records[:number], TEN) for number in range(6)]
    changes = {number: news(*verdicts[number - 1 : number + 1]) for number in range(1, 6)}
    assert changes[1] is changes[3] is None
    assert changes[2].startswith("collapsed: accuracy 10.00 % is back at chance (at most 1")
    assert changes[4] == "above chance again"

    assert "since round 5; 40.00 % in round 1" in changes[5]


def test_the_margin_of_chance_is_stated():
    why = judge(curve(*[0.59] * 12), Chance(0.5775, 400, 2)).why
    assert why == (
        "accuracy 59.00 % in round 12 is not above chance (at most 61.98 %: 57.75 % for a constant prediction and "
        "4.23 points of noise among 400 examples)"
    )


def test_chance_accuracy_comes_from_the_test_set():
    assert chance_among(torch.tensor([[0, 1], [1, -100]])) == Chance(2 / 3, 3, 2)
    assert chance_among(torch.tensor([0.5, 1.0])) is None
    assert chance_among(torch.tensor([3, 3])) is None
    job = build_job(resolve("fedavg", "digits", FAST))
    counts = torch.bincount(job.task.test.targets)
    found = chance_of(make_simulation(Engine(), job))
    assert (found.share, found.examples, found.classes) == (int(counts.max()) / int(counts.sum()), 359, 10)
    assert chance_of(make_simulation(Engine(), build_job(resolve("local", "digits", FAST)))) is None
    own = chance_of(
        make_simulation(Engine(), build_job(resolve("local", "digits", {**FAST, "task.validation_fraction": 0.2})))
    )
    assert own.metric == "client_accuracy"
    assert found.share < own.share < 0.8


HIGH_LR = ("--set", "method.client_opt.lr=1000", "--set", "local.epochs=1", "--cohort", "4")


def test_a_run_at_chance_is_reported_with_exit_code_3(thinwire, tmp_path):
    code, out, err = thinwire("run", "fedavg", *HIGH_LR, "--rounds", "4", "--out", "run", "--json")
    summary = json.loads(out)
    assert code == 3
    assert summary["status"] == json.loads((tmp_path / "run/summary.json").read_text())["status"] == "at chance"
    assert summary["chance_accuracy"] == pytest.approx(37 / 359)
    assert "round 1/4  at chance: accuracy" in err, "in the round in which it happens"
    last = err.splitlines()[-1]
    assert last.startswith("thinwire: run at chance: accuracy ")
    assert "not above chance (at most 13.52 %: 10.31 % for a constant prediction and " in last
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert line["alarm"].startswith("at chance: ")
    assert "at chance: accuracy" in thinwire("watch", "run", "--once")[1]
    code, out, _ = thinwire("run", "fedavg", *HIGH_LR, "--rounds", "4", "--out", "run", "-q")
    assert code == 3, "also for a run that was finished before"
    assert "at chance" in out


def test_a_collapse_is_reported_in_the_round_in_which_it_happens(thinwire, tmp_path):
    growing = (
        "--set",
        'method.lr_schedule={kind="warmup", fraction=1.0}',
        "--set",
        "method.client_opt.lr=6.4",
    )  # 0.4, 0.8, 1.2, ...
    code, out, err = thinwire("run", "fedavg", *growing, "--set", "local.epochs=1", "--rounds", "16", "--out", "run")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert (code, found["status"]) == (3, "collapsed")
    assert found["final_accuracy"] < 0.14 < 0.2 < found["best_accuracy"]
    assert f"round {found['status_round']}/16  collapsed: accuracy" in err
    assert "final accuracy" in out
    assert "best accuracy" in out


@pytest.mark.filterwarnings("ignore:client")  # one of an honest run that diverges
def test_a_comparison_marks_failed_runs_and_continues(thinwire, tmp_path):
    words = ("compare", "fedavg", "fedprox", "--recipe", "paper", "--rounds", "4", *HIGH_LR, "-q")
    code, out, err = thinwire(*words)
    assert code == 3
    assert "1 of 1 at chance" in out
    assert "1 of 1 diverged" in out
    assert err.count(" at chance: accuracy ") == 1
    assert err.count(" diverged: round ") == 1
    page = (tmp_path / "runs/compare.html").read_text()
    assert "Note: fedavg, seed 0, at chance: accuracy " in page
    assert "<td>1 of 1 at chance</td>" in page
    assert "Fewest bytes to reach" not in page, "a failed run reached no target"
    rows = json.loads(thinwire(*words, "--json")[1])
    assert [row["failed"] for row in rows] == ["1 of 1 at chance", "1 of 1 diverged"]


def test_a_diverged_run_has_a_summary_and_is_not_run_again(tmp_path):
    experiment = resolve("fedavg", "digits", {**FAST, "rounds": 3, "method.client_opt.lr": 1e30})
    path = default_folder(experiment, tmp_path)
    with pytest.raises(Diverged, match="round 1") as first:
        execute(experiment, path)
    found = json.loads((path / "summary.json").read_text())
    assert (found["status"], found["status_round"], found["status_why"]) == ("diverged", 1, str(first.value))
    assert found["rounds"] == 0
    with pytest.raises(Diverged, match="known from an earlier run"):
        execute(experiment, path, resume=True)
    with pytest.raises(Diverged, match="round 1"):
        execute(experiment, path, overwrite=True)
    assert read_run(path).verdict.status == "diverged"
    assert [now.state for now in follow(path, 0.05)] == ["finished"], "watching ends"


def test_simulate_warns_about_a_run_at_chance():
    torch.manual_seed(0)
    clients = [(torch.randn(30, 4), torch.randint(0, 3, (30,))) for _ in range(2)]
    method = tw.Method(client_opt=tw.optimizers.SGD(1e4))
    test = torch.zeros(200, 4), 2 * (torch.arange(200) % 2)  # inputs without information
    with pytest.warns(RuntimeWarning, match="round 1: at chance"):
        run = tw.simulate(nn.Linear(4, 3), clients, method, rounds=2, test=test)
    assert run.status == "at chance"
    assert "not above chance" in run.status_reason
    assert run.history[0].alarm
    few = tuple(part[:99] for part in test)
    assert tw.simulate(nn.Linear(4, 3), clients, method, rounds=2, test=few).status == "finished", "too few examples"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = tw.simulate(
            nn.Linear(4, 3), clients, tw.Method(client_opt=tw.optimizers.SGD(0.1)), rounds=2, test=clients[0]
        )
    assert (fine.status, fine.status_reason) == ("finished", "")


def test_invalid_values_in_files_are_ignored(tmp_path, write_run):
    assert known_verdict({"status": "unknown"}) is None
    assert known_verdict({"status": "collapsed", "status_round": "x", "status_why": 3}) is None
    assert known_verdict({"status": "collapsed", "status_round": 3, "status_why": "low"})[:3] == ("collapsed", 3, "low")
    path = write_run("odd", best=0.1, rounds=12)
    (path / "environment.json").write_text(json.dumps({"chance": {"share": 2.0, "examples": 5, "classes": 2}}))
    assert read_run(path).verdict.status == "finished"
    (path / "environment.json").write_text(json.dumps({"chance": TEN._asdict()}))
    assert read_run(path).verdict.status == "at chance", "a run without a summary"


def test_the_share_of_b_that_is_left_is_in_the_summary(tmp_path):
    small = {"task.clients": 4, "cohort.size": 2, "rounds": 2, "engine.backend": "loop", "method.server_opt.lr": 1e-4}
    total = execute(resolve("sparse-adapter", "digits", {**small, "method.mask.by": "block"}), tmp_path / "run")
    assert total["nonzero_b"] == pytest.approx(0.25, abs=0.01)
    plain = execute(resolve("lora", "digits", {**small, "method.server_opt.lr": 1.0}), tmp_path / "lora")
    assert "nonzero_b" not in plain


def test_a_diverged_round_counts_what_was_sent(tmp_path):
    settings = {"task.clients": 8, "cohort.size": 2, "local.steps": 20, "local.batch": 16, "engine.backend": "loop"}
    experiment = resolve("lowrank", "digits", {**settings, "method.client_opt.lr": 1.6}, "paper")
    sent = []
    with pytest.raises(tw.Diverged, match="round 1"):
        execute(experiment, tmp_path / "run", on_message=lambda *one: sent.append(len(one[3])))
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["bytes_total_honest"] == found["bytes_abandoned"] == sum(sent) > 0
    assert "retries" not in found


def test_a_run_that_diverged_in_round_one_is_on_the_page(thinwire, tmp_path):
    words = ("compare", "fedavg", "--recipe", "paper", "--rounds", "1", "--cohort", "2", "--set", "local.steps=2", "-q")
    assert thinwire(*words)[0] == 0
    assert thinwire(*words, "--set", "method.client_opt.lr=1e30")[0] == 3
    code, _, _ = thinwire("report", "runs", "--html", "page.html")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    assert ">1 of 1 diverged</td>" in page
    assert "seed 0, diverged: " in page
    assert "not finite" in page


# -- tasks without accuracy ------------------------------------------------------------------------------------------


def losses(*values):
    return [{"round": i, "loss": value} for i, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "status", "number"),
    [
        ((1, 0.5, 11, 12, 13, 14, 15), "collapsed", 3),
        ((1, 0.5, 11, 12, 13, 14), "finished", None),  # four rounds
        ((1, 0.5, 11, 12, 9, 13, 14, 15, 16), "finished", None),  # not in a row
        ((1, 11, 12, 13, 14, 15, 9), "finished", None),  # it recovered
        ((0.01, *[0.09] * 20), "finished", None),
        ((5.0, *[0.01] * 20, *[0.4] * 20), "finished", None),  # worse than its best, but better than its start
        ((-1.0, *[5.0] * 20), "finished", None),  # a log-likelihood
        ((0.0, *[5.0] * 20), "finished", None),
        ((1.0, 2.0, math.nan), "diverged", 3),
        (tuple(2.0 + 0.1 * i for i in range(40)), "finished", None),  # a slow rise
    ],
)
def test_collapse_of_the_training_loss(values, status, number):
    assert judge(losses(*values), None)[:2] == (status, number)


def test_a_collapse_of_the_loss_is_reported_when_it_happens():
    records = losses(1, 20, 20, 20, 20, 20, 20, 2)
    verdicts = [judge(records[:number], None) for number in range(9)]
    changes = {number: news(*verdicts[number - 1 : number + 1]) for number in range(1, 9)}
    assert [number for number, text in changes.items() if text] == [6, 8]
    assert changes[6] == "collapsed: training loss 20 is above 10 times that of the first round (1) since round 2"
    assert changes[8] == "the training loss is low again"


def regression(lr, rounds, **more):
    """Least squares on digits: with a rate that is a little too large the error grows a bit in each step."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None] / 9
    clients = [(x[i::8][:64], y[i::8][:64]) for i in range(8)]
    torch.manual_seed(0)
    method = tw.Method(client_opt=tw.optimizers.SGD(lr))
    local = tw.Local(steps=1, batch=64)
    given = {"local": local, "loss": "mse", "backend": "loop", "recipe": "paper", **more}
    return tw.simulate(nn.Linear(64, 1), clients, method, rounds=rounds, **given)


def test_a_regression_that_collapses_is_reported():
    with pytest.warns(RuntimeWarning, match="collapsed: training loss"):
        run = regression(0.12, 12)
    assert run.status == "collapsed"
    assert math.isfinite(run.history[-1].loss)
    fine = regression(0.05, 12)
    assert (fine.status, fine.history[-1].loss < fine.history[0].loss) == ("finished", True)


def test_a_script_that_diverges_leaves_a_summary(tmp_path):
    with pytest.raises(tw.Diverged):
        regression(1e30, 5, out=tmp_path / "run")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["status"] == "diverged"
    assert standing(tmp_path / "run").status == "diverged"
