"""Real processes on this machine, over TLS: the same bits as the simulation, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from thinwire.run.apps import deployable
from thinwire.run.config import resolve
from thinwire.run.deploy import DeploymentFailed, deploy
from thinwire.run.execute import execute

pytestmark = pytest.mark.slow


def small(method: str, nodes: int, rounds: int):
    quick = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    return deployable(resolve(method, "digits", quick))


def lines(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "own_accuracy")} for row in rows]


def equal_runs(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert lines(a) == lines(b)


def flower_processes() -> list[str]:
    """Command lines of this user's processes that belong to Flower."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "thinwire-deploy-" in line]


@pytest.mark.parametrize("method", ["fedavg", "mapo", "scaffold", "pfedpara", "fedlama"])
def test_a_deployment_is_the_simulation(method, tmp_path):
    experiment = small(method, 4, 3)
    deploy(experiment, tmp_path / "deployed", nodes=4)
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")
    assert not flower_processes()


def test_a_killed_server_is_resumed_to_the_same_bits(tmp_path):
    experiment = small("scaffold", 2, 4)
    processes = []

    def kill(record) -> None:
        if record.round == 2:
            os.killpg(processes[0].pid, signal.SIGKILL)

    with pytest.raises(DeploymentFailed):
        deploy(experiment, tmp_path / "deployed", nodes=2, on_round=kill, on_start=processes.extend)
    assert not (tmp_path / "deployed/summary.json").exists()
    deploy(experiment, tmp_path / "deployed", nodes=2, resume=True)
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")


def test_a_killed_node_is_left_out(tmp_path):
    experiment = small("fedavg", 3, 3)
    processes = []

    def kill(record) -> None:
        if record.round == 1:
            os.killpg(processes[3].pid, signal.SIGKILL)

    deploy(
        experiment,
        tmp_path / "run",
        nodes=3,
        settings={"seconds": 60.0, "quorum": 0.6},
        on_round=kill,
        on_start=processes.extend,
    )
    assert [row["clients"] for row in lines(tmp_path / "run")] == [3, 2, 2]


def test_ctrl_c_takes_everything_down_and_resume_goes_on(tmp_path):
    command = [sys.executable, "-m", "thinwire", "deploy", "fedavg", "--on", "digits", "--nodes", "2", "--rounds", "3"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/metrics.jsonl").is_file() or not (tmp_path / "run/metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "thinwire resume" in said
    assert not flower_processes()
    done = subprocess.run([sys.executable, "-m", "thinwire", "resume", str(tmp_path / "run"), "--json"], check=False)
    assert done.returncode == 0
    assert len(lines(tmp_path / "run")) == 3
