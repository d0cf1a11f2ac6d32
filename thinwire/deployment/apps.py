"""The ClientApp and the ServerApp of a Flower app.

    app = client_app(job)                     app = server_app(experiment, job)

`job(node_config)` returns the `Job` of a machine: on a node, with its local examples; on the server (None), with the
test set. Model, method and seed must be the same on all machines; this is checked before training starts.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.errors import CheckpointError, ConfigError, ThinwireError, WireError
from thinwire.experiments.build import build_job
from thinwire.experiments.config import Checkpointing, Experiment, from_table
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.files import append, read_json, write_atomically
from thinwire.experiments.records import rounds_in
from thinwire.experiments.task_files import OWN
from thinwire.experiments.task_record import settled
from thinwire.experiments.toml import read_toml
from thinwire.flower import need_flower
from thinwire.flower.client import Client
from thinwire.flower.client_store import ClientStore, Request, Response
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.protocol.contract import Contract
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine

MakeJob = Callable[[Mapping[str, Any] | None], Job]
FAILED = "thinwire failed:"  # prefix of the server's error message in the log


def deployable(experiment: Experiment) -> Experiment:
    """The experiment as a deployment runs it: clients train separately, and every round is checkpointed.

    With a checkpoint per round, a restarted server repeats at most the round whose uploads its clients sent last.
    Clients derive their learning rates from the method that they were started with, so the server cannot halve them.
    """
    if experiment.checkpoint.on_divergence == "retry":
        raise ConfigError(
            "on_divergence = 'retry' is for simulations: clients of a deployment cannot go back; write 'stop'"
        )
    if experiment.task.kind.startswith(OWN):
        raise ConfigError(
            f"the task {experiment.task.label!r} is an object of this process, which nodes do not have; write it into "
            "a file and name it, such as my_task.py:task"
        )
    if experiment.task.scale == "estimated":
        raise ConfigError(
            "task.scale = 'estimated' exchanges sums before the first round, which a deployment does not do yet; write "
            "task.scale = 'standard', or 'unit', or simulate"
        )
    engine = replace(experiment.engine, backend="loop", chunk=1)
    return replace(experiment, engine=engine, checkpoint=Checkpointing(1))


def read_experiment(path: Path) -> Experiment:
    """Read the experiment of an app folder."""
    return deployable(from_table(read_toml(path)))


def job_of(experiment: Experiment, node_config: Mapping[str, Any] | None) -> Job:
    """The job of a machine that can read the whole dataset: the same partition as in the simulation."""
    folder = (node_config or {}).get("data-dir") or os.environ.get("THINWIRE_DATA")
    return _job_from(experiment, Path(str(folder)) if folder else None)


@lru_cache(1)  # Flower's simulation runs many nodes in one process
def _job_from(experiment: Experiment, folder: Path | None) -> Job:
    return settled(experiment, folder)[1] if experiment.fingerprint else build_job(experiment, folder)


def clients_of_node(node_config: Mapping[str, Any], clients: int) -> list[int]:
    """The clients of a node: those whose index modulo `num-partitions` is its `partition-id`.

    >>> clients_of_node({"partition-id": 1, "num-partitions": 4}, 10)
    [1, 5, 9]
    """
    part, parts = node_config.get("partition-id"), node_config.get("num-partitions")
    if not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
        raise ConfigError(f"--node-config needs partition-id=0 num-partitions={clients} (from 0), not {node_config!r}")
    return list(range(part, clients, parts))


# -- on a node ---------------------------------------------------------------------------------------------------------


def client_app(job: MakeJob, mods: Sequence[Any] = ()) -> Any:
    """A Flower ClientApp.

    Args:
        job: returns the job of a node, given its `--node-config`.
        mods: Flower mods.

    Client states are stored in the folder `state-dir` of the `--node-config`, so that a run can be resumed after the
    server was restarted. Without `state-dir`, Flower stores them for as long as one run of the server lasts.
    """
    need_flower()
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from thinwire.flower.grid_transport import pack, unpack

    app = ClientApp(mods=list(mods))

    def open_node(context: Context) -> tuple[Client, list[int]]:
        config = dict(context.node_config)
        client = _client_of(job(config), str(config.get("device", "cpu")))
        return client, clients_of_node(config, len(client.job.task.clients))

    def query(message: Message, context: Context) -> Message:
        client, local = open_node(context)
        return Message(pack({"clients": local, "schema": client.contract.schema.digest}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        (run, number, accepted), data = unpack(message.content, run=str, client=int, accepted=int)
        try:
            client, local = open_node(context)
            if number not in local:
                raise WireError(f"client {number} is not on this node, which has {local}")
            _check_data(client)
            with _state_file(context, run, number) as file:
                response, state = client.respond(number, Request(data, accepted), file.load(client))
                file.save(state.dump(client.first))
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        fields = {"client": number, **{key: value for key, value in response._asdict().items() if key != "data"}}
        return Message(pack(fields, response.data), reply_to=message)

    app.query()(query)
    app.train()(train)
    return app


@lru_cache(1)
def _client_of(job: Job, device: str) -> Client:
    return Client(LocalEngine(device), job)


@lru_cache(1)
def _check_data(client: Client) -> None:
    """Check the data of this node once, before it trains."""
    client.federation.try_model()


class _StateFile:
    """Storage of one client's state: a file, or the context that Flower stores for a node."""

    def __init__(self, context: Any, number: int, file: Path | None) -> None:
        self.context, self.name, self.file = context, f"client-{number}", file

    def load(self, client: Client) -> ClientStore | None:
        """The stored state; None if there is none or it is damaged: then the client requests the full state."""
        try:
            if self.file:
                return ClientStore.load(self.file.read_bytes(), client.first) if self.file.is_file() else None
            record = self.context.state.get(self.name)
            return ClientStore.load(record["kept"], client.first) if record else None
        except CheckpointError:
            return None

    def save(self, state: bytes) -> None:
        """Store the state; called before the upload is sent."""
        if self.file:
            write_atomically(self.file, state)
        else:
            from flwr.app import ConfigRecord

            self.context.state[self.name] = ConfigRecord({"kept": state})


