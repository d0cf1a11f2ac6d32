"""Pinned apps and versions of Flower with real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from thinwire.flower.apps import deployable
from thinwire.flower.local import deploy
from thinwire.flower.node import KNOWN
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

pytestmark = pytest.mark.slow

COUNT = """
    if node_config is not None:
        import os

        with open({log!r}, "a") as file:
            file.write(os.environ["THINWIRE_SITE_KEY"] + "\\n")
    return job_of("""


def small(nodes: int, rounds: int):
    quick = {"task.clients": nodes, "cohort.size": nodes, "local.epochs": 1, "rounds": rounds}
    return deployable(resolve("fedavg", "digits", quick))


def test_nodes_load_their_data_once_and_refuse_another_app(tmp_path):
    """The third node is replaced by one whose owner has pinned another app."""
    keys, replaced = [], []

    def edit(app: Path) -> None:
        task = app / "federated/jobs.py"
        task.write_text(task.read_text().replace("\n    return job_of(", COUNT.format(log=str(tmp_path / "loads"))))

    def start(processes) -> None:
        processes[3].kill()
        processes[3].wait()
        variables = Path(f"/proc/{processes[1].pid}/environ").read_bytes().decode().split("\0")
        env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        command = list(processes[3].args)
        at = command.index("--app") + 1
        pinned = shutil.copytree(command[at], tmp_path / "pinned", ignore=shutil.ignore_patterns("__pycache__"))
        task = pinned / "federated/jobs.py"
        task.write_text(task.read_text().replace(str(tmp_path / "loads"), str(tmp_path / "other-loads")))
        command[at] = str(pinned)
        keys.extend(process.args[process.args.index("--auth-supernode-private-key") + 1] for process in processes[1:])
        with (tmp_path / "refusing.log").open("wb") as log:
            replaced.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))

    settings = {"seconds": 20.0, "quorum": 0.6}
    deploy(small(3, 3), tmp_path / "run", nodes=3, settings=settings, on_start=start, edit_app=edit)
    replaced[0].wait(60)  # it was stopped with the deployment
    loads = (tmp_path / "loads").read_text().splitlines()
    assert sorted(set(loads)) == sorted(loads)  # once each
    assert set(keys[:2]) <= set(loads) <= set(keys)
    assert (tmp_path / "other-loads").read_text().splitlines() == [keys[2]]
    refused = [line for line in (tmp_path / "refusing.log").read_text().splitlines() if line.startswith("refused:")]
    assert refused == [f"refused: the server sent another app than {tmp_path}/pinned: it has another federated/jobs.py"]
    log = [line for line in (tmp_path / "run/server.log").read_text().splitlines() if "its own app" in line]
    assert len(log) == 1
    assert log[0].endswith("it has another federated/jobs.py")


@pytest.mark.parametrize("known", KNOWN)
def test_deployment_with_each_known_version_of_flower(known, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "flwr")]
    if subprocess.run([*install, f"flwr=={known}.0"], check=False).returncode:
        pytest.skip(f"flwr {known}.0 cannot be installed here")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "flwr"), str(root)])}
    code = "import flwr; from thinwire.flower.node import why_not; print(flwr.__version__ + why_not())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{known}.0"
    command = ["deploy", "fedavg", "--on", "digits", "--nodes", "2", "--rounds", "2", "--set", "local.epochs=1"]
    subprocess.run(
        [sys.executable, "-m", "thinwire", *command, "--out", str(tmp_path / "deployed"), "--quiet"],
        env=env,
        check=True,
    )
    execute(small(2, 2), tmp_path / "simulated")
    one, two = (tmp_path / run / "model.safetensors" for run in ("deployed", "simulated"))
    assert one.read_bytes() == two.read_bytes()
