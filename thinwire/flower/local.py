"""A deployment on this machine: a SuperLink, SuperNodes and one run, all stopped at the end.

Each part is a process and communicates over TLS; nodes authenticate by keys. Certificates and keys are created for the
run and deleted with it. Flower's telemetry, update check and dependency installation are off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.flower import need_flower
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import deployable
from thinwire.flower.node import REGISTER
from thinwire.flower.processes import FAILED, DeploymentFailed, Processes, free_ports, make_certificate, make_key
from thinwire.runs.execute import RunPlan, refuse_diverged
from thinwire.runs.loop import OnRound
from thinwire.runs.run_directory import RunFolder, Summary

CONNECTION = "thinwire"


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
    low_latency: bool = True,
    pinned: bool = True,
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
        low_latency: run `thinwire site start` (`node.py`), or else `flower-supernode`.
        pinned: let `thinwire site start` load the app, its data and its model once (`--app`), not for every message.
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
    folder, settings = RunFolder(path, plan.settings), settings or {}
    with Processes(Path(tempfile.mkdtemp(prefix="thinwire-deploy-")), data_dir) as processes:
        app = processes.home / "app"
        write_app(plan.settings, app)
        if edit_app:
            edit_app(app)
        superlink = start_superlink(processes, nodes)
        port = relay(superlink.port) if relay else superlink.port
        supernodes = start_nodes(processes, superlink, port, path / "nodes", low_latency, pinned)
        wait = settings.get("seconds", 600.0)  # all nodes are started here, so the first round waits for all of them
        options = {"run-dir": json.dumps(str(path)), "nodes": nodes, "wait": wait, **settings}
        config = " ".join(f"{key}={value}" for key, value in options.items())
        server = processes.start("server", ["flwr", "run", str(app), CONNECTION, "--stream", "-c", config])
        if on_start:
            on_start([superlink.process, *supernodes])
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


class SuperLink(NamedTuple):
    """A running SuperLink, its port, the keys of its nodes and a port for each node."""

    process: subprocess.Popen[bytes]
    port: int
    keys: list[Path]
    node_ports: list[int]


def start_superlink(processes: Processes, nodes: int, database: Path | None = None) -> SuperLink:
    """Start a SuperLink and register the keys of its nodes.

    Args:
        processes: starts it.
        nodes: number of keys.
        database: file in which it stores keys and runs, so that it can be started again; in memory by default.
    """
    home, pem = processes.home, processes.home / "server.pem"
    port, *node_ports = free_ports(nodes + 1)
    make_certificate(home)
    keys = [make_key(home / f"node-{i}") for i in range(nodes)]
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{pem}"\n'
    )
    options = (
        f"--host 127.0.0.1 --port {port} --enable-supernode-auth --disable-runtime-dependency-installation".split()
    )
    options += ["--ssl-certfile", str(pem), "--ssl-keyfile", str(home / "server.key"), "--ssl-ca-certfile", str(pem)]
    options += ["--database", str(database)] if database else []
    process = processes.start("superlink", ["flower-superlink", *options])
    processes.wait_for_port(process, port)
    processes.call([sys.executable, "-c", REGISTER, CONNECTION, *(str(key.with_suffix(".pub")) for key in keys)])
    return SuperLink(process, port, keys, node_ports)


def start_nodes(
    processes: Processes, superlink: SuperLink, port: int, state: Path, low_latency: bool, pinned: bool = False
) -> list[subprocess.Popen[bytes]]:
    """Start the SuperNodes.

    Args:
        processes: starts them.
        superlink: the SuperLink with their keys.
        port: the port that they connect to.
        state: folder of the client states.
        low_latency: run `thinwire site start` instead of `flower-supernode`.
        pinned: with `--app`.
    """
    home, started = processes.home, []
    own = [sys.executable, "-m", "thinwire", "site", "start", *(["--app", str(home / "app")] if pinned else [])]
    for i, (key, node_port) in enumerate(zip(superlink.keys, superlink.node_ports, strict=True)):
        config = f"partition-id={i} num-partitions={len(superlink.keys)} state-dir={json.dumps(str(state))}"
        command = [*(own if low_latency else ["flower-supernode"]), "--node-config", config]
        command += ["--superlink", f"127.0.0.1:{port}", "--port", str(node_port)]
        command += ["--root-certificates", str(home / "server.pem"), "--auth-supernode-private-key", str(key)]
        # nodes share the cores; threads that wait for one another use them up
        threads = str(max(1, (os.cpu_count() or 1) // len(superlink.keys)))
        # Flower unpacks the app into its home without a lock, so nodes must not share one
        env = {"FLWR_HOME": str(home / f"node-{i}.home"), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        started.append(processes.start(f"node-{i}", command, env))
    return started
