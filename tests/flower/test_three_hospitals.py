"""The commands of docs/three-hospitals.md with real processes: sites with tables of their own, pinned apps, keys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from thinwire.core.key import Key
from thinwire.flower.local import Processes, free_ports, listens, make_certificate

pytestmark = pytest.mark.slow

SITES = {"north": 40, "south": 25, "west": 60}  # and their numbers of patients
THINWIRE = [sys.executable, "-m", "thinwire"]


def write_records(folder: Path, rows: int) -> None:
    """A table in which older patients with a small dose have a bad outcome."""
    folder.mkdir(parents=True)
    key = Key(rows)
    ages = [20 + 5 * int(i) for i in key.fold("age").integers(rows, 15)]
    doses = [int(i) for i in key.fold("dose").integers(rows, 5)]
    lines = [
        f"{age},{dose},{'male' if (age + dose) % 2 else 'female'},{'bad' if age > 50 + 5 * dose else 'good'}"
        for age, dose in zip(ages, doses, strict=True)
    ]
    (folder / "records.csv").write_text("\n".join(["age,dose,sex,outcome", *lines]) + "\n")


def test_three_hospitals_train_a_model_that_equals_the_simulation(tmp_path):
    for site, rows in SITES.items():
        write_records(tmp_path / "data" / site, rows)
    home = tmp_path / "coordinator"
    home.mkdir()
    with Processes(home, None) as processes:

        def thinwire(*words: str) -> None:
            subprocess.run([*THINWIRE, *words], cwd=tmp_path, env=processes.env, check=True, timeout=1200)

        template = ("--template", "own-data", "--kind", "table", "--clients", "3", "--cohort", "3", "--rounds", "3")
        thinwire("app", "fedavg", "trial", *template)
        thinwire("site", "check", "trial", "--data-dir", "data/north")
        make_certificate(processes)
        port, *node_ports = free_ports(4)
        config = f'[superlink.mine]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{home}/server.pem"\n'
        (home / "config.toml").write_text(config)
        superlink = processes.start(
            "superlink",
            [
                *("flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"),
                *("--database", str(home / "superlink.db"), "--disable-runtime-dependency-installation"),
                *("--ssl-certfile", f"{home}/server.pem", "--ssl-keyfile", f"{home}/server.key"),
                *("--ssl-ca-certfile", f"{home}/server.pem"),
            ],
        )
        while not listens(port):
            assert superlink.poll() is None, processes.log_tail("superlink")
            time.sleep(0.1)
        for site, node_port in zip(SITES, node_ports, strict=True):
            key = tmp_path / site
            thinwire("site", "key", str(key))
            processes.call(["flwr", "supernode", "register", f"{key}.pub", "mine"])
            thinwire("site", "add", site, f"{key}.pub", "--roster", "roster.toml")
            processes.start(
                f"node-{site}",
                [
                    *(*THINWIRE, "site", "start", "--app", str(tmp_path / "trial"), "--superlink", f"127.0.0.1:{port}"),
                    *("--root-certificates", f"{home}/server.pem", "--auth-supernode-private-key", str(key)),
                    *("--port", str(node_port), "--node-config"),
                    f'site="{site}" data-dir="{tmp_path}/data/{site}" state-dir="{tmp_path}/states/{site}"',
                ],
                {"FLWR_HOME": str(home / f"{site}.home")},
            )
        settings = f'roster="{tmp_path}/roster.toml" quorum=1.0 seconds=120.0'
        thinwire("site", "supervise", "trial", "mine", "--run-dir", str(tmp_path / "deployed"), "-c", settings)
        logs = {site: processes.log(f"node-{site}") for site in SITES}
    thinwire_env = {**processes.env, "FLWR_HOME": str(tmp_path)}
    command = ["run", "trial/federated/experiment.toml", "--data-dir", "data", "--out", "simulated", "--quiet"]
    subprocess.run([*THINWIRE, *command], cwd=tmp_path, env=thinwire_env, check=True, timeout=1200)
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("deployed", "simulated")]
    assert models[0] == models[1]
    rounds = [json.loads(line) for line in (tmp_path / "deployed/metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rounds] == [3, 3, 3]
    assert not any("refused" in line for lines in logs.values() for line in lines)
