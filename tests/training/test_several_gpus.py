"""`examples/several_gpus.py`: two gloo processes of torchrun give what one gives, also as a site of Flower."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.own_code import NET, TASK
from thinwire.flower.local import CONNECTION, Processes, start_nodes, start_superlink

EXAMPLE = Path(__file__).parents[2] / "examples/several_gpus.py"
TRAINER = ["--set", f"local.trainer={EXAMPLE}:fit"]
QUICK = ["--on", "digits", "--clients", "2", "--cohort", "2", "--rounds", "2"]


def torchrun(processes: int) -> list[str]:
    """The start of a command: thinwire in several processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*start, str(EXAMPLE)]


def distance(a: Path, b: Path) -> float:
    """The largest difference between the weights of two runs."""
    a, b = (load_file(one / "model.safetensors") for one in (a, b))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def call(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=300, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "lora"])
def test_two_processes_of_torchrun_send_what_one_sends(method, tmp_path):
    words = ["run", method, *QUICK, "--quiet"]
    call([sys.executable, "-m", "thinwire", *words, "--out", "ours"], tmp_path)
    for processes in (1, 2):
        call([*torchrun(processes), *words, *TRAINER, "--out", str(processes)], tmp_path)
    assert distance(tmp_path / "1", tmp_path / "2") < 1e-6
    assert distance(tmp_path / "ours", tmp_path / "2") < 1e-6


@pytest.mark.slow
def test_ranks_find_the_class_of_a_model_of_ones_own(tmp_path):
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "my_net.py").write_text(NET)
    words = ["run", "fedavg", "--on", "my_task.py:task", "--rounds", "1", "--cohort", "1", "--lr", "0.1", "--quiet"]
    for processes in (1, 2):
        call([*torchrun(processes), *words, *TRAINER, "--out", str(processes)], tmp_path)
    assert distance(tmp_path / "1", tmp_path / "2") < 1e-6


@pytest.mark.slow
def test_a_site_of_flower_is_started_by_torchrun(tmp_path):
    pytest.importorskip("flwr")
    call([sys.executable, "-m", "thinwire", "run", "fedavg", *QUICK, "--quiet", "--out", "ours"], tmp_path)
    call([sys.executable, "-m", "thinwire", "app", "fedavg", "own", *QUICK, *TRAINER], tmp_path)
    app, run, home = tmp_path / "own", tmp_path / "run", tmp_path / "home"
    home.mkdir()
    with Processes(home, None) as processes:
        link = start_superlink(processes, 1)
        start_nodes(processes, link, link.port, home, [*torchrun(2), "site", "start", "--app", str(app)])
        config = f'run-dir="{run}" nodes=1 seconds=120.0'
        server = processes.start("server", ["flwr", "run", str(app), CONNECTION, "--stream", "-c", config])
        end = time.monotonic() + 200
        while server.poll() is None and not (run / "summary.json").is_file() and time.monotonic() < end:
            time.sleep(0.2)
        assert (run / "summary.json").is_file(), processes.log("node-0")[-20:] + processes.log("server")[-20:]
    assert distance(tmp_path / "ours", run) < 1e-6
