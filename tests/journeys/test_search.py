"""A fresh folder, the documented commands: sweep, kill and resume, tune, and the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ["--on", "digits", "--clients", "10", "--cohort", "2", "--set", "local.steps=8", "-q"]
SWEEP = ["sweep", "fedavg", *SMALL, "--rounds", "3", "--over", "lr=0.1,0.3", "--seeds", "2"]


def metrics(folder: Path) -> dict[str, list[dict]]:
    """The lines of every run by its directory, without `seconds`, which differs between equal runs."""
    found = {}
    for file in sorted(folder.glob("*/metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.parent.name] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return found


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_runs(thinwire, tmp_path):
    words = [sys.executable, "-m", "thinwire.cli.app", *SWEEP, "--out", "killed"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list((tmp_path / "killed").glob("*/summary.json"))) < 1:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed in the middle"
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "killed").glob("*/summary.json")}
    assert 1 <= len(before) < 4
    assert thinwire(*SWEEP, "--out", "killed")[0] == 0
    assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    code, out, _ = thinwire(*SWEEP, "--out", "whole", "--json")
    assert code == 0
    assert len(json.loads(out)["rows"]) == 2
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_sweep_tune_and_page(thinwire, tmp_path):
    words = ["sweep", "fedavg", *SMALL, "--rounds", "2", "--over", "lr=0.1,0.3,1e30", "--seeds", "2"]
    code, out, err = thinwire(*words, "--html", "sweep.html")
    assert code == 0, err
    for shown in ("fedavg on digits: 3 settings, 2 seeds", "to the best", "2 of 2 diverged", "The test set ranks"):
        assert shown in out
    page = (tmp_path / "sweep.html").read_text()
    assert "fedavg (lr 0.1)" in page
    assert "fedavg (lr 0.3)" in page
    code, out, _ = thinwire(*words, "--json")
    found = json.loads(out)
    assert found["ranked_by"] == "final test accuracy"
    best, *_, failed = found["rows"]
    assert best["is_best"]
    assert (failed["lr"], failed["failed"], failed["difference"]) == (1e30, "2 of 2 diverged", None)
    assert thinwire("run", "fedavg", *SMALL, "--rounds", "2", "--set", f"method.client_opt.lr={best['lr']}")[0] == 0
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 6, "the run of the best setting was there"
    assert thinwire("compare", "fedavg", *SMALL, "--rounds", "2", "--seeds", "2")[0] == 0

    tune = ["tune", "fedavg", *SMALL, "--rounds", "4", "--over", "lr=0.001,0.1", "--over", "batch=16,32"]
    code, out, err = thinwire(*tune)
    assert code == 0, err
    assert out.count("finished") + out.count("at chance so far") == 8
    code, out, err = thinwire(*tune, "--json")
    facts = json.loads(out)
    assert ([len(rung) for rung in facts["rungs"]], facts["seed"]) == ([4, 2, 2], 100)
    values = {one["batch"]: one for one in (trial["point"] for trial in facts["rungs"][0])}
    assert set(values) == {16, 32}
    if facts["lr"] == 0.3:
        assert facts["best"] == facts["rungs"][-1][-1], "the method's own rate"
    assert facts["command"].endswith(f"--set method.client_opt.lr={facts['lr']} --set local.batch={facts['batch']}")
    assert thinwire(*facts["command"].split()[1:], "-q")[0] == 0, "the recommended command runs"


def test_a_search_in_which_nothing_trains_says_so(thinwire, tmp_path):
    code, out, err = thinwire("sweep", "fedavg", *SMALL, "--rounds", "10", "--over", "lr=1e-9,1e30", "--seeds", "1")
    assert code == 1
    assert "1 of 1 at chance" in out
    assert err.endswith("thinwire: no setting trains on every seed; try smaller learning rates, or more rounds\n")
    for words, message in (
        (["sweep", "fedavg", *SMALL, "--over", "k=1,2"], "fedavg has no setting 'k'; write one of lr, server_lr,"),
        (["sweep", "fedavg", *SMALL], "name at least one setting and its values, such as --over lr=0.1,0.3"),
        (["tune", "fedavg", *SMALL, "--over", "lr=0.1,1", "--rates", "4"], "leave one of them out"),
    ):
        code, out, err = thinwire(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
