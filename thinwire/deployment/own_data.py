"""Apps in which each site has data of its own: the files of such an app, and the jobs of its machines.

    thinwire flower-app fedavg my-app --template own-data --kind table --clients 3

`task.py` of the app names data, model and metrics (`data/site.py`); templates/ has one for each kind of data. A node
reads the folder `data-dir` of its configuration; the server has no data, and sites evaluate the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from thinwire.core.key import Key
from thinwire.core.reference import load_reference, short_name
from thinwire.data.site import OwnData
from thinwire.data.task import Task
from thinwire.deployment.app_folder import check_new, write_files
from thinwire.deployment.jobs import MakeJob, deployable
from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.build import chosen_of, job_on
from thinwire.experiments.config import Experiment, to_table
from thinwire.experiments.experiment import Cohort
from thinwire.experiments.own_task import call_own
from thinwire.experiments.task_files import own_kind
from thinwire.runtime.job import Job

TEMPLATE = "own-data"
KINDS = ("images", "table", "text")
TASK = "task.py:task"
DEFAULTS = {"task.validation_fraction": 0.2, "eval.every": 5}  # an evaluation at the sites is one more download

_SERVER = '''\
"""The ServerApp; it runs on the machine of the SuperLink, which has no data."""

from {package}.jobs import EXPERIMENT, job
from thinwire.deployment.apps import server_app

app = server_app(EXPERIMENT, job)
'''

_CLIENT = '''\
"""The ClientApp; it runs on the node of every site.

Node configuration: data-dir, the folder of the site's data, and state-dir; optional: device.
"""

from {package}.jobs import job
from thinwire.deployment.apps import client_app

app = client_app(job)
'''

# the function is in the app's package, by which its files are found and compared
_JOBS = '''\
"""The job of each machine, from `experiment.toml` and `task.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.deployment.apps import read_experiment, site_jobs
from thinwire.runtime.job import Job

EXPERIMENT = read_experiment(Path(__file__).with_name("experiment.toml"))


def job(node_config: Mapping[str, Any] | None) -> Job:
    """The job of a node, given its configuration, or of the server, given None."""
    return site_jobs(EXPERIMENT)(node_config)
'''


def write_own_data_app(kind: str, folder: Path, experiment_on: Callable[[str], Experiment]) -> list[Path]:
    """Write an app with data of one's own into a new or empty folder; returns its files.

    Args:
        kind: the kind of data: images, table or text.
        folder: the folder.
        experiment_on: returns the experiment on a task, given a reference to it.
    """
    if kind not in KINDS:
        raise UnknownName("kind of data", kind, list(KINDS))
    check_new(folder)
    text = files("thinwire.deployment.templates").joinpath(f"{kind}.py").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="thinwire-app-") as draft:  # the experiment is checked before it is written
        (Path(draft) / "task.py").write_text(text)
        experiment = deployable(experiment_on(f"{draft}/{TASK}"))
        job = _without_examples(experiment)
        table = to_table(replace(experiment, cohort=Cohort(job.cohort)))
    table["task"]["kind"] = TASK
    code = {"task.py": text, "jobs.py": _JOBS, "server_app.py": _SERVER, "client_app.py": _CLIENT}
    return write_files(experiment, kind, table, code, folder)


def site_jobs(experiment: Experiment) -> MakeJob:
    """The jobs of an app with data of one's own: of a node, given its configuration, or of the server, given None."""

    def job(node_config: Mapping[str, Any] | None) -> Job:
        if node_config is None:
            return _server_job(experiment)
        folder = Path(str(node_config.get("data-dir", "")))
        if not folder.is_absolute():
            raise ConfigError(
                '--node-config needs the absolute path of the site\'s data, such as data-dir="/data/records", '
                f"not {str(node_config.get('data-dir', 'none'))!r}"
            )
        return site_job(experiment, folder)

    return job


@lru_cache(1)  # data and model stay loaded between messages
def site_job(experiment: Experiment, folder: Path) -> Job:
    """The job of the site that has this folder of data."""
    own, key = own_data(experiment), Key(experiment.seed)
    task = _made(experiment, own.at_site, {}, folder)
    return job_on(experiment, chosen_of(experiment.task, task, key))


@lru_cache(1)
def _server_job(experiment: Experiment) -> Job:
    return _without_examples(experiment)


def _without_examples(experiment: Experiment) -> Job:
    """The job of a machine without data."""
    if experiment.method.evaluate == "average":
        raise ConfigError(
            "method.evaluate = 'average' needs a test set at the server, since sites do not have the averaged model; "
            "write method.evaluate = 'server'"
        )
    own, choice = own_data(experiment), experiment.task
    options = {"validation": choice.validation_fraction > 0}
    return job_on(experiment, _made(experiment, own.without_examples, options))


def _made(
    experiment: Experiment, make: Callable[..., Task], options: dict[str, Any], folder: Path | None = None
) -> Task:
    """The task of a machine, with the initial weights that all machines have."""
    task = experiment.task
    given, file = {**options, "clients": dict(task.options)["clients"]}, task.kind.rpartition(":")[0]
    made = call_own(make, task.label, given, Key(experiment.seed), folder, file)
    assert isinstance(made, Task)
    return made


def own_data(experiment: Experiment) -> OwnData:
    """Data and model of an app, from its `task.py`."""
    kind = experiment.task.kind
    found = getattr(load_reference(kind), "__self__", None) if own_kind(kind) else None
    if not isinstance(found, OwnData):
        raise ConfigError(
            f"{short_name(kind)} is not the task of an `OwnData`; write `thinwire flower-app METHOD DIR --template "
            f"{TEMPLATE}` for an app with data of its own, and in task.py `task = own.task`"
        )
    return found
