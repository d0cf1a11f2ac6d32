"""A supervisor of one run: it starts `flwr run`, and again after a crash, until the run is finished.

It runs on the machine of the SuperLink, as the same user. An attempt fails if the SuperLink or the server was
restarted or killed, if too few clients responded, or if the disk is full; the next attempt resumes the run at its last
checkpoint, after a pause that doubles while no round is finished:

    pause = min(30, 2 ** (attempts without a round - 1)) seconds
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.core.text import visible
from thinwire.deployment.private_files import private_folder
from thinwire.deployment.processes import FLOWER_ENV, DeploymentFailed
from thinwire.deployment.server_process import FAILED, HOPELESS, is_stale, server_process, stop_server
from thinwire.deployment.shutdown import GRACE
from thinwire.errors import CheckpointError, ConfigError
from thinwire.experiments.records import read_totals

LONGEST_PAUSE = 30.0
LAST_LINES = 3.0  # seconds for the last lines of a server that has ended
POLL = 0.25


@dataclass(frozen=True)
class Supervisor:
    """Keeps one run going.

    Args:
        app: the folder of the app.
        connection: the name of the connection to the SuperLink in Flower's configuration.
        run_dir: the run directory, on this machine.
        config: texts of `-c` for `flwr run`, such as `quorum=0.8`.
        restarts: attempts in a row that may end without a finished round.
        log: receives lines of the server and of the supervisor.
        flwr: Flower's command line; by default the one beside this Python, or in PATH.
    """

    app: Path
    connection: str
    run_dir: Path
    config: Sequence[str] = ()
    restarts: int = 30
    log: Callable[[str], None] = print
    flwr: str = ""

    def __post_init__(self) -> None:
        if not (self.app / "pyproject.toml").is_file():
            raise ConfigError(f"{self.app} is not an app; `thinwire flower-app METHOD {self.app}` writes one")
        if any(re.search(r"\brun-dir\s*=", text) for text in self.config):
            raise ConfigError("run-dir is set by --run-dir; leave it out of -c")
        if self.restarts < 0:
            raise ConfigError(f"--restarts must be 0 or more, not {self.restarts}")

    def run(self) -> dict[str, Any]:
        """Run until there is a summary; SIGTERM and Ctrl-C end the open round in order and raise `Interrupted`."""
        with _alone(self.run_dir), _Signals() as signals:
            failures = 0
            while True:
                if (done := read_totals(self.run_dir)) is not None:
                    return done
                before = _rounds(self.run_dir)
                attempt = _Attempt(self, signals)
                attempt.run()
                if signals.number:
                    raise Interrupted(signals.number)
                if (done := read_totals(self.run_dir)) is not None:
                    return done
                failures = 1 if _rounds(self.run_dir) > before else failures + 1
                if attempt.hopeless or failures > self.restarts:
                    raise DeploymentFailed(attempt.why or "the run ended without a summary")
                pause = pause_after(failures)
                self.log(f"supervisor: {attempt.why or 'the server ended'}; starting again in {pause:.0f} s")
                if signals.wait(pause):
                    raise Interrupted(signals.number)

    @property
    def command(self) -> list[str]:
        """The command of an attempt."""
        given = [word for text in (f'run-dir="{self.run_dir.resolve()}"', *self.config) for word in ("-c", text)]
        return [self.program, "run", str(self.app.resolve()), self.connection, "--stream", *given]

    @property
    def program(self) -> str:
        """Flower's command line."""
        beside = str(Path(sys.executable).parent)
        found = self.flwr or shutil.which("flwr", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
        if not found:
            raise ConfigError(f"the program flwr was not found in {beside} or in PATH; pip install 'thinwire[flower]'")
        return found


class Interrupted(BaseException):
    """A signal ended the supervisor, after the server had ended its round."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def pause_after(failures: int) -> float:
    """Seconds before the next attempt.

    >>> [pause_after(n) for n in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 30.0]
    """
    return min(LONGEST_PAUSE, 2.0 ** (failures - 1))


@dataclass(eq=False)
class _Attempt:
    """One `flwr run`, or a server that an earlier supervisor started and that still trains."""

    supervisor: Supervisor
    signals: _Signals
    why: str = ""  # it failed
    hopeless: bool = False  # because of its settings
    flower_run: str = ""  # the id that Flower gave it
    seen: int | None = None  # the process of the server
    _reader: threading.Thread | None = field(default=None, repr=False)

    def run(self) -> None:
        """Start the server or find it, and wait until it has ended or was stopped."""
        path, log = self.supervisor.run_dir, self.supervisor.log
        found = server_process(path)
        if found is not None and is_stale(found):
            log(f"supervisor: stopping process {found}, a server whose SuperLink is gone")
            stop_server(path, found, 0)
            found = None
        if found is not None:
            log(f"supervisor: process {found} trains this run; waiting for it")
            self._wait(None)
            return
        environment = {**os.environ, **FLOWER_ENV}
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "umask": 0o077}
        with subprocess.Popen(
            self.supervisor.command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, **options
        ) as client:
            self._reader = threading.Thread(target=self._read, args=(client,), daemon=True)
            self._reader.start()
            try:
                self._wait(client)
            finally:
                _end(client)
                self._reader.join(LAST_LINES)

    def _read(self, client: subprocess.Popen[bytes]) -> None:
        """Pass on what the server prints."""
        assert client.stdout is not None
        while data := client.stdout.readline(10_000):
            line = re.sub(r"\x1b\[[0-9;]*m", "", data.decode("utf-8", "replace")).rstrip("\n")
            if match := re.search(r"started run (\d+)", line):
                self.flower_run = match[1]
            if FAILED in line:
                self.why = visible(line.split(FAILED, 1)[1].strip(), 300)
            self.hopeless = self.hopeless or HOPELESS in line
            self.supervisor.log(visible(line))

    def _wait(self, client: subprocess.Popen[bytes] | None) -> None:
        """Wait for the end of the server; its process is known as soon as it has locked the run directory."""
        path = self.supervisor.run_dir
        gone_since = None
        while not self.signals.number:
            process = server_process(path)
            self.seen = process if process is not None else self.seen
            if client is not None and client.poll() is not None:
                self.why = self.why or f"`flwr run` ended with exit code {client.returncode}"
                return
            if self.seen is not None and process is None:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() > gone_since + (LAST_LINES if client else 0):
                    self.why = self.why or f"process {self.seen} of the server is gone"
                    self._stop_flower_run()
                    return
            self.signals.wait(POLL)
        self._stop()

    def _stop(self) -> None:
        """End the server in order."""
        process = server_process(self.supervisor.run_dir)
        if process is not None:
            self.supervisor.log(f"supervisor: stopping the server, process {process}, after its round")
            stop_server(self.supervisor.run_dir, process, GRACE + 20)
        self._stop_flower_run()

    def _stop_flower_run(self) -> None:
        """Tell the SuperLink that the run has ended, if it does not know; it may be gone itself."""
        if self.flower_run and read_totals(self.supervisor.run_dir) is None:
            command = [self.supervisor.program, "stop", self.flower_run, self.supervisor.connection]
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=30, check=False, env={**os.environ, **FLOWER_ENV})


class _Signals:
    """SIGTERM and SIGINT inside a `with` block are noted, and end waits."""

    def __init__(self) -> None:
        self.number = 0
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        """Wait; returns whether a signal has arrived."""
        return self._event.wait(seconds)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self._event.set()


def _end(client: subprocess.Popen[bytes]) -> None:
    """End the process that shows the log; the server is not its child."""
    if client.poll() is None:
        client.terminate()
        try:
            client.wait(10)
        except subprocess.TimeoutExpired:
            client.kill()


def _rounds(path: Path) -> int:
    """The number of complete lines in the metrics."""
    try:
        return (path / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Refuse a second supervisor of a run directory; the lock is a file beside it."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    private_folder(path.parent)
    with (path.parent / f".{path.name}.supervised").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"another supervisor runs {path}; stop it first") from error
        yield
