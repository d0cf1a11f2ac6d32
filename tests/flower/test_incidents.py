"""What happens to a run of four sites over Flower, between real processes, and what its operator is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.local import CONNECTION, Processes, free_ports, start_superlink
from thinwire.flower.supervisor import server_process
from thinwire.runs.config import resolve
from thinwire.runs.deployment_records import by_site, read_sites

NAMES = ("north", "south", "east", "west")
GRACE, ROUNDS = 3.0, 6
THINWIRE = [sys.executable, "-m", "thinwire", "site"]


class Sites:
    """A SuperLink, the nodes of sites, and their supervised run."""

    def __init__(self, processes: Processes, folder: Path, secure: bool) -> None:
        self.processes, self.run, self.roster = processes, folder / "run", str(folder / "roster.toml")
        options = {"task.clients": 4, "cohort.size": 4, "local.steps": 1, "rounds": ROUNDS}
        experiment = resolve("fedavg", "digits", {**options, "method.secure_aggregation": secure})
        self.app, self.nodes = processes.home / "app", dict[str, subprocess.Popen[bytes]]()
        write_app(deployable(experiment), self.app)
        self.link = start_superlink(processes, len(NAMES) + 1, processes.home / "superlink.db")
        for name in NAMES:
            self.add(name)

    def add(self, name: str) -> None:
        key = self.link.keys[[*NAMES, "beyond"].index(name)]
        self.processes.call([*THINWIRE, "add", name, f"{key}.pub", "--roster", self.roster])

    def start(self, *names: str) -> None:
        home = self.processes.home
        for name, port in zip(names, free_ports(len(names)), strict=True):
            words = ["--superlink", f"127.0.0.1:{self.link.port}", "--root-certificates", f"{home}/server.pem"]
            words += ["--auth-supernode-private-key", str(self.link.keys[NAMES.index(name)]), "--port", str(port)]
            config = f'site="{name}" state-dir={json.dumps(str(home / name))}'
            command = [*THINWIRE, "start", "--app", str(self.app), *words, "--node-config", config]
            self.nodes[name] = self.processes.start(f"node-{name}", command, {"FLWR_HOME": f"{home}/{name}.home"})

    def supervise(self) -> None:
        config = f"roster={json.dumps(self.roster)} grace={GRACE} seconds=60.0 wait=40.0"
        self.supervisor = self.processes.start(
            "run", [*THINWIRE, "supervise", str(self.app), CONNECTION, "--run-dir", str(self.run), "-c", config]
        )

    @property
    def rounds(self) -> list[dict]:
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    @property
    def log(self) -> str:
        return (self.run / "server.log").read_text()


def edit_roster(sites: Sites) -> None:
    """A site is added that the experiment has no client for; then the server crashes."""
    sites.add("beyond")
    end = time.monotonic() + 30
    while "site beyond was added" not in sites.log and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(server_process(sites.run), signal.SIGKILL)


def kill(sites: Sites) -> None:
    os.killpg(sites.nodes["west"].pid, signal.SIGKILL)


def freeze(sites: Sites) -> None:
    os.killpg(sites.nodes["west"].pid, signal.SIGSTOP)


def none(sites: Sites) -> None:
    """The site is absent from the beginning."""


def change_settings(sites: Sites) -> None:
    """The run is stopped, and its app has more rounds when it is started again."""
    sites.supervisor.send_signal(signal.SIGTERM)
    assert sites.supervisor.wait(60) == 130
    file = sites.app / "federated/experiment.toml"
    file.write_text(file.read_text().replace(f"rounds = {ROUNDS}", f"rounds = {2 * ROUNDS}"))
    sites.supervise()


INCIDENTS: dict[str, tuple[Callable[[Sites], None], str, int]] = {  # what the log says of it, the exit code
    "roster": (edit_roster, r"roster: site beyond has client 4 on the roster, .* the run goes on without it", 0),
    "settings": (change_settings, r"rounds = 6 there, 12 here; name another directory, with -c 'from=", 2),
    "kill": (kill, r"round \d: without site west \(", 0),
    "frozen": (freeze, r"round \d: without site west \(", 0),
    "absent": (none, r"(?s)waiting for site west.*round 1: without site west \(not connected\)", 0),
}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize(
    "name", [name if name == "kill" else pytest.param(name, marks=pytest.mark.slow) for name in INCIDENTS]
)
def test_a_run_goes_on_or_ends_in_one_line(name, secure, tmp_path):
    incident, words, code = INCIDENTS[name]
    (home := tmp_path / "home").mkdir()
    with Processes(home, None) as processes:
        sites = Sites(processes, tmp_path, secure)
        sites.start(*(NAMES[:3] if name == "absent" else NAMES))
        sites.supervise()
        before = 0
        while not before:
            assert sites.supervisor.poll() is None, processes.log_tail("run")
            before = len(sites.rounds)
            time.sleep(0.1)
        incident(sites)
        assert sites.supervisor.wait(300) == code, processes.log_tail("run")
        logs = {file.stem: file.read_text(errors="replace") for file in home.glob("*.log")}
    assert not {log: text for log, text in logs.items() if "Traceback" in text}
    assert re.search(words, sites.log)
    if code:
        assert len([line for line in logs["run"].splitlines() if "starting again" in line]) == 0
        return
    assert len(sites.rounds) == ROUNDS
    seconds = [row["seconds"] for row in sites.rounds]
    if name != "roster":  # where the server starts again, it waits for its sites
        assert max(seconds[before:]) - min(seconds) <= GRACE + 10, seconds  # the stall: what is above an ordinary round
    metrics, gone = by_site(sites.run), set() if name == "roster" else {"west"}
    assert {site: bool(one["connected"]) for site, one in metrics.items()} == {one: one not in gone for one in NAMES}
    assert all(metrics[one]["bytes_up"] > 0 for one in NAMES if one not in gone)
    assert gone <= {one.site for one in read_sites(sites.run) if one.status == "absent"}
    assert "connected, introduced as site north" in logs["node-north"]
