"""The supervisor: it starts a server again until the run is finished, with pauses and a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.supervisor import DeploymentFailed, supervise
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute

EXPERIMENT = deployable(
    resolve("fedavg", "digits", {"task.clients": 3, "cohort.size": 3, "local.steps": 1, "rounds": 4})
)

# A program that is started as `flwr run` and starts a server as Flower does, in a process of its own. The first time
# the SuperLink is unavailable; the second time the server is killed in round 3; the third time it finishes.
_PROGRAM = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path
folder = Path(__file__).parent
with (folder / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
times = (folder / "calls").read_text().count("run ")
if times == 1:
    sys.exit("Connection to the SuperLink is unavailable.")
print("Successfully started run 4711", flush=True)
server = folder / "flwr-serverapp"
command = [sys.executable, str(server), sys.argv[6], str(times), "--parent-pid", str(os.getpid())]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
code = subprocess.call(command)
if code < 0:
    signal.pause()  # the SuperLink does not know yet
"""
_SERVER = """
import os, signal, sys
from pathlib import Path
from thinwire.flower.apps import read_experiment
from thinwire.runs.execute import execute
folder = Path(__file__).parent
def on_round(record):
    print(f"round {record.round}", flush=True)
    if record.round == 3 and sys.argv[2] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
run = Path(sys.argv[1].partition("=")[2].strip('"'))
execute(read_experiment(folder / "app/federated/experiment.toml"), run, resume=True, on_round=on_round)
"""


@pytest.fixture
def program(tmp_path, monkeypatch) -> str:
    write_app(EXPERIMENT, tmp_path / "app")
    (tmp_path / "flwr").write_text(_PROGRAM.replace("{python}", sys.executable))
    (tmp_path / "flwr-serverapp").write_text(_SERVER)
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setattr("thinwire.flower.shutil.which", lambda *_, **__: str(tmp_path / "flwr"))
    return str(tmp_path / "flwr")


@pytest.mark.slow
def test_a_killed_server_is_started_again_and_the_result_is_the_same(tmp_path, program):
    lines: list[str] = []
    config = ("quorum=0.8", "seconds=5.0")
    summary = supervise(tmp_path / "app", "mine", tmp_path / "runs/x", config, log=lines.append)
    execute(EXPERIMENT, tmp_path / "simulated")
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("runs/x", "simulated")]
    assert models[0] == models[1]
    assert summary["rounds"] == 4
    again = [line for line in lines if "starting again" in line]
    assert len(again) == 2
    assert "`flwr run` ended, 1; starting again in 1 s" in again[0]
    assert "the process of the server is gone" in again[1]
    calls = (tmp_path / "calls").read_text().splitlines()
    run = f'run {tmp_path}/app mine --stream -c run-dir="{tmp_path}/runs/x" -c quorum=0.8 -c seconds=5.0'
    assert calls == [run] * 3
    assert supervise(tmp_path / "app", "mine", tmp_path / "runs/x") == summary
    assert (tmp_path / "calls").read_text().splitlines() == calls  # nothing is started


def test_it_gives_up_after_the_limit_or_if_the_settings_are_wrong(tmp_path, program):
    for text, restarts, starts in (
        ("thinwire failed: round 1: 1 of 3 clients sent an upload", 1, 2),
        ("thinwire failed: quorum must be above 0\nthinwire: the same command would fail again", 30, 1),
    ):
        Path(program).write_text(f"#!/bin/sh\necho call >> {tmp_path}/calls\nprintf '{text}\\n'\n")
        (tmp_path / "calls").unlink(missing_ok=True)
        with pytest.raises(DeploymentFailed, match=r"^(round 1|quorum)"):
            supervise(tmp_path / "app", "mine", tmp_path / "run", restarts=restarts)
        assert (tmp_path / "calls").read_text().count("call") == starts


def test_a_signal_ends_it(tmp_path, program):
    Path(program).write_text("#!/bin/sh\nexec sleep 600\n")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        supervise(tmp_path / "app", "mine", tmp_path / "run")


@pytest.mark.parametrize(
    ("app", "config", "text"), [("none", (), "is not an app"), ("app", ('run-dir="x"',), "--run-dir")]
)
def test_wrong_settings_are_refused(tmp_path, program, app, config, text):
    with pytest.raises(ConfigError, match=text):
        supervise(tmp_path / app, "mine", tmp_path / "run", config)


@pytest.mark.slow
def test_real_processes_stop_and_continue(tmp_path):
    """SIGTERM to `thinwire site supervise` stops the server; the same command finishes the run."""
    pytest.importorskip("flwr")
    from thinwire.flower.local import CONNECTION, Processes, start_nodes, start_superlink

    options = {"task.clients": 2, "cohort.size": 2, "local.epochs": 1, "rounds": 4}
    experiment = deployable(resolve("scaffold", "digits", options))
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    command = [sys.executable, "-m", "thinwire", "site", "supervise", str(home / "app"), CONNECTION]
    command += ["--run-dir", str(run), "-c", "quorum=1.0 seconds=60.0"]
    with Processes(home, None) as processes:
        write_app(experiment, home / "app")
        link = start_superlink(processes, 2, home / "superlink.db")
        start_nodes(processes, link, link.port, tmp_path / "states")
        first = processes.start("first", command)
        while not (run / "metrics.jsonl").is_file() or not (run / "metrics.jsonl").read_text():
            assert first.poll() is None
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 130
        second = processes.start("second", command)
        assert second.wait(300) == 0
    assert "round 1/4" in (run / "server.log").read_text()
    execute(experiment, tmp_path / "simulated")
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "simulated/model.safetensors").read_bytes()
    for path in (run, *run.rglob("*"), *(tmp_path / "states").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_kills_of_server_superlink_and_nodes(tmp_path):
    pytest.importorskip("flwr")
    from benchmarks.faults.kills import killed_run

    found = killed_run(tmp_path, kills=3, nodes=2, rounds=8, seed=5)
    assert sum(found["kills"].values()) == 3


def test_the_command_refuses_in_one_line(thinwire, tmp_path):
    code, _, err = thinwire("site", "supervise", "nothing", "mine", "--run-dir", str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1)
    assert "thinwire app" in err


def test_the_supervisor_is_light():
    code = "import sys, thinwire.flower.supervisor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
