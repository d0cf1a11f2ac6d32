"""The ServerApp and the ClientApp of an experiment; the files of a Flower app import them.

    app = server_app(experiment, job)       on the machine of the SuperLink
    app = client_app(job)                   on every node

`job(node_config)` returns the `Job` of a machine: on a node, with its local examples; on the server (None), with the
test set. Model, method and seed must be the same on all machines; this is checked before training starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from thinwire.core.reference import OWN
from thinwire.core.text import human_seconds, version, visible
from thinwire.errors import CheckpointError, ConfigError, ThinwireError, WireError
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.local_engine import LocalEngine
from thinwire.federation.settings import Checkpointing, Settings
from thinwire.flower import need_flower
from thinwire.flower.client import Client, ClientStore, client_file, private
from thinwire.flower.node import limit_replies
from thinwire.flower.processes import FAILED, HOPELESS
from thinwire.flower.server import FlowerServer
from thinwire.flower.sites import RosterFile, Software, clients_of_node as clients_of_node, introduce, site_keys
from thinwire.flower.transport import KEYS, RoundPolicy
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Request, Response
from thinwire.runs.build import build_job
from thinwire.runs.cohort_file import CohortLog
from thinwire.runs.config import from_table
from thinwire.runs.execute import default_folder, execute, settled
from thinwire.runs.files import append, read_json, write_atomically
from thinwire.runs.progress import RunningTotals
from thinwire.runs.records import rounds_in
from thinwire.runs.site_records import append_sites
from thinwire.runs.task_files import anchored
from thinwire.runs.toml import read_toml

ROLLING = 10  # checkpoints of a deployment, one a round: `thinwire resume --from` goes back to one of them
GRACE = 30.0  # seconds for the open round after SIGTERM; service managers send SIGKILL after 90
SUFFIXES = (".py", ".toml")  # Flower sends these to nodes, and among others pyproject.toml, which it rewrites
SPARE = 1_000_000  # bytes of a reply besides its upload
MakeJob = Callable[[Mapping[str, Any] | None], Job]


def deployable(experiment: Settings) -> Settings:
    """The experiment as a deployment runs it: clients train separately, and every round is checkpointed.

    With a checkpoint per round, a restarted server repeats at most the round whose uploads its clients sent last.
    Clients derive their learning rates from the method that they were started with, so the server cannot halve them.
    """
    task = experiment.task
    for refused, line in (
        (
            experiment.checkpoint.on_divergence == "retry",
            "on_divergence = 'retry' is for simulations: clients of a deployment cannot go back; write 'stop'",
        ),
        (
            experiment.attack is not None,
            "an attack is for simulations: clients of a deployment are real; leave [attack] out",
        ),
        (
            experiment.method.opt_owner == "place",
            "opt_owner = 'place' is for simulations: no message carries an optimizer state from client to client; "
            "write opt_owner = 'client'",
        ),
        (
            task.kind.startswith(OWN),
            f"the task {task.label!r} is an object of this process, which nodes do not have; write it into a file and "
            "name it, such as my_task.py:task",
        ),
    ):
        if refused:
            raise ConfigError(line)
    engine = replace(experiment.engine, backend="loop", chunk=1)
    checkpoint = Checkpointing(1, best=experiment.checkpoint.best, keep=max(experiment.checkpoint.keep, ROLLING))
    return replace(experiment, engine=engine, checkpoint=checkpoint)


def read_experiment(path: Path) -> Settings:
    """Read the experiment of an app folder; files that it names are relative to its own folder."""
    return deployable(from_table(anchored(read_toml(path), path.parent)))


def job_of(experiment: Settings, node_config: Mapping[str, Any] | None) -> Job:
    """The job of a machine that can read the whole dataset: the same partition as in the simulation."""
    folder = (node_config or {}).get("data-dir") or os.environ.get("THINWIRE_DATA")
    return _job_from(experiment, Path(str(folder)) if folder else None)


@lru_cache(1)  # Flower's simulation runs many nodes in one process
def _job_from(experiment: Settings, folder: Path | None) -> Job:
    return settled(experiment, folder)[1] if experiment.fingerprint else build_job(experiment, folder)


def software_of(job: Any, contract: Contract) -> Software:
    """The software of this machine.

    Args:
        job: the function of the app that returns the job; the app is the outermost package that it is in.
        contract: what the server and this machine agree on.
    """
    module = sys.modules.get(str(getattr(job, "__module__", "")).partition(".")[0])
    folder = next(iter(getattr(module, "__path__", [])), None)
    return Software(contract.schema.digest, version(), app_hash(folder and Path(folder)))


@lru_cache(4)
def app_hash(folder: Path | None) -> str:
    """The SHA-256 of names and contents of the `.py` and `.toml` files below the folder of an app's package.

    Args:
        folder: the folder, for example `my-app/federated`; the hash of None is "". Tests are left out, as Flower does.
    """
    if folder is None:
        return ""
    total = hashlib.sha256()
    for name, file in sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*")):
        is_test = file.name.startswith("test_") or file.stem.endswith("_test")
        if file.suffix in SUFFIXES and file.name != "pyproject.toml" and not is_test and file.is_file():
            data = file.read_bytes()
            total.update(f"{len(name.encode())} {name} {len(data)} ".encode() + data)
    return total.hexdigest()


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

    from thinwire.flower.grid_transport import pack, response_fields, unpack

    app = ClientApp(mods=list(mods))

    @lru_cache(1)  # a node that has loaded its data before it forks for a message does not read them again
    def job_for(config: tuple[tuple[str, Any], ...]) -> Job:
        return job(dict(config))

    @lru_cache(1)
    def client_for(config: tuple[tuple[str, Any], ...]) -> Client:
        return Client(LocalEngine(str(dict(config).get("device", "cpu"))), job_for(config))

    @lru_cache(1)
    def check_data(client: Client) -> None:
        client.federation.try_model()

    def open_node(config: Mapping[str, Any]) -> Client:
        client = client_for(tuple(sorted(config.items())))
        if client.secure is not None:  # read for each message: a site may have been revoked
            client.secure = replace(client.secure, site_keys=site_keys(config))
        return client

    def load(config: dict[str, Any]) -> None:
        """Load data and model for messages of processes that are forked afterwards; a GPU cannot be used before."""
        job_for(given := tuple(sorted(config.items())))
        if config.get("device", "cpu") == "cpu":
            check_data(client_for(given))

    def query(message: Message, context: Context) -> Message:
        try:
            (run, refusal, nonce), _ = unpack(message.content, run=str, refusal=str, nonce=bytes)
            if refusal:
                print(f"thinwire: the server does not use this node: {visible(refusal, 300)}", flush=True)
                return Message(pack({}), reply_to=message)
            client = open_node(context.node_config)
            count, software = len(client.job.task.clients), software_of(job, client.contract)
            fields = introduce(dict(context.node_config), run, nonce, context.node_id, count, software)
        except ThinwireError as error:
            fields = {"error": f"{type(error).__name__}: {error}"}
            print(f"thinwire: this node cannot take part: {visible(str(error))}", flush=True)
        return Message(pack(fields), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        (run, number, accepted, phase), data = unpack(message.content, run=str, client=int, accepted=int, phase=str)
        config = context.node_config
        try:
            client = open_node(config)
            if not config.get("site"):  # the clients of a site are on the roster of the server
                local = clients_of_node(config, len(client.job.task.clients))
                if number not in local:
                    raise WireError(f"client {number} is not on this node, which has {local}")
            elif not 0 <= number < len(client.job.task.clients):
                raise WireError(f"client {number} does not exist, there are {len(client.job.task.clients)}")
            check_data(client)
            if client.secure is not None and not config.get("state-dir"):
                raise WireError("secure aggregation needs a folder that stores which versions were answered: state-dir")
            with client_file(context, run, number) as (kept, save):
                try:
                    stored = ClientStore.load(kept, client.first) if kept else None
                except CheckpointError:  # then the client requests the whole state
                    stored = None
                response, state = client.respond(number, Request(data, accepted, phase), stored)
                if state is not stored:
                    save(state.dump(client.first))
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        return Message(pack(response_fields(number, response), response.data), reply_to=message)

    app.query()(query)
    app.train()(train)
    app.load = load  # type: ignore[attr-defined] # `thinwire site start --app` calls it once
    return app


# -- on the server -----------------------------------------------------------------------------------------------------


def server_app(experiment: Settings, job: MakeJob, on_message: OnMessage | None = None) -> Any:
    """A Flower ServerApp that runs an experiment into a run directory, or resumes it.

    Args:
        experiment: the experiment.
        job: returns the job of the server, given None.
        on_message: called with every message that is counted.

    Keys of the run configuration: `run-dir`; the fields of `RoundPolicy`, which are `seconds`, `quorum`, `tries`,
    `grace`, `over-select` and `wait`; `roster` (see `Roster`); `rollback=false` to continue where the next state is not
    fit.

    After SIGTERM the open round is closed and saved before the server ends (`Shutdown`).
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
        settings = {key: config[key] for key in ("nodes", *KEYS) if key in config}
        policy, log = RoundPolicy.of(settings), partial(write_log, path)

        def connect(contract: Contract, clients: int) -> GridTransport:
            limit_replies(grid, max(stage.longest_up for stage in contract.stages) + SPARE, policy.seconds, log)
            roster = str(config.get("roster", ""))
            sites = RosterFile(Path(roster), log) if roster else None
            software = software_of(job, contract)
            return GridTransport(grid, lambda: run_name(path, settings), software, clients, log=log, sites=sites)

        def prepare() -> FlowerServer:
            sites, back = partial(append_sites, path), bool(config.get("rollback", True))
            server = FlowerServer(experiment.engine, job(None), connect, policy, log, CohortLog(path), sites, back)
            server.federation.try_model()
            return server

        lines, shutdown = RoundLines(experiment, log), Shutdown()

        def on_round(record: RoundRecord) -> None:
            if lines.after(record):
                shutdown.after_round()

        try:
            with private(), shutdown:
                watchers = {"on_round": on_round, "on_message": on_message, "on_continue": lines.start_after}
                execute(experiment, path, resume=True, prepare=prepare, **watchers)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            if not shutdown.requested:
                raise
            done = f"{lines.last} of {experiment.rounds}"
            line = f"stopped by SIGTERM after round {done}; the same command continues the run"
            log(line)
            raise Stopped(line) from None
        except (ThinwireError, OSError) as error:
            log(f"{FAILED} {error}")
            if isinstance(error, ConfigError):
                log(HOPELESS)
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
        return {key: known[key] for key in ("run", "nodes", *KEYS) if key in known or key == "run"}
    except KeyError as error:
        raise CheckpointError(f"{file} cannot be read (it lacks {error})") from error


