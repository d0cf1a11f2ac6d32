"""Going back where training fails: real runs on digits that diverge or collapse and are rescued, also when killed."""

import json
import math
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError, ConfigError, Diverged, UnknownName
from thinwire.flower.apps import deployable
from thinwire.runs.collapse import judge, news
from thinwire.runs.config import digest, resolve, to_table
from thinwire.runs.execute import execute
from thinwire.runs.records import read_run
from thinwire.runs.retry import check_retry, halved, read_retries
from thinwire.runs.run_directory import RunFolder
from thinwire.runs.watch import standing

SMALL = {
    "task.clients": 8,
    "task.partition.kind": "iid",
    "cohort.size": 2,
    "local.steps": 20,
    "local.batch": 16,
    "engine.backend": "loop",
    "rounds": 4,
    "checkpoint.every": 1,
    "checkpoint.on_divergence": "retry",
}
# diverges in round 1 at 1.6 and 0.8, in round 2 at 0.4
DIVERGES = {**SMALL, "method.client_opt.lr": 1.6}
# 0.8, 1.6, 2.4, ...: learns first, then collapses with finite values
COLLAPSES = {**SMALL, "rounds": 7, "method.client_opt.lr": 5.6, "checkpoint.every": 2}
COLLAPSES["method.lr_schedule"] = {"kind": "warmup", "fraction": 1.0}


def diverging(**more):
    return resolve("lowrank", "digits", {**DIVERGES, **more}, "paper")


def collapsing(**more):
    return resolve("fedavg", "digits", {**COLLAPSES, **more}, "paper")


def timeless(value):
    """A value of JSON without seconds and what follows from them."""
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if not key.startswith("seconds") and key != "checksum"}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def files(path: Path):
    """All results of a run, without times."""
    lines = [timeless(json.loads(line)) for line in (path / "metrics.jsonl").read_text().splitlines()]
    texts = (timeless(json.loads((path / name).read_text())) for name in ("summary.json", "retries.json"))
    return (path / "model.safetensors").read_bytes(), lines, *texts


@contextmanager
def noted(wanted=""):
    """The warnings inside the block, of which one must contain this text."""
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        yield lines
    assert any(wanted in str(line.message) for line in lines)


@pytest.fixture(scope="module")
def rescued(tmp_path_factory):
    """A run that diverged and was rescued: its directory, its summary, and the bytes of every message."""
    path, sent = tmp_path_factory.mktemp("rescued") / "run", []
    with noted() as lines:
        summary = execute(diverging(), path, on_message=lambda *one: sent.append(len(one[3])))
    return path, summary, sum(sent), [str(line.message) for line in lines]


def test_a_run_that_diverges_is_rescued_and_every_byte_is_counted(rescued):
    path, summary, sent, lines = rescued
    assert summary["status"] == "finished"
    assert summary["final_accuracy"] > 0.5
    assert {one["status"] for one in summary["retries"]} == {"diverged"}
    assert len(summary["retries"]) == len(lines) >= 2
    assert summary["bytes_total_honest"] == summary["bytes_total"] == sent
    lost = sum(one["bytes_abandoned"] for one in summary["retries"])
    assert (
        summary["bytes_abandoned"] == lost == sent - sum(summary[f"bytes_{way}"] for way in ("up", "down", "catchup"))
    )
    assert summary["bytes_total_ideal"] == summary["bytes_up"] + summary["bytes_down"]
    records = read_run(path).records
    assert [line["round"] for line in records] == [1, 2, 3, 4]
    assert sum(line["bytes_abandoned"] for line in records) == lost, "in the records of the rounds that follow"
    first = summary["retries"][0]
    assert (first["round"], first["from_round"], first["lr"]) == (1, 0, 0.8)
    assert "round 1 diverged: " in lines[0]
    assert lines[0].endswith("back to the start with learning rate 0.8 (retry 1 of 5)")
    assert any(one["from_round"] > 0 for one in summary["retries"]), "also from a later state"
    assert sum(one.bytes_abandoned for one in read_retries(path)) == lost


def test_learning_rates_are_halved_from_the_state_that_it_went_back_to(rescued):
    path, summary, _, _ = rescued
    at = [one["from_version"] for one in summary["retries"]]
    for line in read_run(path).records:
        assert line["lr"] == 1.6 * 0.5 ** sum(v <= line["round"] - 1 for v in at)


def test_the_same_run_twice_has_the_same_bits(rescued, tmp_path):
    with noted("retry 1 of 5"):
        execute(diverging(), tmp_path / "run")
    assert files(tmp_path / "run") == files(rescued[0])


