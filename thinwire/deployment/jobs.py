"""The experiment of a deployment, and the job of each of its machines.

`job(node_config)` returns the `Job` of a machine: on a node, with its local examples; on the server (None), with the
test set. Model, method and seed must be the same on all machines; this is checked before training starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.config import Checkpointing, Experiment, from_table
from thinwire.experiments.task_files import OWN, anchored
from thinwire.experiments.task_record import settled
from thinwire.experiments.toml import read_toml
from thinwire.runtime.job import Job

ROLLING = 10  # checkpoints of a deployment, one a round: `thinwire rollback` goes back to one of them
MakeJob = Callable[[Mapping[str, Any] | None], Job]


def deployable(experiment: Experiment) -> Experiment:
    """The experiment as a deployment runs it: clients train separately, and every round is checkpointed.

    With a checkpoint per round, a restarted server repeats at most the round whose uploads its clients sent last.
    Clients derive their learning rates from the method that they were started with, so the server cannot halve them.
    """
    if experiment.checkpoint.on_divergence == "retry":
        raise ConfigError(
            "on_divergence = 'retry' is for simulations: clients of a deployment cannot go back; write 'stop'"
        )
    if experiment.attack is not None:
        raise ConfigError("an attack is for simulations: clients of a deployment are real; leave [attack] out")
    if experiment.method.opt_owner == "place":
        raise ConfigError(
            "opt_owner = 'place' is for simulations: no message carries an optimizer state from client to client; "
            "write opt_owner = 'client'"
        )
    if experiment.task.kind.startswith(OWN):
        raise ConfigError(
            f"the task {experiment.task.label!r} is an object of this process, which nodes do not have; write it into "
            "a file and name it, such as my_task.py:task"
        )
    if experiment.task.scale == "estimated":
        raise ConfigError(
            "task.scale = 'estimated' exchanges sums before the first round, which a deployment does not do yet; write "
            "task.scale = 'standard', or 'unit', or simulate"
        )
    engine = replace(experiment.engine, backend="loop", chunk=1)
    checkpoint = Checkpointing(1, best=experiment.checkpoint.best, keep=max(experiment.checkpoint.keep, ROLLING))
    return replace(experiment, engine=engine, checkpoint=checkpoint)


def read_experiment(path: Path) -> Experiment:
    """Read the experiment of an app folder; files that it names are relative to its own folder."""
    return deployable(from_table(anchored(read_toml(path), path.parent)))


def job_of(experiment: Experiment, node_config: Mapping[str, Any] | None) -> Job:
    """The job of a machine that can read the whole dataset: the same partition as in the simulation."""
    folder = (node_config or {}).get("data-dir") or os.environ.get("THINWIRE_DATA")
    return _job_from(experiment, Path(str(folder)) if folder else None)


@lru_cache(1)  # Flower's simulation runs many nodes in one process
def _job_from(experiment: Experiment, folder: Path | None) -> Job:
    return settled(experiment, folder)[1] if experiment.fingerprint else build_job(experiment, folder)


def clients_of_node(node_config: Mapping[str, Any], clients: int) -> list[int]:
    """The clients of a node: those whose index modulo `num-partitions` is its `partition-id`.

    >>> clients_of_node({"partition-id": 1, "num-partitions": 4}, 10)
    [1, 5, 9]
    """
    part, parts = node_config.get("partition-id"), node_config.get("num-partitions")
    if not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
        raise ConfigError(f"--node-config needs partition-id=0 num-partitions={clients} (from 0), not {node_config!r}")
    return list(range(part, clients, parts))
