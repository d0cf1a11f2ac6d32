"""Processes on this machine over TLS: results equal the simulation bit for bit, also after a kill."""

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

from tests.own_code import forgotten, write_project
from thinwire.flower.apps import deployable
from thinwire.flower.local import Processes, deploy, free_ports, make_certificate
from thinwire.flower.supervisor import DeploymentFailed
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.secure.keys import make_key

pytestmark = pytest.mark.slow


def small(method: str, nodes: int, rounds: int):
    quick = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    return deployable(resolve(method, "digits", quick))


def lines(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "client_accuracy")} for row in rows]


def equal_runs(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    assert lines(a) == lines(b)


def flower_processes(folder: Path) -> list[str]:
    """Command lines of the processes of a deployment into this folder."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "thinwire-deploy-" in line and str(folder) in line]


@pytest.mark.parametrize("method", ["fedavg", "mapo", "flasc", "scaffold", "pfedpara", "fedlama"])
def test_deployment_equals_the_simulation(method, tmp_path):
    experiment = small(method, 4, 3)
    deploy(experiment, tmp_path / "deployed", nodes=4)
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")
    assert not flower_processes(tmp_path)


def test_flowers_own_nodes_give_the_same_result(tmp_path):
    """`flower-supernode`, which `thinwire site start` starts where the version of Flower is not known to work."""
    experiment = small("fedavg", 2, 2)
    deploy(experiment, tmp_path / "deployed", nodes=2, node=["flower-supernode"])
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")


def test_a_trainer_of_ones_own_runs_on_the_nodes(tmp_path, monkeypatch):
    (tmp_path / "my_trainer.py").write_text(
        "import torch\n\n\n"
        "def fit(model, records, lr):\n"
        "    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)\n"
        "    for inputs, targets in records.batches():\n"
        "        optimizer.zero_grad()\n"
        "        torch.nn.functional.cross_entropy(model(inputs), targets).backward()\n"
        "        optimizer.step()\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    quick = {"task.clients": 2, "cohort.size": 2, "rounds": 2, "local.trainer": "my_trainer.py:fit"}
    experiment = deployable(resolve("lora+int8", "digits", quick))
    deploy(experiment, tmp_path / "deployed", nodes=2)
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")


def test_killed_server_resumes_with_the_same_result(tmp_path):
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


def test_killed_node_is_skipped(tmp_path):
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


def test_ctrl_c_stops_all_processes_and_resume_continues(tmp_path):
    command = [sys.executable, "-m", "thinwire", "deploy", "fedavg", "--on", "digits", "--nodes", "2", "--rounds", "3"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "run/metrics.jsonl").is_file() or not (tmp_path / "run/metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "thinwire resume" in printed
    assert not flower_processes(tmp_path)
    done = subprocess.run([sys.executable, "-m", "thinwire", "resume", str(tmp_path / "run"), "--json"], check=False)
    assert done.returncode == 0
    assert len(lines(tmp_path / "run")) == 3


def test_node_with_unknown_key_or_wrong_certificate_is_rejected(tmp_path):
    """Each impostor announces client 1, whose node was stopped: if it were accepted, its uploads would count."""
    experiment = small("fedavg", 2, 2)
    refusals = {
        "unregistered key": "Failed to activate SuperNode",
        "no key": "must be registered",
        "certificate of another authority": "CERTIFICATE_VERIFY_FAILED",
    }
    names = tuple(refusals)
    impostors: dict[str, subprocess.Popen] = {}

    def start(processes) -> None:
        processes[2].kill()  # the node of client 1
        processes[2].wait()
        variables = Path(f"/proc/{processes[1].pid}/environ").read_bytes().decode().split("\0")
        env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        command = [part.replace("partition-id=0", "partition-id=1") for part in processes[1].args]
        make_certificate(Processes(tmp_path, None))
        where = {option: command.index(option) + 1 for option in command if option.startswith("--")}
        for name, port in zip(names, free_ports(3), strict=True):
            changed = list(command)
            changed[where["--port"]] = str(port)
            if name == names[0]:
                changed[where["--auth-supernode-private-key"]] = str(make_key(tmp_path / "unknown"))
            elif name == names[1]:
                at = where["--auth-supernode-private-key"]
                del changed[at - 1 : at + 1]
            else:
                changed[where["--root-certificates"]] = str(tmp_path / "server.pem")
                changed[where["--auth-supernode-private-key"]] = str(make_key(tmp_path / "another"))
            changed += ["--max-retries", "2"]
            with (tmp_path / f"{name}.log").open("wb") as log:
                impostors[name] = subprocess.Popen(changed, env=env, stdout=log, stderr=log, start_new_session=True)
        for process in impostors.values():  # they are rejected
            assert process.wait(120) != 0

    deploy(experiment, tmp_path / "run", nodes=2, settings={"seconds": 20.0, "quorum": 0.5}, on_start=start)
    assert [(row["clients"], row["absent"]) for row in lines(tmp_path / "run")] == [(1, 1), (1, 1)]
    for name, refusal in refusals.items():
        assert refusal in (tmp_path / f"{name}.log").read_text(), name
    assert not flower_processes(tmp_path)


def test_a_task_of_ones_own_is_found_by_the_nodes(tmp_path):
    with forgotten():
        file = write_project(tmp_path / "project") / "my_task.py"
        quick = {"rounds": 2, "task.members": 2}
        deploy(resolve("fedavg", f"{file}:task", quick), tmp_path / "deployed", nodes=2)
        execute(deployable(resolve("fedavg", f"{file}:task", quick)), tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")
    assert (tmp_path / "deployed/config.toml").read_text() == (tmp_path / "simulated/config.toml").read_text()