def test_a_script_has_the_bits_of_the_command_line(rescued, tmp_path):
    """States in memory and states on disk are the same."""
    from thinwire.runs.build import build_job

    experiment = diverging()
    job = build_job(experiment)
    clients = [job.task.train.gather(torch.from_numpy(job.task.clients.client(i))) for i in range(8)]
    test = job.task.test.gather(torch.arange(len(job.task.test)))
    settings = {"rounds": 4, "cohort": 2, "local": experiment.local, "backend": "loop", "test": test, "recipe": "paper"}
    file = tmp_path / "every.toml"
    file.write_text("[checkpoint]\nevery = 1\non_divergence = 'retry'\n[method]\nspace = 'lowrank'\n")
    method = experiment.method

    assert resolve(str(file)).checkpoint.on_divergence == "retry"
    sent = []
    with noted("retry 1 of 5"):
        run = tw.simulate(
            job.task.model,
            clients,
            method,
            **settings,
            on_divergence="retry",
            on_message=lambda *one: sent.append(len(one[3])),
            out=tmp_path / "script",
        )
    assert run.status == "finished"
    assert run.bytes_total == sum(sent)
    assert run.bytes_abandoned == sum(retry.bytes_abandoned for retry in run.retries) > 0
    assert len(run.history) == len(read_run(tmp_path / "script").records) == 4
    found = json.loads((tmp_path / "script/summary.json").read_text())
    assert found["bytes_total_honest"] == sum(sent)
    assert len(found["retries"]) == len(read_retries(tmp_path / "script")) == len(run.retries)


def test_a_collapse_with_finite_values_is_rescued(tmp_path):
    sent = []
    with noted("is back at chance"):
        summary = execute(collapsing(), tmp_path / "run", on_message=lambda *one: sent.append(len(one[3])))
    assert summary["status"] == "finished"
    assert "collapsed" in {one["status"] for one in summary["retries"]}
    assert summary["bytes_total_honest"] == sum(sent)
    last = summary["retries"][-1]
    assert last["from_round"] > 0
    records = read_run(tmp_path / "run").records
    following = records[last["from_round"]]
    share = 0.5 ** len([one for one in summary["retries"] if one["from_version"] <= last["from_version"]])
    assert following["lr"] == pytest.approx(0.8 * (last["from_version"] + 1) * share), "the warm-up goes on"
    assert all(line["alarm"] is None for line in records)


KILL = """
import os, signal, sys
from pathlib import Path
from thinwire.runs.execute import execute
from thinwire.runs.retry import read_retries
from thinwire.runs.run_directory import RunFolder
path = Path(sys.argv[1])
def kill(record):
    if len(read_retries(path)) == int(sys.argv[2]) and record.round == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
execute(RunFolder.open(path).experiment, path, resume=True, on_round=kill)
"""


