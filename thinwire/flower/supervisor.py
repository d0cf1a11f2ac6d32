"""A supervisor of one run: it starts `flwr run`, and again after a crash, until the run is finished.

It runs on the machine of the SuperLink, as the same user. An attempt fails if the SuperLink or the server was restarted
or killed, if too few clients responded, or if the disk is full; the next one resumes the run at its last checkpoint,
after a pause that doubles while no round is finished: 1, 2, 4, ... 30 seconds.

Flower starts the server, `flwr-serverapp`, below the SuperLink. If the SuperLink is killed, the server may go on for
minutes without it, and hold the lock of the run directory; the next attempt kills it. If the server is killed, Flower
notices late; the lock tells at once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import CheckpointError, ConfigError
from thinwire.flower.processes import FAILED, FLOWER_ENV, HOPELESS, DeploymentFailed, with_path
from thinwire.runs.files import PROCESS, read_json, writer
from thinwire.runs.records import read_records, read_totals

STOPPING = 50.0  # seconds that a server has to end its round
LAST_LINES = 3.0  # seconds for the last lines of a server that has ended
POLL = 0.25


def supervise(
    app: Path,
    connection: str,
    run_dir: Path,
    config: Sequence[str] = (),
    restarts: int = 30,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Keep one run going; returns its summary. SIGTERM and Ctrl-C end the open round in order: KeyboardInterrupt.

    Args:
        app: the folder of the app.
        connection: the name of the connection to the SuperLink in Flower's configuration.
        run_dir: the run directory, on this machine.
        config: texts of `-c` for `flwr run`, such as `quorum=0.8`.
        restarts: attempts in a row that may end without a finished round.
        log: receives lines of the server and of the supervisor.
    """
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(f"{app} is not an app; `thinwire app METHOD {app}` writes one")
    if any(re.search(r"\brun-dir\s*=", text) for text in config):
        raise ConfigError("run-dir is set by --run-dir; leave it out of -c")
    given = [word for text in (f'run-dir="{run_dir.resolve()}"', *config) for word in ("-c", text)]
    command = ["run", str(app.resolve()), connection, "--stream", *given]
    failures = 0
    while (done := read_totals(run_dir)) is None:
        before = _rounds(run_dir)
        said = _attempt(command, run_dir, log)
        failures = 1 if _rounds(run_dir) > before else failures + 1
        if read_totals(run_dir) is None:
            if HOPELESS in said or failures > restarts:
                raise DeploymentFailed(said[FAILED])
            pause = min(30, 2 ** (failures - 1))
            log(f"supervisor: {said[FAILED]}; starting again in {pause} s")
            time.sleep(pause)
    return done


def _rounds(run_dir: Path) -> int:
    return len(read_records(run_dir / "metrics.jsonl"))


def _attempt(command: list[str], run_dir: Path, log: Callable[[str], None]) -> dict[str, str]:
    """One `flwr run`, until it or its server has ended; returns what was said: why it failed, by `FAILED`."""
    while (server := server_process(run_dir)) is not None:  # that of another supervisor, or of one that was killed
        parent = re.search(rb"--parent-pid\0(\d+)", _command(server))
        if parent and not Path(f"/proc/{int(parent[1])}").exists():
            log(f"supervisor: killing process {server}, a server whose SuperLink is gone")
            _kill(server, signal.SIGKILL)
        time.sleep(POLL)
    said: dict[str, str] = {}
    client = subprocess.Popen(
        with_path(["flwr", *command]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **FLOWER_ENV},
        umask=0o077,
        start_new_session=True,  # signals of the terminal do not reach it
    )

    def read() -> None:
        for data in client.stdout or ():
            line = visible(re.sub(r"\x1b\[[0-9;]*m", "", data.decode("utf-8", "replace")).rstrip("\n"))
            log(line)
            for key in (FAILED, HOPELESS):
                if found := re.search(f"{key}(.*)", line):
                    said[key] = found[1].strip()

    with client:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            while client.poll() is None and (server is None or server_process(run_dir) == server):
                server = server or server_process(run_dir)
                time.sleep(POLL)
        except KeyboardInterrupt:
            _stop(run_dir)
            raise
        finally:
            with suppress(subprocess.TimeoutExpired):
                client.wait(LAST_LINES)
            gone = client.poll() is None
            client.kill()
            reader.join(LAST_LINES)
    why = f"process {server} of the server is gone" if gone else f"`flwr run` ended, {client.returncode}"
    return {FAILED: why, **said}


def server_process(run_dir: Path) -> int | None:
    """The process of Flower that writes to a run directory on this machine; None if there is none."""
    with suppress(CheckpointError, KeyError, TypeError, ValueError):
        process = int(read_json(run_dir / PROCESS)["pid"])
        if writer(run_dir) == "running" and b"flwr-serverapp" in _command(process):
            return process
    return None


def _command(process: int) -> bytes:
    """The command line of a process; empty if it is gone, or of another user."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def _stop(run_dir: Path) -> None:
    """Let the server end its round in order; it is killed if it takes too long."""
    end = time.monotonic() + STOPPING
    if server := server_process(run_dir):
        _kill(server, signal.SIGTERM)
        while server_process(run_dir) == server:
            if time.monotonic() > end:
                _kill(server, signal.SIGKILL)
            time.sleep(POLL)


def _kill(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(process, number)
