"""The record of a task of one's own in a run directory: its fingerprint and its number of clients, in `config.toml`.

The name of such a task does not define its data: the file or the data may change. A run is continued, and a finished
run is used again, only if model and data have the fingerprint (`data/fingerprint.py`) that they had at its start.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thinwire.data.fingerprint import fingerprint
from thinwire.errors import CheckpointError
from thinwire.experiments.build import build_job
from thinwire.experiments.experiment import Cohort, Experiment
from thinwire.experiments.toml import read_toml
from thinwire.runtime.job import Job


def settled(experiment: Experiment, data_dir: Path | None = None) -> tuple[Experiment, Job]:
    """An experiment with a task of one's own, with its fingerprint and the numbers of clients that it does not state.

    Raises:
        CheckpointError: if the experiment, as that of a run directory, has a fingerprint and the task another one.
    """
    job = build_job(experiment, data_dir)
    now, task = fingerprint(job.task), experiment.task
    if experiment.fingerprint not in ("", now):
        raise CheckpointError(_other(f"the run on {task.label} began", experiment.fingerprint, now))
    if not task.clients and not task.participating_clients and "clients" not in dict(task.options):
        task = replace(task, clients=len(job.task.clients))
    return replace(experiment, task=task, cohort=Cohort(job.cohort), fingerprint=now), job


def refuse_other_task(path: Path, now: str) -> None:
    """Refuse a run directory whose run began with another model or other data.

    Args:
        path: the run directory.
        now: the fingerprint of the task; "" for a task by name, which has none.
    """
    file = path / "config.toml"
    known = str(read_toml(file).get("fingerprint", "")) if file.is_file() else ""
    if now and known not in ("", now):
        raise CheckpointError(_other(f"{path} holds a run that began", known, now))


def _other(what: str, known: str, now: str) -> str:
    return (
        f"{what} with another model or other data (fingerprint {known[:40]}, now {now}); restore them, or name another "
        "directory with --out"
    )
