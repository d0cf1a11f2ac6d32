"""Write an experiment as a Flower app: a folder for `flwr run`, to be used unchanged or edited.

    thinwire app mapo my-app --on digits --clients 4
    thinwire app fedavg my-app --template own-data --kind table --clients 3

In an app of the template own-data each site has data of its own: `task.py` names data, model and metrics
(`data/site.py`); templates/ has one for each kind of data. A node reads the folder `data-dir` of its configuration; the
server has no data, and sites evaluate the model.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from thinwire.core.reference import is_file
from thinwire.errors import ConfigError, UnknownName
from thinwire.federation.settings import Cohort, Settings
from thinwire.flower.apps import deployable, job_of
from thinwire.runs.config import to_table
from thinwire.runs.files import why_unreadable, write_all
from thinwire.runs.toml import Table, dumps

PACKAGE = "federated"
EXPERIMENT_FILE = "experiment.toml"
TRAINER_FILE = "own_trainer.py"
TEMPLATE = "own-data"
KINDS = ("images", "table", "text")
TASK = "task.py:task"
DEFAULTS = {"task.validation_fraction": 0.2, "eval.every": 5}  # an evaluation at the sites is one more download

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
packages = ["federated"]

[tool.flwr.app]
publisher = "thinwire"

[tool.flwr.app.components]
serverapp = "federated.server_app:app"
clientapp = "federated.client_app:app"

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
rollback = true   # whether the run goes back when a client destroyed the model
from = ""         # run directory of another run, with whose newest checkpoint this one begins
"""

# the function is in the app's package, by which its files are found and compared
_JOBS = '''\
"""Model, method and data of this app: `experiment.toml`, and `task.py`, if there is one.

Without `task.py` every machine reads the whole dataset and uses the part that the partition assigns to it, so that the
app gives the same result as `thinwire run experiment.toml`. With it every site has data of its own:
`thinwire app METHOD DIR --template own-data`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.federation.job import Job
from thinwire.flower.apps import job_of, read_experiment

EXPERIMENT = read_experiment(Path(__file__).with_name("experiment.toml"))


def job(node_config: Mapping[str, Any] | None) -> Job:
    """The job of a node, given its configuration, or of the server, given None."""
    return job_of(EXPERIMENT, node_config)
'''

_SERVER = '''\
"""The ServerApp; it runs on the machine of the SuperLink."""

from federated.jobs import EXPERIMENT, job
from thinwire.flower.apps import server_app

app = server_app(EXPERIMENT, job)
'''

_CLIENT = '''\
"""The ClientApp; it runs on every node.

Node configuration: site, or without a roster partition-id and num-partitions; data-dir, the folder of the data;
state-dir; optional: site-key, device.
"""

from federated.jobs import job
from thinwire.flower.apps import client_app

app = client_app(job)
'''


def write_app(experiment: Settings, folder: Path) -> list[Path]:
    """Write the app into a new or empty folder; returns its files."""
    experiment = deployable(experiment)
    return _write_files(experiment.name, experiment.task.label, to_table(experiment), {}, folder)


def write_own_data_app(kind: str, folder: Path, experiment_on: Callable[[str], Settings]) -> list[Path]:
    """Write an app with data of one's own into a new or empty folder; returns its files.

    Args:
        kind: the kind of data: images, table or text.
        folder: the folder.
        experiment_on: returns the experiment on a task, given a reference to it.
    """
    if kind not in KINDS:
        raise UnknownName("kind of data", kind, list(KINDS))
    text = files("thinwire.flower.templates").joinpath(f"{kind}.py").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="thinwire-app-") as draft:  # the experiment is checked before it is written
        (Path(draft) / "task.py").write_text(text)
        experiment = deployable(experiment_on(f"{draft}/{TASK}"))
        table = to_table(replace(experiment, cohort=Cohort(job_of(experiment, None).cohort)))
    table["task"]["kind"] = TASK
    return _write_files(experiment.name, kind, table, {"task.py": text}, folder)


def _write_files(name: str, label: str, table: Table, code: dict[str, str], folder: Path) -> list[Path]:
    """Write the files of an app; returns them.

    Args:
        name: the name of its experiment.
        label: the name of its task for readers.
        table: the contents of the file of the experiment.
        code: further Python files of the package.
        folder: a new or empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name another folder")
    title = f"{name} on {label}"
    fields = {
        "name": re.sub(r"[^a-z0-9]+", "-", f"{name}-{label}".lower()).strip("-"),
        "quoted": dumps({"x": title}).removeprefix("x = ").strip(),  # a name may contain quotes
    }
    texts = {
        "__init__.py": f"{title + ', as a Flower app.'!r}\n",
        "server_app.py": _SERVER,
        "client_app.py": _CLIENT,
        "jobs.py": _JOBS,
        **code,
        **_own_trainer(table),
        EXPERIMENT_FILE: dumps(table),
    }
    inside = {f"{PACKAGE}/{file}": text.encode() for file, text in texts.items()}
    return write_all(folder, {"pyproject.toml": _PYPROJECT.format(**fields).encode(), **inside})


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