@pytest.mark.slow
def test_a_run_killed_in_the_retried_part_goes_on_with_the_same_bits(rescued, tmp_path):
    whole, summary, _, _ = rescued
    path = tmp_path / "run"
    path.mkdir()
    RunFolder(path, to_table(diverging())).create()
    retries = len(summary["retries"])
    middle = summary["retries"][-1]["from_round"]
    for moment in ((retries, middle + 1), (retries, 4)):
        ended = subprocess.run([sys.executable, "-c", KILL, str(path), *map(str, moment)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert not (path / "summary.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no retry is repeated, no file was damaged
        execute(diverging(), path, resume=True)
    assert files(path) == files(whole)


def test_a_crash_right_after_the_retry_was_written_is_repaired(rescued, tmp_path, monkeypatch):
    """Then records of abandoned rounds are still there."""
    path, original = tmp_path / "run", RunFolder.go_back

    def crash(self, rounds, retries):
        before = (self.path / "metrics.jsonl").read_bytes()
        original(self, rounds, retries)
        if len(retries) == len(rescued[1]["retries"]):
            (self.path / "metrics.jsonl").write_bytes(before)
            raise RuntimeError("killed")

    monkeypatch.setattr(RunFolder, "go_back", crash)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="killed"):
            execute(diverging(), path)
        monkeypatch.undo()
        execute(diverging(), path, resume=True)
    assert files(path) == files(rescued[0])


@pytest.mark.filterwarnings("always")
def test_five_retries_are_the_most(tmp_path, thinwire):
    words = (
        "run",
        "fedavg",
        "--recipe",
        "paper",
        "--rounds",
        "2",
        "--cohort",
        "2",
        "--set",
        "method.client_opt.lr=1e30",
        "--out",
        "run",
    )
    code, _, err = thinwire(*words, "--set", "local.steps=2", "--on-divergence", "retry", "-q")
    assert code == 3
    assert err.count("back to the start") == 5
    assert "(retry 5 of 5)" in err
    last = err.splitlines()[-1]
    assert "not finite" in last
    assert last.endswith("also after 5 retries, with learning rate 3.125e+28")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert (found["status"], len(found["retries"])) == ("diverged", 5)
    assert found["bytes_total_honest"] == found["bytes_abandoned"] > 0
    assert len(read_retries(tmp_path / "run")) == 5
    code, _, err = thinwire(*words, "--set", "local.steps=2", "--on-divergence", "retry", "-q")
    assert (code, err.count("back to")) == (3, 0), "a known result"


def test_a_diverged_round_counts_what_was_sent(tmp_path):
    experiment = resolve("lowrank", "digits", {**DIVERGES, "checkpoint.on_divergence": "stop"}, "paper")
    sent = []
    with pytest.raises(Diverged, match="round 1"):
        execute(experiment, tmp_path / "run", on_message=lambda *one: sent.append(len(one[3])))
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["bytes_total_honest"] == found["bytes_abandoned"] == sum(sent) > 0
    assert "retries" not in found


@pytest.mark.filterwarnings("always")
def test_a_diverged_run_can_be_rescued_later(thinwire, tmp_path, rescued):
    stop = diverging(**{"checkpoint.on_divergence": "stop"})
    with pytest.raises(Diverged):
        execute(stop, tmp_path / "run")
    assert thinwire("resume", "run", "-q")[0] == 3
    code, out, err = thinwire("resume", "run", "--on-divergence", "retry", "--json")
    assert code == 0
    assert json.loads(out)["retries"] == rescued[1]["retries"]
    assert "retry 1 of 5" in err
    assert files(tmp_path / "run") == files(rescued[0])
    with pytest.raises(CheckpointError, match="times; write on_divergence retry"):
        execute(stop, tmp_path / "run")
    assert digest(stop) != digest(diverging()), "another directory by default"
    assert digest(stop) == digest(resolve("lowrank", "digits", {**DIVERGES, "checkpoint": {"every": 1}}, "paper"))


def test_tables_and_pages_show_abandoned_rounds(rescued, thinwire, tmp_path):
    path, summary, sent, _ = rescued
    code, out, _ = thinwire("show", str(path))
    assert code == 0
    assert "bytes abandoned" in out
    assert "retry 1" in out
    assert "round 1 diverged: back to the start with learning rate 0.8" in out
    code, out, _ = thinwire("report", str(path), "--html", "page.html", "--json")
    (row,) = json.loads(out)
    assert row["bytes_abandoned"] == summary["bytes_abandoned"]
    assert row["bytes_total_honest"] == sent
    page = (tmp_path / "page.html").read_text()
    assert "Note: lowrank, seed 0, round 1 diverged: back to the start with learning rate 0.8" in page
    assert ">abandoned</th>" in page
    assert "abandoned" in thinwire("report", str(path))[1]
    assert standing(path).bytes_total == sent
    assert "abandoned)" in thinwire("watch", str(path), "--once")[1]


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


def test_what_cannot_go_back_is_refused(thinwire):
    code, _, err = thinwire("run", "fedavg", "--on-divergence", "again", "--rounds", "1")
    assert code == 2
    assert err.count("\n") == 1
    assert "stop" in err
    assert "retry" in err
    with pytest.raises(ConfigError, match="Known: retry, stop"):
        tw.simulate(nn.Linear(2, 2), [(torch.zeros(4, 2), torch.zeros(4).long())], on_divergence="again")
    with pytest.raises(UnknownName, match=r"checkpoint\.on_divergence"):
        resolve("fedavg", "digits", {"checkpoint.on_divergence": "go"})
    with pytest.raises(ConfigError, match="clients of a deployment cannot go back"):
        deployable(diverging())
    code, _, err = thinwire("deploy", "fedavg", "--set", "checkpoint.on_divergence=retry", "--rounds", "1")
    assert (code, err.count("\n")) == (2, 1)
    assert "deployment" in err
    private = resolve("dp-fedadam", "digits", {"checkpoint.on_divergence": "retry"})
    with pytest.raises(ConfigError, match="privacy that abandoned rounds spend"):
        check_retry(private.method, private.engine)
    assert deployable(resolve("fedavg", "digits")).checkpoint.every == 1


# -- the schedule ----------------------------------------------------------------------------------------------------


def test_a_halved_schedule_follows_its_inner_one():
    inner = tw.optimizers.WarmupLR(4)
    schedule = tw.optimizers.HalvedLR((2, 2, 5), inner)
    expected = [inner.factor(t) * share for t, share in enumerate((1, 1, 0.25, 0.25, 0.25, 0.125))]
    assert [schedule.factor(t) for t in range(6)] == expected
    assert schedule.over(100).at == (2, 2, 5)
    assert halved(tw.Method(), ()) == tw.Method()
    for wrong in ((), (3, 2), (-1,)):
        with pytest.raises(ConfigError, match="ascending order"):
            tw.optimizers.HalvedLR(wrong)


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


def test_a_regression_that_collapses_is_reported_and_rescued(tmp_path):
    with noted("collapsed: training loss"):
        run = regression(0.12, 12)
    assert run.status == "collapsed"
    assert math.isfinite(run.history[-1].loss)
    fine = regression(0.05, 12)
    assert (fine.status, fine.history[-1].loss < fine.history[0].loss) == ("finished", True)
    sent = []
    with noted("retry 1 of 5"):
        rescued = regression(0.12, 12, on_divergence="retry", on_message=lambda *one: sent.append(len(one[3])))
    assert rescued.status == "finished"
    assert rescued.bytes_total == sum(sent) > run.bytes_total
    assert rescued.history[-1].loss < rescued.history[0].loss


def test_a_script_that_diverges_leaves_a_summary(tmp_path):
    with pytest.raises(Diverged):
        regression(1e30, 5, out=tmp_path / "run")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    assert found["status"] == "diverged"
    assert standing(tmp_path / "run").status == "diverged"
