"""A deployment on this machine: a SuperLink, SuperNodes and one run, all stopped at the end.

Each part is a process and communicates over TLS; nodes authenticate by keys. Certificates and keys are created for the
run and deleted with it. Flower's telemetry, update check and dependency installation are off.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.flower import FLOWER_ENV, need_flower, with_path
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.node import REGISTER
from thinwire.flower.supervisor import FAILED, DeploymentFailed, without_colors
from thinwire.runs.execute import RunPlan, refuse_diverged
from thinwire.runs.loop import OnRound
from thinwire.runs.run_directory import RunFolder, Summary
from thinwire.secure.keys import make_key

CONNECTION = "thinwire"
NODE = (sys.executable, "-m", "thinwire", "site", "start")
STARTUP_SECONDS = 90.0


def deploy(
    experiment: Settings,
    path: Path,
    *,
    nodes: int,
    data_dir: Path | None = None,
    settings: dict[str, float | int] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    on_start: Callable[[Sequence[subprocess.Popen[bytes]]], None] | None = None,
    relay: Callable[[int], int] | None = None,
    node: Sequence[str] = (),
    edit_app: Callable[[Path], None] | None = None,
) -> Summary:
    """Run an experiment between processes of this machine, into a run directory.

    Args:
        experiment: the experiment.
        path: the run directory.
        nodes: number of SuperNodes; client i is on node i modulo this number.
        data_dir: folder that holds the datasets.
        settings: of the server: `seconds`, `quorum`, `tries`, `grace`, `over-select`, `wait` (see `RoundPolicy`).
        resume: continue an unfinished run.
        on_round: called after every round.
        on_start: called with the processes (SuperLink first, then the nodes in order) when all of them run.
        relay: maps the port of the SuperLink to the one that nodes connect to, such as that of a proxy.
        node: the command of a node, without the options of Flower; by default `thinwire site start --app`.
        edit_app: called with the folder of the app before it is run.
    """
    experiment, path = deployable(experiment), path.resolve()
    need_flower()
    plan = RunPlan.of(experiment, path, data_dir)
    clients = plan.settings.task.participating_clients or plan.settings.task.clients
    if not 1 <= nodes <= (clients or nodes):  # the number of clients of one's own task is in its data
        raise ConfigError(f"--nodes must be from 1 to the number of clients, {clients}, not {nodes}")
    if done := plan.finished(resume):
        return done
    folder, settings = RunFolder(path, plan.table), settings or {}
    with Processes(Path(tempfile.mkdtemp(prefix="thinwire-deploy-")), data_dir) as processes:
        app = processes.home / "app"
        write_app(plan.settings, app)
        if edit_app:
            edit_app(app)
        superlink = start_superlink(processes, nodes)
        port = relay(superlink.port) if relay else superlink.port
        started = start_nodes(processes, superlink, port, path / "nodes", node or (*NODE, "--app", str(app)))
        wait = settings.get("seconds", 600.0)  # all nodes are started here, so the first round waits for all of them
        options = {"run-dir": json.dumps(str(path)), "nodes": nodes, "wait": wait, **settings}
        config = " ".join(f"{key}={value}" for key, value in options.items())
        server = processes.start("server", ["flwr", "run", str(app), CONNECTION, "--stream", "-c", config])
        if on_start:
            on_start([superlink.process, *started])
        seen, over = 0, False
        while not over:
            over = server.poll() is not None or folder.summary() is not None
            records = folder.history()
            for record in records[seen:] if on_round else ():
                on_round(record)  # type: ignore[misc]
            seen = len(records)
            if not over and superlink.process.poll() is not None:
                raise DeploymentFailed(f"the SuperLink stopped: {processes.log_tail('superlink')}")
            time.sleep(0.0 if over else 0.2)
        if (summary := folder.summary()) is None:
            lines = [*processes.log("superlink"), *processes.log("server")]
            said = [line.split(FAILED, 1)[1] for line in lines if FAILED in line]
            raise DeploymentFailed(said[-1].strip() if said else f"the server stopped: {processes.log_tail('server')}")
    refuse_diverged(summary)
    return summary


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
        data = {"THINWIRE_DATA": str(data_dir.resolve())} if data_dir else {}
        self.env = {**os.environ, **FLOWER_ENV, **data, "FLWR_HOME": str(home)}
        # child processes must find Flower's programs and the same Python modules
        for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", Path(__file__).parents[2])):
            self.env[name] = os.pathsep.join([str(first), self.env.get(name, "")])

    def __enter__(self) -> Processes:
        with suppress(ValueError):  # outside of the main thread, which alone receives signals
            # SIGTERM ends processes as Ctrl-C does
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
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(process, signum)
                signaled |= alive
                time.sleep(0.05)
        shutil.rmtree(self.home, ignore_errors=True)

    def _alive(self) -> set[int]:
        """Ids of our processes that still run, and of all that they started: these have our FLWR_HOME."""
        alive = {process.pid for process in self.running if process.poll() is None}
        mark = f"FLWR_HOME={self.home}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):  # Linux only; other systems have no /proc
            with suppress(OSError):  # it has just ended, or is of another user; a zombie has none
                if any(variable.startswith(mark) for variable in file.read_bytes().split(b"\0")):
                    alive.add(int(file.parent.name))
        return alive

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process in a new session, so that Ctrl-C in the terminal does not reach it."""
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                with_path(command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.env, **(env or {})},
                cwd=self.home,
                start_new_session=True,
                umask=0o077,  # keys, databases and states are for their owner only
            )
        self.running.append(process)
        return process

    def call(self, command: Sequence[str]) -> None:
        """Run a short command and wait for it."""
        if self.start("call", command).wait():
            raise DeploymentFailed(f"{Path(command[0]).name} failed: {self.log_tail('call')}")

    def log(self, name: str) -> list[str]:
        """The lines that a process has printed."""
        file = self.home / f"{name}.log"
        return without_colors(file.read_bytes()).splitlines() if file.is_file() else []

    def log_tail(self, name: str) -> str:
        """The end of a log, as one line."""
        return " ".join(" ".join(self.log(name)[-5:]).split())[-400:] or "its log is empty"


