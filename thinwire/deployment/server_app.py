"""The ServerApp of a Flower app: it runs on the machine of the SuperLink.

    app = server_app(experiment, job)

`job(None)` returns the `Job` of the server, with the test set.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from thinwire.core.text import visible
from thinwire.deployment.jobs import MakeJob, deployable
from thinwire.deployment.private_files import private
from thinwire.deployment.reply_limit import limit_replies, longest_reply
from thinwire.deployment.roster import RosterFile
from thinwire.deployment.round_lines import RoundLines
from thinwire.deployment.server_process import FAILED, HOPELESS
from thinwire.deployment.shutdown import Shutdown, Stopped
from thinwire.deployment.software import software_of
from thinwire.errors import CheckpointError, ConfigError, ThinwireError
from thinwire.experiments.cohort_file import CohortFile
from thinwire.experiments.config import Experiment
from thinwire.experiments.execute import default_folder, execute
from thinwire.experiments.files import append, read_json, write_atomically
from thinwire.experiments.records import rounds_in
from thinwire.experiments.site_records import append_sites
from thinwire.flower import need_flower
from thinwire.flower.policy import KEYS, RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.protocol.contract import Contract
from thinwire.runtime.federation import OnMessage
from thinwire.runtime.job import RoundRecord
from thinwire.runtime.site_record import SiteRecord


def server_app(experiment: Experiment, job: MakeJob, on_message: OnMessage | None = None) -> Any:
    """A Flower ServerApp that runs an experiment into a run directory, or resumes it.

    Args:
        experiment: the experiment.
        job: returns the job of the server, given None.
        on_message: called with every message that is counted.

    Keys of the run configuration: `run-dir`; the fields of `RoundPolicy`, which are `seconds`, `quorum`, `tries`,
    `grace`, `over-select` and `wait`; `roster` (see `Roster`); `rollback=false` to continue where the next state is not
    fit.

    After SIGTERM the open round is closed and saved before the server ends (`shutdown.py`).
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
        policy = RoundPolicy.of(settings)

        def log(line: str) -> None:
            write_log(path, line)

        def write_sites(records: Sequence[SiteRecord]) -> None:
            append_sites(path, records)

        def prepare() -> FlowerServer:
            back = bool(config.get("rollback", True))
            kept = CohortFile(path)
            server = FlowerServer(experiment.engine, job(None), connect, policy, log, kept, write_sites, back)
            server.federation.try_model()
            return server

        def connect(contract: Contract, clients: int) -> GridTransport:
            limit_replies(grid, longest_reply(contract), policy.seconds, log)
            sites = RosterFile.from_config(config, log)
            software = software_of(job, contract)
            return GridTransport(grid, lambda: run_name(path, settings), software, clients, log=log, sites=sites)

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
            raise Stopped(lines.stopped()) from None
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