class RoundLines:
    """Writes a line after each round; rounds of an earlier process are counted, but not written again.

    Args:
        experiment: the experiment.
        log: receives the lines.
    """

    def __init__(self, experiment: Settings, log: Callable[[str], None]) -> None:
        self.rounds, self.log = experiment.rounds, log
        self.totals = RunningTotals(experiment.accounting)
        self.earlier = 0  # rounds of earlier processes that were not shown yet
        self.last = 0  # the newest round

    def start_after(self, done: int) -> None:
        """Note how many rounds are done already."""
        self.earlier = self.last = done
        what = f"resumed after round {done} of {self.rounds}" if done else f"started, {self.rounds} rounds"
        self.log(f"{what}; waiting for clients")

    def after(self, record: RoundRecord) -> bool:
        """Write the line of a round, unless an earlier process trained it; returns whether it was written."""
        text = self.totals.text(record)
        if self.earlier:
            self.earlier -= 1
            return False
        self.last, counts = record.round, record._asdict()
        others = [f"{counts[name]} {name}" for name in ("refused", "bounded", "absent", "late") if counts[name]]
        clients = ", ".join((f"{record.clients} clients", *others))
        self.log(f"round {record.round}/{self.rounds}  {text}  {clients}  {human_seconds(record.seconds)}")
        if record.alarm:
            self.log(f"round {record.round}/{self.rounds}  {record.alarm}")
        return True


class Stopped(ThinwireError):
    """The server was told to stop, and did so in order; the same command continues the run."""


class Shutdown:
    """SIGTERM inside a `with` block ends a server in order: the open round is closed and saved.

    Args:
        grace: seconds for the open round.

    `after_round` ends the run after the round in which the signal arrived; when `grace` is over, the open round ends
    with the same `KeyboardInterrupt`. It is not lost: the checkpoint of the round before it is on disk, and clients
    repeat their uploads when the run is resumed. Outside of the main thread, which alone receives signals, nothing
    happens.

    >>> with Shutdown() as shutdown:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     shutdown.requested
    True
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace, self.requested = grace, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Shutdown:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_term)
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def after_round(self) -> None:
        """Raise KeyboardInterrupt if SIGTERM has arrived; the caller has written the round."""
        if self.requested:
            raise KeyboardInterrupt

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            signal.setitimer(signal.ITIMER_REAL, self.grace)
