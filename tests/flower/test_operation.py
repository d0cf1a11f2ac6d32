"""Operation of a server: lines of rounds, SIGTERM, stale processes, states of past runs, modes of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.federation.engine import Engine
from thinwire.flower.apps import RoundLines, Stopped, deployable, job_of
from thinwire.flower.client import KEEP_RUNS, Client, InMemory, clean_states, client_file, private
from thinwire.flower.server import FlowerServer
from thinwire.flower.supervisor import _attempt, _stop, server_process
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

QUICK = {"task.clients": 3, "cohort.size": 3, "local.steps": 1, "rounds": 4}


def served(experiment, path, stop_in: int = 0, during: bool = True) -> list[str]:
    """Run a server with clients in memory; in one round it receives SIGTERM. Returns the lines of the log."""
    lines: list[str] = []
    job = job_of(experiment, None)
    written = RoundLines(experiment, lines.append, grace=600.0 if during else 0.01)

    class Signaled(InMemory):
        def send(self, requests, seconds):
            if written.last + 1 == stop_in:
                signal.raise_signal(signal.SIGTERM)
                while not during:  # this round does not end by itself
                    time.sleep(0.001)
            super().send(requests, seconds)

    def prepare():
        return FlowerServer(experiment.engine, job, lambda *_: Signaled(Client(Engine(), job)))

    with private(), written:
        options = {"on_round": written.after, "on_continue": written.start_after, "prepare": prepare}
        execute(experiment, path, resume=True, **options)
    return lines


@pytest.mark.parametrize("during", [True, False])
def test_sigterm_ends_the_round_in_order_and_the_run_continues(tmp_path, during):
    experiment = deployable(resolve("scaffold", "digits", QUICK))
    with pytest.raises(Stopped, match="the same command continues"):
        served(experiment, tmp_path / "run", stop_in=2, during=during)
    saved = sorted(file.name for file in (tmp_path / "run/checkpoints").glob("*.json"))
    assert saved[-1] == f"round-00000{2 if during else 1}.json"
    assert not (tmp_path / "run/summary.json").exists()
    if not during:  # clients in memory lost what they stored, which a resumed run of SCAFFOLD would need
        return
    experiment = deployable(resolve("fedavg", "digits", QUICK))
    with pytest.raises(Stopped, match="the same command continues"):
        served(experiment, tmp_path / "fedavg", stop_in=2)
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


def holder(folder: Path, parent: int) -> subprocess.Popen:
    program = folder / "flwr-serverapp"
    program.write_text(_HOLDS)
    command = [sys.executable, str(program), str(folder / "run"), "--parent-pid", str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_stale_server_is_killed_and_another_one_stopped_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.flower.processes.shutil.which", lambda *_, **__: "true")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lines: list[str] = []
    assert server_process(tmp_path / "run") is None
    with holder(tmp_path, ended.pid) as process:
        assert server_process(tmp_path / "run") == process.pid
        assert _attempt(["run"], tmp_path / "run", lines.append)  # it starts only when the stale server is gone
        assert process.wait(10) == -signal.SIGKILL
    assert "whose SuperLink is gone" in lines[0]
    with holder(tmp_path, os.getpid()) as process:
        _stop(tmp_path / "run")
        assert process.wait(10) == -signal.SIGTERM
    monkeypatch.setattr("thinwire.flower.supervisor.STOPPING", 0.0)
    with holder(tmp_path, os.getpid()) as process:
        process.send_signal(signal.SIGSTOP)  # it cannot end in order
        _stop(tmp_path / "run")
        assert process.wait(10) == -signal.SIGKILL
    assert server_process(tmp_path / "run") is None
