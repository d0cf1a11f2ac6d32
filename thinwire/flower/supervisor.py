"""A supervisor of one run: it starts `flwr run`, and again after a crash, until the run is finished.

It runs on the machine of the SuperLink, as the same user. An attempt fails if the SuperLink or the server was restarted
or killed, if too few clients responded, or if the disk is full; the next one resumes the run at its last checkpoint,
after a pause that doubles while no round is finished: 1, 2, 4, ... 30 seconds.

Flower starts the server, `flwr-serverapp`, below the SuperLink. If the SuperLink is killed, the server may go on for
minutes without it, and hold the lock of the run directory; the next attempt stops it. If the server is killed, Flower
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
from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.flower import FLOWER_ENV, with_path
from thinwire.runs.files import PROCESS, read_json, writer
from thinwire.runs.records import read_records, read_totals

FAILED = "thinwire failed:"  # prefix of the server's error message in the log
HOPELESS = "thinwire: the same command would fail again"  # the line after it, if the settings are wrong
STOPPING = 10.0  # seconds that a server has to end after SIGTERM
LAST_LINES = 3.0  # seconds for the last lines of a server that has ended
POLL = 0.25


class DeploymentFailed(ThinwireError):
    """A process of a deployment failed."""


def supervise(
    app: Path,
    connection: str,
    run_dir: Path,
    config: Sequence[str] = (),
    restarts: int = 30,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Keep one run going; returns its summary. When it is interrupted, it stops the server.

    Args:
        app: the folder of the app.
        connection: the name of the connection to the SuperLink in Flower's configuration.
        run_dir: the run directory, on this machine. It has one supervisor: servers that others started are stopped.
        config: texts of `-c` for `flwr run`, such as `quorum=0.8`.
        restarts: attempts in a row that may end without a finished round.
        log: receives lines of the server and of the supervisor.
    """
    if not (app / "pyproject.toml").is_file():
        raise ConfigError(f"{app} is not an app; `thinwire app METHOD {app}` writes one")
    if any(re.search(r"\brun-dir\s*=", text) for text in config):
        raise ConfigError("run-dir is set by --run-dir; leave it out of -c")
    given = [word for text in (f'run-dir="{run_dir.resolve()}"', *config) for word in ("-c", text)]
    command = ["flwr", "run", str(app.resolve()), connection, "--stream", *given]
    failures = 0
    if (done := read_totals(run_dir)) is not None:
        begin = f"-c 'from=\"{run_dir}\"'"
        log(f"supervisor: {run_dir} is finished; for other settings name another --run-dir, and {begin}")
    while (done := read_totals(run_dir)) is None:
        before = _rounds(run_dir)
        stop_server(run_dir)
        why, is_hopeless = _attempt(command, run_dir, log)
        failures = 1 if _rounds(run_dir) > before else failures + 1
        if read_totals(run_dir) is None:
            if is_hopeless or failures > restarts:
                raise DeploymentFailed(why)
            pause = min(30, 2 ** (failures - 1))
            log(f"supervisor: {why}; starting again in {pause} s")
            time.sleep(pause)
    return done


def _rounds(run_dir: Path) -> int:
    return len(read_records(run_dir / "metrics.jsonl"))


def _attempt(command: list[str], run_dir: Path, log: Callable[[str], None]) -> tuple[str, bool]:
    """One `flwr run`, until it or its server has ended; returns why, and whether the next one would fail again."""
    said, before = dict[str, str](), _note(run_dir)
    client = subprocess.Popen(
        with_path(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **FLOWER_ENV},
        umask=0o077,
        start_new_session=True,  # signals of the terminal do not reach it
    )

    def read() -> None:
        for data in client.stdout or ():
            line = visible(without_colors(data.rstrip(b"\n")))
            log(line)
            for key in (FAILED, HOPELESS):
                if key in line:
                    said[key] = line.split(key, 1)[1].strip()

    with client:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            # every server writes a note of its own, so that one that has ended between two looks is noticed
            while client.poll() is None and (_note(run_dir) == before or writer(run_dir) == "running"):
                time.sleep(POLL)
        except KeyboardInterrupt:
            stop_server(run_dir)
            raise
        finally:
            with suppress(subprocess.TimeoutExpired):
                client.wait(LAST_LINES)
            gone = client.poll() is None
            client.kill()
            reader.join(LAST_LINES)
    why = "the process of the server is gone" if gone else f"`flwr run` ended, {client.returncode}"
    return said.get(FAILED, why), HOPELESS in said


def _note(run_dir: Path) -> int:
    """When a process last noted that it writes to a run directory; 0 if there is no such note."""
    file = run_dir / PROCESS
    return file.stat().st_mtime_ns if file.is_file() else 0


def server_process(run_dir: Path) -> int | None:
    """The process of Flower that writes to a run directory on this machine; None if there is none."""
    with suppress(CheckpointError, KeyError, TypeError, ValueError, OSError):
        process = int(read_json(run_dir / PROCESS)["pid"])
        if writer(run_dir) == "running" and b"flwr-serverapp" in Path(f"/proc/{process}/cmdline").read_bytes():
            return process
    return None


def stop_server(run_dir: Path) -> None:
    """Stop the server of a run directory, if one runs; the next one continues after the last round."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + STOPPING
        if server := server_process(run_dir):
            os.kill(server, number)
        while server and server_process(run_dir) == server and time.monotonic() < end:
            time.sleep(POLL)


def without_colors(data: bytes) -> str:
    """The text of a log, without the colors of Flower."""
    return re.sub(r"\x1b\[[0-9;]*m", "", data.decode("utf-8", "replace"))