@contextmanager
def _state_file(context: Any, run: str, number: int) -> Iterator[_StateFile]:
    """The storage of a client, locked while it is used."""
    folder = context.node_config.get("state-dir")
    if not folder:
        yield _StateFile(context, number, None)
        return
    if not re.fullmatch(r"[0-9a-f]{16}", run):  # it is used as the name of a folder
        raise WireError(f"the name of the run must be 16 hexadecimal digits, not {run[:40]!r}")
    states = Path(str(folder)) / run
    states.mkdir(parents=True, exist_ok=True)
    with (states / f"client-{number}.lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # a repeated request waits for the first
        except ImportError:
            pass
        yield _StateFile(context, number, states / f"client-{number}.kept")


# -- on the server -----------------------------------------------------------------------------------------------------


def server_app(experiment: Experiment, job: MakeJob, on_message: OnMessage | None = None) -> Any:
    """A Flower ServerApp that runs an experiment into a run directory, or resumes it.

    Args:
        experiment: the experiment.
        job: returns the job of the server, given None.
        on_message: called with every message that is counted.

    Keys of the run configuration: `run-dir`, `seconds`, `quorum` and `tries` (see `RoundPolicy`).
    """
    need_flower()
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from thinwire.flower.grid_transport import GridTransport

    app = ServerApp()
    experiment = deployable(experiment)

    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        path = Path(str(config.get("run-dir") or default_folder(experiment)))
        settings = {key: config[key] for key in ("nodes", "seconds", "quorum", "tries") if key in config}
        policy = RoundPolicy(**{key: value for key, value in settings.items() if key != "nodes"})

        def log(line: str) -> None:
            write_log(path, line)

        def prepare() -> FlowerServer:
            server = FlowerServer(experiment.engine, job(None), connect, policy, log)
            server.federation.try_model()
            return server

        def connect(contract: Contract, clients: int) -> GridTransport:
            return GridTransport(grid, lambda: run_name(path, settings), contract.schema.digest, clients, log=log)

        try:
            execute(experiment, path, resume=True, prepare=prepare, on_message=on_message)
        except (ThinwireError, OSError) as error:
            log(f"{FAILED} {error}")
            raise

    app.main()(main)
    return app


def write_log(path: Path, line: str) -> None:
    """Print a line for `flwr log`, and append it to `server.log` of the run directory, with control codes escaped."""
    line = visible(line)
    print(line, flush=True)
    if (path / "config.toml").is_file():
        append(path / "server.log", f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n".encode())


def run_name(path: Path, settings: Mapping[str, Any]) -> str:
    """The name under which clients store their states; a run without checkpoints gets a new one.

    The name is written to the run directory, with the settings of the deployment.
    """
    known = read_deployment(path)
    name = known["run"] if known and rounds_in(path / "checkpoints") else secrets.token_hex(8)
    write_atomically(path / "deployment.json", (json.dumps({"run": name, **settings}, indent=1) + "\n").encode())
    return str(name)


def read_deployment(path: Path) -> dict[str, Any] | None:
    """Name and settings of the deployment of a run directory; None if it was not deployed."""
    file = path / "deployment.json"
    if not file.is_file():
        return None
    try:
        known = read_json(file)
        return {
            key: known[key] for key in ("run", "nodes", "seconds", "quorum", "tries") if key in known or key == "run"
        }
    except KeyError as error:
        raise CheckpointError(f"{file} cannot be read (it lacks {error})") from error
