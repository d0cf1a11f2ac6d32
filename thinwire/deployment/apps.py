"""The two halves of a Flower app: what runs on a node, and what runs beside the SuperLink.

    app = client_app(job)                     app = server_app(experiment, job)

`job(node_config)` gives the `Job` of a machine: on a node with the examples that lie there, on the server (None) with
those for evaluation. Model, method and seed must be the same everywhere; that is checked before anything is trained.
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
FAILED = "thinwire failed:"  # how a server's last words begin in the log


def deployable(experiment: Experiment) -> Experiment:
    """The experiment as a deployment runs it: clients train one by one, and every round is saved.

    With each round saved, a server that was killed asks at most for the round that its clients answered last.
    """
    engine = replace(experiment.engine, backend="loop", chunk=1)
    return replace(experiment, engine=engine, checkpoint=Checkpointing(1))


def read_experiment(path: Path) -> Experiment:
    """The experiment of an app folder."""
    return deployable(from_table(read_toml(path)))


def job_of(experiment: Experiment, node_config: Mapping[str, Any] | None) -> Job:
    """The job of a machine that can read the whole data set: the same split as in the simulation."""
    folder = (node_config or {}).get("data-dir") or os.environ.get("THINWIRE_DATA")
    return _job_from(experiment, Path(str(folder)) if folder else None)


@lru_cache(1)  # Flower's simulation plays many nodes in one process
def _job_from(experiment: Experiment, folder: Path | None) -> Job:
    return build_job(experiment, folder)


def serves(node_config: Mapping[str, Any], clients: int) -> list[int]:
    """The clients of a node: all whose number leaves its `partition-id` when divided by `num-partitions`.

    >>> serves({"partition-id": 1, "num-partitions": 4}, 10)
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
        job: gives the job of a node from its `--node-config`.
        mods: Flower's, around it.

    A node keeps what its clients keep in the folder that `state-dir` in its `--node-config` names: then a server that
    is killed and resumed finds it again. Without, Flower keeps it, for as long as one run of the server lasts.
    """
    need_flower()
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from thinwire.flower.grid_transport import pack, unpack

    app = ClientApp(mods=list(mods))

    def site(context: Context) -> tuple[Client, list[int]]:
        config = dict(context.node_config)
        client = _client_of(job(config), str(config.get("device", "cpu")))
        return client, serves(config, len(client.job.task.clients))

    def hello(message: Message, context: Context) -> Message:
        client, mine = site(context)
        return Message(pack({"clients": mine, "schema": client.contract.schema.digest}), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        (run, number, accepted), data = unpack(message.content, run=str, client=int, accepted=int)
        try:
            client, mine = site(context)
            if number not in mine:
                raise WireError(f"client {number} is not served here, but {mine}")
            with _shelf(context, run, number) as shelf:
                response, store = client.respond(number, Request(data, accepted), shelf.load(client))
                shelf.save(store.dump(client.first))
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        fields = {"client": number, **{key: value for key, value in response._asdict().items() if key != "data"}}
        return Message(pack(fields, response.data), reply_to=message)

    app.query()(hello)
    app.train()(train)
    return app


@lru_cache(1)
def _client_of(job: Job, device: str) -> Client:
    return Client(LocalEngine(device), job)


class _Shelf:
    """Where a client's things lie: a file, or the context that Flower keeps for a node."""

    def __init__(self, context: Any, number: int, file: Path | None) -> None:
        self.context, self.name, self.file = context, f"client-{number}", file

    def load(self, client: Client) -> ClientStore | None:
        """What was kept; what is damaged counts as lost, and the client asks for the whole state."""
        try:
            if self.file:
                return ClientStore.load(self.file.read_bytes(), client.first) if self.file.is_file() else None
            record = self.context.state.get(self.name)
            return ClientStore.load(record["kept"], client.first) if record else None
        except CheckpointError:
            return None

    def save(self, kept: bytes) -> None:
        """Keep it, before the answer is sent."""
        if self.file:
            write_atomically(self.file, kept)
        else:
            from flwr.app import ConfigRecord

            self.context.state[self.name] = ConfigRecord({"kept": kept})


@contextmanager
def _shelf(context: Any, run: str, number: int) -> Iterator[_Shelf]:
    folder = context.node_config.get("state-dir")
    if not folder:
        yield _Shelf(context, number, None)
        return
    if not re.fullmatch(r"[0-9a-f]{16}", run):  # it becomes the name of a folder
        raise WireError(f"the name of the run must be 16 hexadecimal digits, not {run[:40]!r}")
    place = Path(str(folder)) / run
    place.mkdir(parents=True, exist_ok=True)
    with (place / f"client-{number}.lock").open("w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # a message that was sent twice waits for the first
        except ImportError:
            pass
        yield _Shelf(context, number, place / f"client-{number}.kept")


# -- on the server -----------------------------------------------------------------------------------------------------


def server_app(experiment: Experiment, job: MakeJob, on_message: OnMessage | None = None) -> Any:
    """A Flower ServerApp that runs an experiment into a run directory, or goes on where one stopped.

    Args:
        experiment: what to run.
        job: gives the job of the server, from None.
        on_message: is shown every message that counts.

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
        patience = RoundPolicy(**{key: value for key, value in settings.items() if key != "nodes"})

        def log(line: str) -> None:
            write_log(path, line)

        def prepare() -> FlowerServer:
            made = job(None)
            served = FlowerServer(experiment.engine, made, connect, patience, log)
            served.federation.try_model()
            return served

        def connect(contract: Contract, clients: int) -> GridTransport:
            return GridTransport(grid, lambda: name_of(path, settings), contract.schema.digest, clients, log=log)

        try:
            execute(experiment, path, resume=True, prepare=prepare, on_message=on_message)
        except (ThinwireError, OSError) as error:
            log(f"{FAILED} {error}")
            raise

    app.main()(main)
    return app


def write_log(path: Path, line: str) -> None:
    """A line for `flwr log`, and for the run directory once there is one; what clients say in it is escaped."""
    line = visible(line)
    print(line, flush=True)
    if (path / "config.toml").is_file():
        append(path / "server.log", f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}\n".encode())


def name_of(path: Path, settings: Mapping[str, Any]) -> str:
    """The name under which clients keep the states of a run; a run that starts anew gets a new one.

    It is written to the run directory, with the settings of the deployment.
    """
    known = deployment(path)
    name = known["run"] if known and rounds_in(path / "checkpoints") else secrets.token_hex(8)
    write_atomically(path / "deployment.json", (json.dumps({"run": name, **settings}, indent=1) + "\n").encode())
    return str(name)


def deployment(path: Path) -> dict[str, Any] | None:
    """What a run directory says about its deployment; None if it was not deployed."""
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
