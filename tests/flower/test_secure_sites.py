"""Secure aggregation between processes of this machine, with a roster and signatures: the bits of the simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.flower.test_deploy import lines
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.local import CONNECTION, Processes, free_ports, start_superlink
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

pytestmark = pytest.mark.slow

NAMES = ("north", "south", "east")


def add_sites(processes: Processes, command: list[str], keys: list[Path], roster: Path) -> None:
    for name, key in zip(NAMES, keys, strict=True):
        processes.call([*command, "site", "add", name, f"{key}.pub", "--roster", str(roster)])


def test_three_sites_with_signed_keys_sum_what_the_simulation_sums(tmp_path):
    quick = {"task.clients": 3, "cohort.size": 3, "local.steps": 2, "rounds": 2, "method.secure_aggregation": True}
    experiment = deployable(resolve("mapo", "digits", quick))
    (home := tmp_path / "home").mkdir()
    run, roster, command = tmp_path / "run", tmp_path / "roster.toml", [sys.executable, "-m", "thinwire"]
    with Processes(home, None) as processes:
        superlink, ports = start_superlink(processes, len(NAMES)), free_ports(len(NAMES))
        write_app(experiment, home / "app")
        add_sites(processes, command, superlink.keys, roster)
        for i, name in enumerate(NAMES):
            config = f'site="{name}" site-key={json.dumps(str(superlink.keys[i]))} roster={json.dumps(str(roster))}'
            config += f" state-dir={json.dumps(str(home / f'states-{i}'))}"
            node = ["site", "start", "--superlink", f"127.0.0.1:{superlink.port}"]
            node += ["--port", str(ports[i])]
            node += ["--root-certificates", str(home / "server.pem"), "--node-config", config]
            node += ["--auth-supernode-private-key", str(superlink.keys[i])]
            processes.start(f"node-{i}", [*command, *node], {"FLWR_HOME": str(home / f"node-{i}.home")})
        words = f"run-dir={json.dumps(str(run))} roster={json.dumps(str(roster))} seconds=120.0"
        server = processes.start("server", ["flwr", "run", str(home / "app"), CONNECTION, "--stream", "-c", words])
        server.wait(500)
    execute(experiment, tmp_path / "simulated")
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "simulated/model.safetensors").read_bytes()
    for ours, theirs in zip(lines(run), lines(tmp_path / "simulated"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)
        assert ours["clients"] == 3
        assert ours["bytes_up"] > theirs["bytes_up"]
    assert "refused" not in (run / "server.log").read_text()
