"""The ServerApp and the ClientApp of an experiment; the files of a Flower app import them.

    app = server_app(experiment, job)       on the machine of the SuperLink
    app = client_app(job)                   on every node

`job(node_config)` returns the `Job` of a machine: on a node, with its local examples; on the server (None), with the
test set. Model, method and seed must be the same on all machines; this is checked before training starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from logging import LogRecord, getLogger
from pathlib import Path
from typing import Any

from thinwire.core.key import Key
from thinwire.core.reference import OWN, load_reference, own_kind
from thinwire.core.text import human_seconds, version, visible
from thinwire.data.site import OwnData
from thinwire.errors import ConfigError, InUse, ThinwireError, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation, OnMessage
from thinwire.federation.job import Job, RoundRecord
from thinwire.federation.settings import Checkpointing, Settings
from thinwire.flower import need_flower
from thinwire.flower.client import Client, client_file, private
from thinwire.flower.node import limit_replies
from thinwire.flower.policy import KEYS, RoundPolicy
from thinwire.flower.server import FlowerClients
from thinwire.flower.sites import Admission, Report, RosterFile, Software, introduce, site_keys
from thinwire.flower.supervisor import FAILED, HOPELESS
from thinwire.protocol.round import Response
from thinwire.runs.build import build_job, call_own, chosen_of, job_on
from thinwire.runs.config import from_table, to_table
from thinwire.runs.deployment_records import CohortLog, append_sites
from thinwire.runs.execute import default_folder, execute, settled
from thinwire.runs.files import append, locked, message_of, read_json, write_json
from thinwire.runs.progress import RunningTotals
from thinwire.runs.records import rounds_in
from thinwire.runs.run_directory import DEPLOYMENT, RunFolder
from thinwire.runs.task_files import anchored
from thinwire.runs.toml import read_toml
from thinwire.secure.frames import tolerance
from thinwire.secure.keys import need_cryptography

ROLLING = 10  # checkpoints of a deployment, one a round: `thinwire resume --from` goes back to one of them
SPARE = 1_000_000  # bytes of a reply besides its upload
MakeJob = Callable[[Mapping[str, Any] | None], Job]


def deployable(experiment: Settings) -> Settings:
    """The experiment as a deployment runs it: clients train separately, and every round is checkpointed.

    With a checkpoint per round, a restarted server repeats at most the round whose uploads its clients sent last.
    Clients derive their learning rates from the method that they were started with, so the server cannot halve them.
    """
    task, saving = experiment.task, experiment.checkpoint
    for refused, line in (
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
    if experiment.method.secure_aggregation:
        need_cryptography()
    engine = replace(experiment.engine, backend="loop", chunk=1)
    return replace(
        experiment, engine=engine, checkpoint=Checkpointing(1, best=saving.best, keep=max(saving.keep, ROLLING))
    )


def read_experiment(path: Path) -> Settings:
    """Read the experiment of an app folder; files that it names are relative to its own folder."""
    return deployable(from_table(anchored(read_toml(path), path.parent)))


def job_of(experiment: Settings, node_config: Mapping[str, Any] | None) -> Job:
    """The job of a node, given its configuration, or of the server, given None.

    With data of one's own (`data/site.py`) a node reads the folder of its site, and the server none. Else all machines
    read the whole dataset, and have the partition of the simulation.
    """
    folder = str((node_config or {}).get("data-dir", ""))
    if experiment.fingerprint or own_data(experiment) is None:
        folder = folder or os.environ.get("THINWIRE_DATA", "")
    elif node_config is not None and not Path(folder).is_absolute():
        raise ConfigError(
            '--node-config needs the absolute path of the site\'s data, such as data-dir="/data/records", '
            f"not {folder or 'none'!r}"
        )
    return job_in(experiment, Path(folder) if folder else None)


@lru_cache(2)  # data and model stay loaded between messages; Flower's simulation runs many nodes in one process
def job_in(experiment: Settings, folder: Path | None) -> Job:
    """The job of a machine with this folder of data; None for the default, and for a server without data.

    All machines have the same initial weights.
    """
    task, own, key = experiment.task, own_data(experiment), Key(experiment.seed)
    if experiment.fingerprint:  # of a task whose data all machines can read
        return settled(experiment, folder)[1]
    if own is None:
        return build_job(experiment, folder)
    options = {"clients": dict(task.options)["clients"]}
    make: Callable[..., Any] = own.at_site
    if folder is None:
        if experiment.method.evaluate == "average":
            raise ConfigError(
                "method.evaluate = 'average' needs a test set at the server, since sites do not have the averaged "
                "model; write method.evaluate = 'server'"
            )
        make, options = own.without_examples, {**options, "validation": task.validation_fraction > 0}
    made: Any = call_own(make, task.label, options, key, folder, task.kind.rpartition(":")[0])
    return job_on(experiment, made if folder is None else chosen_of(task, made, key))


def own_data(experiment: Settings) -> OwnData | None:
    """Data and model of an app in which each site has data of its own, from its `task.py`; None in another one."""
    kind = experiment.task.kind
    found = getattr(load_reference(kind), "__self__", None) if own_kind(kind) else None
    return found if isinstance(found, OwnData) else None


# -- on a node ---------------------------------------------------------------------------------------------------------


def client_app(job: MakeJob) -> Any:
    """A Flower ClientApp.

    Args:
        job: returns the job of a node, given its `--node-config`.

    Client states are stored in the folder `state-dir` of the `--node-config`, so that a run can be resumed after the
    server was restarted. Without `state-dir`, Flower stores them for as long as one run of the server lasts.
    """
    need_flower()
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

    from thinwire.flower.grid_transport import Question, Task, pack, unpack

    app = ClientApp()

    @lru_cache(1)  # a node that has loaded its data before it forks for a message does not read them again
    def client_for(items: tuple[tuple[str, Any], ...]) -> Client:
        config = dict(items)
        client = Client(Engine(str(config.get("device", "cpu"))), job(config))
        client.federation.try_model()
        return client

    def open_node(config: Mapping[str, Any]) -> Client:
        client = client_for(tuple(sorted(config.items())))
        if client.secure is not None:  # read for each message: a site may have been revoked
            client.secure = replace(client.secure, site_keys=site_keys(config))
        return client

    def load(config: Mapping[str, Any]) -> None:
        """Load data and model for messages of processes that are forked afterwards; a GPU cannot be used before."""
        open_node(config) if config.get("device", "cpu") == "cpu" else job(config)

    def query(message: Message, context: Context) -> Message:
        report, config = Report(), dict(context.node_config)
        try:
            run, nonce, refusal = unpack(Question, message.content)
            if refusal:
                print(f"thinwire: the server does not use this node: {visible(refusal, 300)}", flush=True)
            else:
                client = open_node(config)
                software = Software(client.contract.schema.digest, version())
                task = client.job.task
                report = introduce(config, run, nonce, context.node_id, len(task.clients), software)
                who = f"site {report.site}" if report.site else f"clients {sorted(report.clients)}"
                print(
                    f"thinwire: connected, introduced as {visible(who, 100)}; {len(task.train):,} examples loaded",
                    flush=True,
                )
        except ThinwireError as error:
            report = Report(error=f"{type(error).__name__}: {error}")
            print(f"thinwire: this node cannot take part: {visible(str(error))}", flush=True)
        return Message(pack(report), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        task: Task = unpack(Task, message.content)
        config, number = context.node_config, task.client
        try:
            client = open_node(config)
            if client.secure is not None and not config.get("state-dir"):
                raise WireError("secure aggregation needs a folder that stores which versions were answered: state-dir")
            with client_file(context, task.run, number) as (before, save):
                response, stored = client.respond(number, task.request, before)
                if stored is not before:
                    save(stored)
        except ThinwireError as error:
            response = Response(b"", error=f"{type(error).__name__}: {error}")
        if response.error:
            print(f"thinwire: client {number} cannot respond: {visible(response.error, 300)}", flush=True)
        return Message(pack(response), reply_to=message)

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
    fit; `from`, the directory of another run with whose newest checkpoint this one begins.
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
        log = partial(write_log, path)

        def clients(federation: Federation) -> FlowerClients:
            policy = RoundPolicy.of(settings)
            contract, roster = federation.contract, str(config.get("roster", ""))
            limit_replies(grid, max(stage.longest_up for stage in contract.stages) + SPARE, policy.seconds, log)
            sites = RosterFile(Path(roster), log) if roster else None
            software = Software(contract.schema.digest, version())
            admission = Admission(software, len(federation.job.task.clients), sites, log)
            transport = GridTransport(grid, lambda: run_name(path, settings), admission)
            on_sites, back = partial(append_sites, path), bool(config.get("rollback", True))
            return FlowerClients(federation, transport, policy, log, CohortLog(path), on_sites, back)

        def prepare() -> Federation:
            server = Federation(experiment.engine, job(None), clients)
            server.try_model()
            if server.job.method.secure_aggregation and (warning := tolerance(server.job.cohort)):
                log(warning)
            return server

        try:
            lines = RoundLines(experiment, log)
            watchers = {"on_round": lines.after, "on_message": on_message, "on_continue": lines.start_after}
            with private():
                if origin := str(config.get("from", "")):
                    begin_from(Path(origin), RunFolder(path, to_table(experiment)), log)
                execute(experiment, path, resume=True, prepare=prepare, **watchers)  # type: ignore[arg-type]
        except (ThinwireError, OSError) as error:
            log(f"{FAILED} {message_of(error)}")
            if not isinstance(error, (WireError, InUse, OSError)):  # these may be over when it is started again
                log(HOPELESS)
            getLogger("flwr").addFilter(_without_traceback)  # the line above says it
            raise

    app.main()(main)
    return app


def begin_from(origin: Path, folder: RunFolder, log: Callable[[str], None]) -> None:
    """Begin a run with the newest checkpoint of another one, unless it has begun."""
    with locked(folder.path):
        if not (folder.exists and rounds_in(folder.checkpoints)):
            done = folder.begin_from(origin)
            log(f"begins with round {done} of {origin}; clients are sent the whole state")


def _without_traceback(record: LogRecord) -> bool:
    """Leave the traceback out of what Flower logs of our errors."""
    if record.exc_info and isinstance(record.exc_info[1], (ThinwireError, OSError)):
        record.exc_info = None
    return True


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
    file = path / DEPLOYMENT
    known = read_json(file).get("run") if file.is_file() and rounds_in(path / "checkpoints") else None
    name = str(known or secrets.token_hex(8))
    write_json(file, {"run": name, **settings})
    return name


class RoundLines:
    """Writes a line when a server begins, and one after each round that it trained.

    Args:
        experiment: the experiment.
        log: receives the lines.
    """

    def __init__(self, experiment: Settings, log: Callable[[str], None]) -> None:
        self.rounds, self.log, self.earlier = experiment.rounds, log, 0
        self.totals = RunningTotals()

    def start_after(self, done: int) -> None:
        """Note how many rounds earlier processes trained: these are counted, not written."""
        self.earlier = done
        what = f"resumed after round {done} of {self.rounds}" if done else f"started, {self.rounds} rounds"
        self.log(f"{what}; waiting for clients")

    def after(self, record: RoundRecord) -> None:
        """Write the line of a round, unless an earlier process trained it."""
        text = self.totals.text(record)
        if self.earlier:
            self.earlier -= 1
            return
        counts, start = record._asdict(), f"round {record.round}/{self.rounds}  "
        others = [f"{counts[name]} {name}" for name in ("refused", "bounded", "absent", "late") if counts[name]]
        self.log(f"{start}{text}  {', '.join((f'{record.clients} clients', *others))}  {human_seconds(record.seconds)}")
        if record.alarm:
            self.log(f"{start}{record.alarm}")
