"""The ServerApp and the ClientApp of an experiment; the files of a Flower app import them.

    app = server_app(experiment, job)       on the machine of the SuperLink
    app = client_app(job)                   on every node

`job(node_config)` returns the `Job` of a machine: on a node, with its local examples; on the server (None), with the
test set. Model, method and seed must be the same on all machines; this is checked before training starts.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from thinwire.core.reference import OWN
from thinwire.core.text import human_seconds, version, visible
from thinwire.errors import CheckpointError, ConfigError, ThinwireError, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.settings import Checkpointing, Settings
from thinwire.flower import need_flower
from thinwire.flower.client import Client, client_file, private
from thinwire.flower.node import limit_replies
from thinwire.flower.processes import FAILED, HOPELESS
from thinwire.flower.server import FlowerServer
from thinwire.flower.sites import Report, RosterFile, Software, clients_of_node, introduce, site_keys
from thinwire.flower.transport import KEYS, RoundPolicy
from thinwire.protocol.contract import Contract
from thinwire.protocol.round import Response
from thinwire.runs.build import build_job
from thinwire.runs.config import from_table
from thinwire.runs.deployment_records import CohortLog, append_sites
from thinwire.runs.execute import default_folder, execute, settled
from thinwire.runs.files import append, read_json, write_json
from thinwire.runs.progress import RunningTotals
from thinwire.runs.records import rounds_in
from thinwire.runs.task_files import anchored
from thinwire.runs.toml import read_toml

ROLLING = 10  # checkpoints of a deployment, one a round: `thinwire resume --from` goes back to one of them
GRACE = 30.0  # seconds for the open round after SIGTERM; service managers send SIGKILL after 90
SPARE = 1_000_000  # bytes of a reply besides its upload
MakeJob = Callable[[Mapping[str, Any] | None], Job]


def deployable(experiment: Settings) -> Settings:
    """The experiment as a deployment runs it: clients train separately, and every round is checkpointed.

    With a checkpoint per round, a restarted server repeats at most the round whose uploads its clients sent last.
    Clients derive their learning rates from the method that they were started with, so the server cannot halve them.
    """
    task, saving = experiment.task, experiment.checkpoint
    for refused, line in (
        (
            saving.on_divergence == "retry",
            "on_divergence = 'retry': clients of a deployment cannot go back; write 'stop'",
        ),
        (experiment.attack is not None, "an attack is for simulations; leave [attack] out"),
        (experiment.method.opt_owner == "place", "opt_owner = 'place' is for simulations; write opt_owner = 'client'"),
        (
            task.kind.startswith(OWN),
            f"the task {task.label!r} is an object of this process, which nodes do not have; write it into a file and "
            "name it, such as my_task.py:task",
        ),
    ):
        if refused:
            raise ConfigError(line)
    engine = replace(experiment.engine, backend="loop", chunk=1)
    return replace(
        experiment, engine=engine, checkpoint=Checkpointing(1, best=saving.best, keep=max(saving.keep, ROLLING))
    )


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

    from thinwire.flower.grid_transport import Answer, Question, Task, pack, unpack

    app = ClientApp(mods=list(mods))

    @lru_cache(1)  # a node that has loaded its data before it forks for a message does not read them again
    def job_for(config: tuple[tuple[str, Any], ...]) -> Job:
        return job(dict(config))

    @lru_cache(1)
    def client_for(config: tuple[tuple[str, Any], ...]) -> Client:
        client = Client(Engine(str(dict(config).get("device", "cpu"))), job_for(config))
        client.federation.try_model()
        return client

    def open_node(config: Mapping[str, Any]) -> Client:
        client = client_for(tuple(sorted(config.items())))
        if client.secure is not None:  # read for each message: a site may have been revoked
            client.secure = replace(client.secure, site_keys=site_keys(config))
        return client

    def load(config: dict[str, Any]) -> None:
        """Load data and model for messages of processes that are forked afterwards; a GPU cannot be used before."""
        prepare: Callable[..., Any] = client_for if config.get("device", "cpu") == "cpu" else job_for
        prepare(tuple(sorted(config.items())))

    def query(message: Message, context: Context) -> Message:
        report, config = Report(), dict(context.node_config)
        try:
            run, nonce, refusal = unpack(Question, message.content)
            if refusal:
                print(f"thinwire: the server does not use this node: {visible(refusal, 300)}", flush=True)
            else:
                client = open_node(config)
                software = Software(client.contract.schema.digest, version())
                report = introduce(config, run, nonce, context.node_id, len(client.job.task.clients), software)
        except ThinwireError as error:
            report = Report(error=f"{type(error).__name__}: {error}")
            print(f"thinwire: this node cannot take part: {visible(str(error))}", flush=True)
        return Message(pack(report), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        task: Task = unpack(Task, message.content)
        config, number = context.node_config, task.client
        try:
            client = open_node(config)
            everyone = range(len(client.job.task.clients))  # the clients of a site are on the roster of the server
            local = everyone if config.get("site") else clients_of_node(config, len(everyone))
            if number not in local:
                raise WireError(f"client {number} is not on this node, which has {list(local)[:20]}")
            if client.secure is not None and not config.get("state-dir"):
                raise WireError("secure aggregation needs a folder that stores which versions were answered: state-dir")
            with client_file(context, task.run, number) as (before, save):
                response, stored = client.respond(number, task.request, before)
                if stored is not before:
                    save(stored)
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        return Message(pack(Answer(number, response)), reply_to=message)

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

    After SIGTERM the open round is closed and saved before the server ends (`RoundLines`).
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
            software = Software(contract.schema.digest, version())
            return GridTransport(grid, lambda: run_name(path, settings), software, clients, log=log, sites=sites)

        def prepare() -> FlowerServer:
            sites, back = partial(append_sites, path), bool(config.get("rollback", True))
            server = FlowerServer(experiment.engine, job(None), connect, policy, log, CohortLog(path), sites, back)
            server.try_model()
            return server

        try:
            with private(), RoundLines(experiment, log) as lines:
                watchers = {"on_round": lines.after, "on_message": on_message, "on_continue": lines.start_after}
                execute(experiment, path, resume=True, prepare=prepare, **watchers)  # type: ignore[arg-type]
        except Stopped:
            raise
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
    name = str(known["run"]) if known and rounds_in(path / "checkpoints") else secrets.token_hex(8)
    write_json(path / "deployment.json", {"run": name, **settings})
    return name


def read_deployment(path: Path) -> dict[str, Any] | None:
    """Name and settings of the deployment of a run directory; None if it was not deployed."""
    file = path / "deployment.json"
    known = read_json(file) if file.is_file() else None
    if known is not None and "run" not in known:
        raise CheckpointError(f"{file} cannot be read (it lacks 'run')")
    return known


class Stopped(ThinwireError):
    """The server was told to stop, and did so in order; the same command continues the run."""


class RoundLines:
    """Writes a line after each round, and closes a run in order after SIGTERM, which raises `Stopped`.

    Args:
        experiment: the experiment.
        log: receives the lines.
        grace: seconds for the open round after SIGTERM.

    SIGTERM inside the `with` block ends the run after the open round; when `grace` is over, within it. That round is
    not lost: the checkpoint of the round before it is on disk, and clients repeat their uploads when the run is
    resumed. Outside of the main thread, which alone receives signals, nothing happens.
    """

    def __init__(self, experiment: Settings, log: Callable[[str], None], grace: float = GRACE) -> None:
        self.rounds, self.log, self.grace = experiment.rounds, log, grace
        self.totals = RunningTotals(experiment.accounting)
        self.earlier = self.last = 0  # rounds of earlier processes, which are counted, not written; the newest round
        self.stopping = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> RoundLines:
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGTERM, self._on_term), (signal.SIGALRM, signal.default_int_handler)):
                self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.stopping and kind is KeyboardInterrupt:
            line = f"stopped by SIGTERM after round {self.last} of {self.rounds}; the same command continues the run"
            self.log(line)
            raise Stopped(line) from None

    def _on_term(self, *_: object) -> None:
        if not self.stopping:
            self.stopping = True
            signal.setitimer(signal.ITIMER_REAL, self.grace)

    def start_after(self, done: int) -> None:
        """Note how many rounds are done already."""
        self.earlier = self.last = done
        what = f"resumed after round {done} of {self.rounds}" if done else f"started, {self.rounds} rounds"
        self.log(f"{what}; waiting for clients")

    def after(self, record: RoundRecord) -> None:
        """Write the line of a round, unless an earlier process trained it."""
        text = self.totals.text(record)
        if self.earlier:
            self.earlier -= 1
            return
        self.last, counts, start = record.round, record._asdict(), f"round {record.round}/{self.rounds}  "
        others = [f"{counts[name]} {name}" for name in ("refused", "bounded", "absent", "late") if counts[name]]
        self.log(f"{start}{text}  {', '.join((f'{record.clients} clients', *others))}  {human_seconds(record.seconds)}")
        if record.alarm:
            self.log(f"{start}{record.alarm}")
        if self.stopping:
            raise KeyboardInterrupt
