"""Processes of a deployment: started with logs, and all ended when a `with` block is left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, ThinwireError

FLOWER_ENV = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_COLOR": "1",
}
STARTUP_SECONDS = 90.0


class DeploymentFailed(ThinwireError):
    """A process of a deployment failed."""


class Processes:
    """Processes that are ended, with everything they started, when the `with` block is left.

    Args:
        home: folder for logs, keys and Flower's files; it is removed at the end.
        data_dir: folder that holds the datasets.
    """

    def __init__(self, home: Path, data_dir: Path | None) -> None:
        self.home = home
        self.old_handler: Any = None
        self.running: list[subprocess.Popen[bytes]] = []
        self.sessions: set[int] = set()
        data = {"THINWIRE_DATA": str(data_dir.resolve())} if data_dir else {}
        self.env = {**os.environ, **FLOWER_ENV, **data, "FLWR_HOME": str(home)}
        # child processes must find Flower's programs and the same Python modules
        self.env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), self.env.get("PATH", "")])
        self.env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), self.env.get("PYTHONPATH", "")])

    def __enter__(self) -> Processes:
        if threading.current_thread() is threading.main_thread():  # SIGTERM ends processes as Ctrl-C does
            self.old_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self.old_handler is not None:
            signal.signal(signal.SIGTERM, self.old_handler)
        for signum, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            end = time.monotonic() + seconds
            signaled: set[int] = set()
            while time.monotonic() < end and (alive := self._alive()):
                for process in alive - signaled:  # also processes that were started in the meantime
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(process, signum)
                signaled |= alive
                time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    def _alive(self) -> set[int]:
        """Ids of our processes that still run, and of all processes that they started."""
        alive = {process.pid for process in self.running if process.poll() is None}
        if Path("/proc/self/environ").is_file():
            return alive | self._descendants()
        listed = subprocess.run(["ps", "-axww", "-o", "pid=,args="], capture_output=True, text=True, check=False).stdout
        ours = [line.split(None, 1) for line in listed.splitlines() if str(self.home) in line]
        return alive | {int(number) for number, _ in ours}

    def _descendants(self) -> set[int]:
        """Processes with our FLWR_HOME in their environment; Flower starts some in sessions of their own."""
        mark = f"FLWR_HOME={self.home}".encode()
        found: set[int] = set()
        session: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] == "Z":  # has ended, but its parent has not waited for it
                    continue
                session[int(entry.name)] = int(fields[3])
                if any(variable.startswith(mark) for variable in (entry / "environ").read_bytes().split(b"\0")):
                    found.add(int(entry.name))
                    self.sessions.add(int(fields[3]))
        # some, such as Ray's, overwrite their environment, but share a session with others
        return found | {process for process, own in session.items() if own in self.sessions - {os.getsid(0)}}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process in a new session, so that Ctrl-C in the terminal does not reach it."""
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self._with_path(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.env, **(env or {})},
                cwd=self.home,
                start_new_session=True,
                umask=0o077,  # databases and states are for their owner only
            )
        self.running.append(process)
        return process

    def call(self, command: Sequence[str]) -> None:
        """Run a short command and wait for it."""
        done = subprocess.run(self._with_path(command), capture_output=True, env=self.env, cwd=self.home, check=False)
        if done.returncode:
            text = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
            raise DeploymentFailed(f"the nodes could not be registered: {' '.join(text)[-300:]}")

    def wait_for_port(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Wait until the SuperLink listens on a port."""
        end = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < end:
            if process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
                return
            except OSError:
                time.sleep(0.1)
        raise DeploymentFailed(f"the SuperLink did not start: {self.log_tail('superlink')}")

    def log(self, name: str) -> list[str]:
        """The lines that a process has printed."""
        file = self.home / f"{name}.log"
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()

    def log_tail(self, name: str) -> str:
        """The end of a log, as one line."""
        return " ".join(" ".join(self.log(name)[-5:]).split())[-400:] or "its log is empty"

    def _with_path(self, command: Sequence[str]) -> list[str]:
        program = shutil.which(command[0], path=self.env["PATH"])
        if program is None:
            raise ConfigError(f"the program {command[0]} was not found in the folder of {sys.executable} or in PATH")
        return [program, *command[1:]]


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
