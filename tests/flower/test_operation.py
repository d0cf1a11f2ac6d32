"""Operation of a server: lines of rounds, stale processes, states of past runs, modes of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.federation.engine import Engine
from thinwire.flower.apps import RoundLines, deployable, job_of
from thinwire.flower.client import KEEP_RUNS, Client, clean_states, client_file, private
from thinwire.flower.supervisor import _attempt, server_process, stop_server
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

QUICK = {"task.clients": 3, "cohort.size": 3, "local.steps": 1, "rounds": 4}


def served(experiment, path, killed_in: int = 0) -> list[str]:
    """Run a server with clients in memory, which may be killed in a round. Returns the lines of the log."""
    lines: list[str] = []
    job = job_of(experiment, None)
    written = RoundLines(experiment, lines.append)

    class Killed(InMemory):
        def send(self, requests, seconds):
            if len(lines) == killed_in:
                raise SystemExit
            super().send(requests, seconds)

    def prepare():
        return FlowerServer(experiment.engine, job, Killed(Client(Engine(), job)))

    with private():
        options = {"on_round": written.after, "on_continue": written.start_after, "prepare": prepare}
        execute(experiment, path, resume=True, **options)
    return lines


def test_lines_of_a_run_that_is_resumed(tmp_path):
    experiment = deployable(resolve("fedavg", "digits", QUICK))
    with pytest.raises(SystemExit):
        served(experiment, tmp_path / "fedavg", killed_in=3)
    lines = served(experiment, tmp_path / "fedavg")
    assert lines[0] == "resumed after round 2 of 4; waiting for clients"
    assert [line.split("  ")[0] for line in lines[1:]] == ["round 3/4", "round 4/4"]
    assert "3 clients" in lines[1]
    execute(experiment, tmp_path / "simulated")
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("fedavg", "simulated")]
    assert models[0] == models[1]


def test_files_of_a_deployed_run_are_private(tmp_path):
    served(deployable(resolve("fedavg", "digits", {**QUICK, "rounds": 1})), tmp_path / "run")
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


# -- states of clients -------------------------------------------------------------------------------------------------


def states_of(folder: Path, number: int, days: float) -> Path:
    run = folder / f"{number:016x}"
    run.mkdir(parents=True)
    for file in (run / "client-0.kept", run / "client-0.lock", run):
        file.touch()
        os.utime(file, (time.time() - days * 86_400,) * 2)
    return run


def test_states_of_past_runs_are_removed_by_age_and_number(tmp_path):
    current = states_of(tmp_path, 0, 1000)
    past = [states_of(tmp_path, 1 + days, days) for days in range(6)]
    other = tmp_path / "mine"
    other.mkdir()
    assert sorted(clean_states(current, runs=4)) == past[4:]
    assert sorted(clean_states(current, runs=2)) == [past[2], past[3]]
    assert sorted(tmp_path.iterdir()) == sorted([current, *past[:2], other])


def test_states_are_private_and_old_ones_go_when_a_run_begins(tmp_path):
    old = [states_of(tmp_path, 10 + days, days) for days in range(KEEP_RUNS + 1)][-1]
    context = SimpleNamespace(node_config={"state-dir": str(tmp_path)})
    with client_file(context, f"{3:016x}", 5) as (before, save):
        assert before is None
        save(b"state")
    with client_file(context, f"{3:016x}", 5) as (before, _):
        assert before == b"state"
    assert not old.exists()
    assert len(list(tmp_path.iterdir())) == KEEP_RUNS + 1
    for path in (tmp_path / f"{3:016x}", *(tmp_path / f"{3:016x}").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0


# -- processes ---------------------------------------------------------------------------------------------------------

# a process that holds the lock of a run directory, as Flower's server does
_HOLDS = """
import sys, time
from pathlib import Path
from thinwire.runs.files import locked, note_process
with locked(Path(sys.argv[1])):
    note_process(Path(sys.argv[1]))
    print("locked", flush=True)
    time.sleep(600)
"""

# a server that is killed at once
_KILLED = """
import os, signal, sys
from pathlib import Path
from thinwire.runs.files import locked, note_process
if os.fork() == 0:
    with locked(Path(sys.argv[2])):
        note_process(Path(sys.argv[2]))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def holder(folder: Path) -> subprocess.Popen:
    program = folder / "flwr-serverapp"
    program.write_text(_HOLDS)
    command = [sys.executable, str(program), str(folder / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_server_that_was_left_behind_is_stopped(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert server_process(run) is None
    with holder(tmp_path) as process:
        assert server_process(run) == process.pid
        stop_server(run)
        assert process.wait(10) == -signal.SIGTERM
    monkeypatch.setattr("thinwire.flower.supervisor.STOPPING", 0.5)
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)  # it cannot end in order
        while " T " not in Path(f"/proc/{process.pid}/stat").read_text():
            time.sleep(0.01)
        stop_server(run)
        assert process.wait(10) == -signal.SIGKILL
    assert server_process(run) is None


def test_a_server_that_ends_between_two_looks_is_noticed(tmp_path, monkeypatch):
    """`flwr run` goes on, since Flower notices late that its server was killed."""
    monkeypatch.setattr("thinwire.flower.supervisor.LAST_LINES", 0.1)
    monkeypatch.setattr("thinwire.flower.supervisor.POLL", 3.0)
    (tmp_path / "run").mkdir()
    (program := tmp_path / "flwr").write_text(f"#!{sys.executable}\nimport time\n{_KILLED}time.sleep(600)\n")
    program.chmod(0o755)
    monkeypatch.setattr("thinwire.flower.shutil.which", lambda *_, **__: str(program))
    why, is_hopeless = _attempt(["flwr", "run", str(tmp_path / "run")], tmp_path / "run", print)
    assert (why, is_hopeless) == ("the process of the server is gone", False)
