"""Sites as processes of this machine, by the documented commands: one that claims another's name is turned away."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("flwr")

from tests.deployment.test_deploy import equal_runs, small
from thinwire.deployment.app_folder import write_app
from thinwire.deployment.local import CONNECTION, _start_superlink
from thinwire.deployment.processes import Processes
from thinwire.experiments.execute import execute

pytestmark = pytest.mark.slow


def test_sites_of_a_roster_train_and_a_registered_node_cannot_claim_one(tmp_path):
    experiment = small("fedavg", 2, 3)
    (home := tmp_path / "home").mkdir()
    run, roster = tmp_path / "run", tmp_path / "roster.toml"
    command = [sys.executable, "-m", "thinwire"]
    with Processes(home, None) as processes:
        superlink = _start_superlink(processes, 3)  # three nodes are registered with Flower
        write_app(experiment, home / "app")
        for name, key in zip(("north", "south"), superlink.keys, strict=False):
            processes.call([*command, "site", "add", name, f"{key}.pub", "--roster", str(roster)])
        for i, name in enumerate(("north", "south", "north")):
            config = f'site="{name}" site-key={json.dumps(str(superlink.keys[i]))} state-dir={json.dumps(str(home))}'
            node = ["node", "--superlink", f"127.0.0.1:{superlink.port}", "--port", str(superlink.node_ports[i])]
            node += ["--root-certificates", str(home / "ca.pem"), "--node-config", config]
            node += ["--auth-supernode-private-key", str(superlink.keys[i])]
            processes.start(f"node-{i}", [*command, *node], {"FLWR_HOME": str(home / f"node-{i}.home")})
        words = f"run-dir={json.dumps(str(run))} roster={json.dumps(str(roster))} quorum=1.0 seconds=120.0"
        server = processes.start("server", ["flwr", "run", str(home / "app"), CONNECTION, "--stream", "-c", words])
        server.wait(400)
        told = [line for line in processes.log("node-2") if "the server does not use this node" in line]
        honest = [line for i in (0, 1) for line in processes.log(f"node-{i}") if "does not use this node" in line]
    execute(experiment, tmp_path / "simulated")
    equal_runs(run, tmp_path / "simulated")
    log = (run / "server.log").read_text().splitlines()
    assert len([line for line in log if line.endswith("its key is not that of site 'north' on the roster")]) == 1
    assert all(any(f"site {name} joined" in line for line in log) for name in ("north", "south"))
    assert len(told) == 1
    assert told[0].endswith("its key is not that of site 'north' on the roster")
    assert not honest