class SuperLink(NamedTuple):
    """A running SuperLink, its port, and the keys of its nodes."""

    process: subprocess.Popen[bytes]
    port: int
    keys: list[Path]


def start_superlink(processes: Processes, nodes: int, database: Path | None = None) -> SuperLink:
    """Start a SuperLink and register the keys of its nodes.

    Args:
        processes: starts it.
        nodes: number of keys.
        database: file in which it stores keys and runs, so that it can be started again; in memory by default.
    """
    home, (port,) = processes.home, free_ports(1)
    make_certificate(processes)
    keys = [make_key(home / f"node-{i}") for i in range(nodes)]
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{home}/server.pem"\n'
    )
    options = (
        f"--host 127.0.0.1 --port {port} --enable-supernode-auth --disable-runtime-dependency-installation "
        "--ssl-certfile server.pem --ssl-keyfile server.key --ssl-ca-certfile server.pem"
    )
    stored = ["--database", str(database)] if database else []
    process = processes.start("superlink", ["flower-superlink", *options.split(), *stored])
    end = time.monotonic() + STARTUP_SECONDS
    while not listens(port):
        if process.poll() is not None or time.monotonic() > end:
            raise DeploymentFailed(f"the SuperLink did not start: {processes.log_tail('superlink')}")
        time.sleep(0.1)
    processes.call([sys.executable, "-c", REGISTER, CONNECTION, *(str(key.with_suffix(".pub")) for key in keys)])
    return SuperLink(process, port, keys)


def make_certificate(processes: Processes) -> None:
    """Write a certificate for this machine and its key, `server.pem` and `server.key`; it is its own authority."""
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -keyout server.key -out server.pem"
    names = ["-subj", "/CN=thinwire deploy", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    processes.call(["openssl", *options.split(), *names])


def start_nodes(
    processes: Processes, superlink: SuperLink, port: int, state: Path, node: Sequence[str] = NODE
) -> list[subprocess.Popen[bytes]]:
    """Start the SuperNodes.

    Args:
        processes: starts them.
        superlink: the SuperLink with their keys.
        port: the port that they connect to.
        state: folder of the client states.
        node: the command, without the options of Flower.
    """
    home, started, count = processes.home, [], len(superlink.keys)
    for i, (key, node_port) in enumerate(zip(superlink.keys, free_ports(count), strict=True)):
        config = f"partition-id={i} num-partitions={count} state-dir={json.dumps(str(state))}"
        command = [*node, "--node-config", config, "--superlink", f"127.0.0.1:{port}", "--port", str(node_port)]
        command += ["--root-certificates", str(home / "server.pem"), "--auth-supernode-private-key", str(key)]
        # nodes share the cores; threads that wait for one another use them up
        threads = str(max(1, (os.cpu_count() or 1) // count))
        # Flower unpacks the app into its home without a lock, so nodes must not share one
        env = {"FLWR_HOME": str(home / f"node-{i}.home"), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        started.append(processes.start(f"node-{i}", command, env))
    return started


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def listens(port: int) -> bool:
    """Whether a process listens on a port of this machine."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False
