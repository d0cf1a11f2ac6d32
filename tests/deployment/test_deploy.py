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

from thinwire.deployment.apps import deployable
from thinwire.deployment.local import DeploymentFailed, _make_certificate, _make_key, deploy, free_ports
from thinwire.experiments.config import resolve
from thinwire.experiments.execute import execute

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
    """Command lines of processes of a deployment into this folder."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "thinwire-deploy-" in line and str(folder) in line]


@pytest.mark.parametrize("method", ["fedavg", "mapo", "flasc", "scaffold", "pfedpara", "fedlama"])
def test_a_deployment_is_the_simulation(method, tmp_path):
    experiment = small(method, 4, 3)
    deploy(experiment, tmp_path / "deployed", nodes=4)
    execute(experiment, tmp_path / "simulated")
    equal_runs(tmp_path / "deployed", tmp_path / "simulated")
    assert not flower_processes(tmp_path)


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
    assert not flower_processes(tmp_path)
    done = subprocess.run([sys.executable, "-m", "thinwire", "resume", str(tmp_path / "run"), "--json"], check=False)
    assert done.returncode == 0
    assert len(lines(tmp_path / "run")) == 3


def test_a_node_without_a_known_key_or_with_a_wrong_certificate_is_turned_away(tmp_path):
    """Each claims to serve client 1, which nobody serves: if it were let in, it would be heard."""
    experiment = small("fedavg", 2, 2)
    refusals = {
        "a key that nobody registered": "Failed to activate SuperNode",
        "no key": "must be registered",
        "certificate of another authority": "CERTIFICATE_VERIFY_FAILED",
    }
    names = tuple(refusals)
    impostors: dict[str, subprocess.Popen] = {}

    def start(processes) -> None:
        processes[2].kill()  # the node of client 1
        processes[2].wait()
        words = Path(f"/proc/{processes[1].pid}/environ").read_bytes().decode().split("\0")
        env = dict(word.split("=", 1) for word in words if "=" in word)
        command = [part.replace("partition-id=0", "partition-id=1") for part in processes[1].args]
        _make_certificate(tmp_path)
        where = {option: command.index(option) + 1 for option in command if option.startswith("--")}
        for name, port in zip(names, free_ports(3), strict=True):
            own = list(command)
            own[where["--port"]] = str(port)
            if name == names[0]:
                own[where["--auth-supernode-private-key"]] = str(_make_key(tmp_path / "unknown"))
            elif name == names[1]:
                at = where["--auth-supernode-private-key"]
                del own[at - 1 : at + 1]
            else:
                own[where["--root-certificates"]] = str(tmp_path / "ca.pem")
                own[where["--auth-supernode-private-key"]] = str(_make_key(tmp_path / "another"))
            own += ["--max-retries", "2"]
            with (tmp_path / f"{name}.log").open("wb") as log:
                impostors[name] = subprocess.Popen(own, env=env, stdout=log, stderr=log, start_new_session=True)
        for process in impostors.values():  # they are refused, and say so
            assert process.wait(120) != 0

    deploy(experiment, tmp_path / "run", nodes=2, settings={"seconds": 20.0, "quorum": 0.5}, on_start=start)
    assert [(row["clients"], row["absent"]) for row in lines(tmp_path / "run")] == [(1, 1), (1, 1)]
    for name, refusal in refusals.items():
        assert refusal in (tmp_path / f"{name}.log").read_text(), name
    assert not flower_processes(tmp_path)
