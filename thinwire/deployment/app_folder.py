"""Write an experiment as a Flower app: a folder that `flwr run` runs unchanged, and that people may change."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.deployment.apps import deployable
from thinwire.errors import ConfigError
from thinwire.experiments.config import Experiment, to_table
from thinwire.experiments.files import write_all
from thinwire.experiments.toml import dumps

PACKAGE = "federated"

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = {quoted}
dependencies = ["flwr>=1.41,<1.43", "thinwire"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "thinwire"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Any of these may be set for one run: flwr run . CONNECTION -c 'quorum=0.8 run-dir="/data/runs/first"'
[tool.flwr.app.config]
run-dir = ""      # the run directory on the server's machine; empty: one under runs/, named after the experiment
seconds = 600.0   # how long the server waits for answers
quorum = 0.5      # the share of the cohort that must answer
nodes = 0         # how many nodes `thinwire deploy` started
tries = 3         # how often those that did not are asked while there is no quorum
"""

_TASK = '''\
"""What is learnt, by which method, from which examples. This is the file to change.

`experiment.toml` says all but the data. As written here, every machine reads the whole data set and takes the part that
the split gives it, so that the app learns what `thinwire run experiment.toml` learns. With data of your own, return
another `Job` on the nodes: its task holds, under every client's number, the examples that lie on this machine.

    from thinwire.data.task import Task, alone
    task = Task(model, *alone(inputs, targets, clients))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.runtime.job import Job
from thinwire.deployment.apps import job_of, read_experiment

EXPERIMENT = read_experiment(Path(__file__).with_name("experiment.toml"))


def job(node_config: Mapping[str, Any] | None) -> Job:
    """The job of one machine: a node with its configuration, or the server (None)."""
    return job_of(EXPERIMENT, node_config)
'''

_SERVER = '''\
"""What runs beside the SuperLink."""

from {package}.task import EXPERIMENT, job
from thinwire.deployment.apps import server_app

app = server_app(EXPERIMENT, job)
'''

_CLIENT = '''\
"""What runs on a node. Its configuration: partition-id, num-partitions; state-dir, data-dir, device if needed."""

from {package}.task import job
from thinwire.deployment.apps import client_app

app = client_app(job)
'''


def write_app(experiment: Experiment, folder: Path) -> list[Path]:
    """Write the app; gives the files. A folder that holds anything is left alone."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name a new folder")
    experiment = deployable(experiment)
    name = re.sub(r"[^a-z0-9]+", "-", f"{experiment.name}-{experiment.task.kind}".lower()).strip("-")
    what = f"{experiment.name} on {experiment.task.kind}"
    quoted = dumps({"x": what}).removeprefix("x = ").strip()  # a name may hold quotes
    fields = {"name": name, "quoted": quoted, "package": PACKAGE}
    texts = {
        "pyproject.toml": _PYPROJECT.format(**fields),
        f"{PACKAGE}/__init__.py": f"{what + ', as a Flower app.'!r}\n",
        f"{PACKAGE}/task.py": _TASK,
        f"{PACKAGE}/server_app.py": _SERVER.format(**fields),
        f"{PACKAGE}/client_app.py": _CLIENT.format(**fields),
        f"{PACKAGE}/experiment.toml": dumps(to_table(experiment)),
    }
    return write_all(folder, {file: text.encode() for file, text in texts.items()})
