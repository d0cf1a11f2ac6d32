"""Write an experiment as a Flower app: a folder for `flwr run`, to be used unchanged or edited."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.core.reference import is_file
from thinwire.deployment.jobs import deployable
from thinwire.errors import ConfigError
from thinwire.experiments.config import Experiment, to_table
from thinwire.experiments.files import why_unreadable, write_all
from thinwire.experiments.toml import Table, dumps

PACKAGE = "federated"
EXPERIMENT_FILE = "experiment.toml"
TRAINER_FILE = "own_trainer.py"

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = {quoted}
dependencies = ["flwr>=1.40,<1.43", "thinwire"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "thinwire"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Each of these can be set for one run: flwr run . CONNECTION -c 'quorum=0.8 run-dir="/data/runs/first"'
[tool.flwr.app.config]
run-dir = ""      # run directory on the machine of the server; if empty, a new one under runs/
seconds = 600.0   # seconds that the server waits for uploads
quorum = 0.5      # fraction of the cohort that must upload
nodes = 0         # number of nodes that `thinwire deploy` started; 0 otherwise
tries = 3         # number of requests to a client while the quorum is not reached
roster = ""       # file of the sites that may take part (thinwire site); if empty, nodes name their clients
grace = -1.0      # seconds after the quorum at which a round is closed; below 0, it waits for all until `seconds` end
over-select = 0.0 # fraction of the cohort that is asked in addition
wait = 120.0      # seconds that the first round waits for clients to connect
"""

_TASK = '''\
"""Model, method and data of this app.

`experiment.toml` holds everything but the data. Every machine reads the whole dataset and uses the part that the
partition assigns to it, so that the app gives the same result as `thinwire run experiment.toml`. For an app in which
every site has data of its own: `thinwire flower-app METHOD DIR --template own-data`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.runtime.job import Job
from thinwire.deployment.apps import job_of, read_experiment

EXPERIMENT = read_experiment(Path(__file__).with_name("experiment.toml"))


def job(node_config: Mapping[str, Any] | None) -> Job:
    """The job of a node, given its configuration, or of the server, given None."""
    return job_of(EXPERIMENT, node_config)
'''

_SERVER = '''\
"""The ServerApp; it runs on the machine of the SuperLink."""

from {package}.task import EXPERIMENT, job
from thinwire.deployment.apps import server_app

app = server_app(EXPERIMENT, job)
'''

_CLIENT = '''\
"""The ClientApp; it runs on every node.

Node configuration: site, or without a roster partition-id and num-partitions; optional: site-key, state-dir, data-dir,
device.
"""

from {package}.task import job
from thinwire.deployment.apps import client_app

app = client_app(job)
'''


def write_app(experiment: Experiment, folder: Path) -> list[Path]:
    """Write the app into a new or empty folder; returns its files."""
    check_new(folder)
    experiment = deployable(experiment)
    code = {"task.py": _TASK, "server_app.py": _SERVER, "client_app.py": _CLIENT}
    return write_files(experiment, experiment.task.label, to_table(experiment), code, folder)


def _own_trainer(table: Table) -> dict[str, str]:
    """The file of a trainer of one's own, which nodes need; the table then names the copy beside it."""
    local = table.get("local", {})
    where, _, name = str(local.get("trainer", "")).rpartition(":")
    if not is_file(where):
        return {}
    local["trainer"] = f"{TRAINER_FILE}:{name}"
    try:
        return {TRAINER_FILE: Path(where).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of local.trainer, {where}, cannot be read: {why_unreadable(error)}") from error


def check_new(folder: Path) -> None:
    """Raise ConfigError if a folder has files already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name another folder")


def write_files(experiment: Experiment, label: str, table: Table, code: dict[str, str], folder: Path) -> list[Path]:
    """Write the files of an app; returns them.

    Args:
        experiment: the experiment.
        label: the name of its task for readers.
        table: the contents of its file.
        code: the Python files of the package; `{package}` in apps stands for its name.
        folder: a new or empty folder.
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"{experiment.name}-{label}".lower()).strip("-")
    title = f"{experiment.name} on {label}"
    quoted = dumps({"x": title}).removeprefix("x = ").strip()  # a name may contain quotes
    fields = {"name": name, "quoted": quoted, "package": PACKAGE}
    code = code | _own_trainer(table)
    apps = {file: text.format(**fields) if file.endswith("_app.py") else text for file, text in code.items()}
    texts = {
        "pyproject.toml": _PYPROJECT.format(**fields),
        f"{PACKAGE}/__init__.py": f"{title + ', as a Flower app.'!r}\n",
        **{f"{PACKAGE}/{file}": text for file, text in apps.items()},
        f"{PACKAGE}/{EXPERIMENT_FILE}": dumps(table),
    }
    return write_all(folder, {file: text.encode() for file, text in texts.items()})
