"""The record of a task of one's own in a run directory: `task.json`, with its fingerprint.

The name of such a task does not define its data: the file or the data may change. A run is continued, and a finished
run is used again, only if model and data have the fingerprint (`data/fingerprint.py`) that they had at its start.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.data.fingerprint import fingerprint
from thinwire.data.task import Task
from thinwire.errors import CheckpointError
from thinwire.experiments.experiment import Cohort, Experiment
from thinwire.experiments.files import read_json, write_atomically
from thinwire.experiments.task_files import OWN
from thinwire.runtime.job import Job

RECORD = "task.json"


def settled(experiment: Experiment, job: Job) -> Experiment:
    """The experiment with the numbers of clients of its task, where it states none: for readers of its results."""
    task = experiment.task
    if not task.clients and not task.participating_clients and "clients" not in dict(task.options):
        task = replace(task, clients=len(job.task.clients))
    return replace(experiment, task=task, cohort=Cohort(job.cohort))


def check_task(path: Path, task: Task) -> None:
    """Refuse a run directory whose run began with another model or other data."""
    known, now = _read(path).get("fingerprint"), fingerprint(task)
    if known is not None and known != now:
        raise CheckpointError(
            f"{path} holds a run with another model or other data (fingerprint {known}, now {now}); restore them, or "
            "name another directory with --out"
        )


def keep_task(path: Path, kind: str, task: Task) -> None:
    """Write the record of a task; refuses a directory with that of another one.

    Args:
        path: the run directory.
        kind: the name of the task; that of an object of Python has a script.
        task: the task.
    """
    check_task(path, task)
    record = {"fingerprint": fingerprint(task), "model": type(task.model).__name__}
    record |= {"script": sys.argv[0]} if kind.startswith(OWN) else {}
    if not (path / RECORD).is_file():
        write_atomically(path / RECORD, (json.dumps(record, indent=1) + "\n").encode())


def script_of(path: Path) -> str:
    """The script that made a run."""
    return str(_read(path).get("script") or "your_script.py")


def _read(path: Path) -> dict[str, Any]:
    file = path / RECORD
    if not file.is_file():
        return {}
    found = read_json(file)
    return found if isinstance(found, dict) else {}
