"""Sites as processes of this machine, by the documented commands; those that are not allowed are turned away."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("flwr")

from tests.flower.test_deploy import equal_runs, small
from thinwire.flower.app_folder import write_app
from thinwire.flower.local import CONNECTION, Processes, free_ports, start_superlink
from thinwire.runs.execute import execute

pytestmark = pytest.mark.slow

TOLD, REVOKED = "the server does not use this node", "site 'east' was revoked"


def test_sites_of_a_roster_train_and_a_claimed_and_a_revoked_one_are_told_why(tmp_path):
    """Four nodes are registered with Flower: two sites, one that claims to be the first, and one that was revoked."""
    experiment = small("fedavg", 2, 3)
    (home := tmp_path / "home").mkdir()
    run, roster = tmp_path / "run", ["--roster", str(tmp_path / "roster.toml")]
    command, names = [sys.executable, "-m", "thinwire"], ("north", "south", "north", "east")
    with Processes(home, None) as processes:
        superlink, ports = start_superlink(processes, len(names)), free_ports(len(names))
        write_app(experiment, home / "app")
        for i in (0, 1, 3):
            processes.call([*command, "site", "add", names[i], f"{superlink.keys[i]}.pub", *roster])
        processes.call([*command, "site", "revoke", "east", *roster])
        for i, name in enumerate(names):
            config = f'site="{name}" site-key={json.dumps(str(superlink.keys[i]))} state-dir={json.dumps(str(home))}'
            node = ["site", "start", "--superlink", f"127.0.0.1:{superlink.port}"]
            node += ["--port", str(ports[i])]
            node += ["--root-certificates", str(home / "server.pem"), "--node-config", config]
            node += ["--auth-supernode-private-key", str(superlink.keys[i])]
            processes.start(f"node-{i}", [*command, *node], {"FLWR_HOME": str(home / f"node-{i}.home")})
        words = f"run-dir={json.dumps(str(run))} roster={json.dumps(roster[1])} quorum=1.0 seconds=120.0"
        server = processes.start("server", ["flwr", "run", str(home / "app"), CONNECTION, "--stream", "-c", words])
        server.wait(900)
        told = [[line for line in processes.log(f"node-{i}") if TOLD in line] for i in range(len(names))]
    execute(experiment, tmp_path / "simulated")
    equal_runs(run, tmp_path / "simulated")
    log = (run / "server.log").read_text().splitlines()
    assert all(any(f"site {name} joined" in line for line in log) for name in ("north", "south"))
    assert told[:2] == [[], []]
    for lines, why in zip(told[2:], ("its key is not that of site 'north' on the roster", REVOKED), strict=True):
        assert [line.endswith(why) for line in lines] == [True]
        assert len([line for line in log if line.endswith(f"is not used: {why}")]) == 1
