"""A simulation whose clients train in several processes: on all cores, GPUs or machines that Ray manages.

    engine.workers = 4                      four processes on this machine, a GPU each if the device is `cuda`
    RAY_ADDRESS=head:6379 thinwire run ...  the same on a cluster that was started with `ray start`

Every worker has the whole job, model and data, and trains groups of the cohort as one process would: with as many cores
each, the same `chunk` gives the same bits. Server, evaluation and all states stay in this process. Ray pickles what is
exchanged, so all its machines must trust each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from thinwire.core.tree import bring
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import Job
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.federation.transfer import Packed, pack, unpack
from thinwire.protocol.round import Reply
from thinwire.protocol.state import PublicState

INSTALL = "pip install 'thinwire[ray]'"
START_SECONDS = 300.0  # until all workers must have started


def need_ray() -> Any:
    """Ray, connected to a cluster or started here; one line on how to install it, if it is not there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray is going to do, without its warning
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"workers need Ray, which is not installed here; write: {INSTALL}") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return ray


class RayClients(SimulatedClients):
    """Simulated clients whose groups are trained by workers; rounds, records and bytes are the same."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.ray, engine, kind = need_ray(), federation.engine, federation.device.type
        cores, gpus = shares(engine.workers, [node["Resources"] for node in self.ray.nodes() if node["Alive"]])
        if kind == "cuda":
            if not gpus:
                raise ConfigError("device 'cuda' was given, but Ray manages no GPU; write device = 'cpu'")
            cores = 1
        make = self.ray.remote(Worker).options(num_cpus=cores, num_gpus=gpus if kind == "cuda" else 0)
        alone = replace(engine, device=kind, workers=0)  # Ray shows a worker only its own GPU
        whole = self.ray.put(self.job)
        self.workers = [make.remote(alone, whole) for _ in range(engine.workers)]
        try:
            found = self.ray.get([worker.schema.remote() for worker in self.workers], timeout=START_SECONDS)
        except self.ray.exceptions.GetTimeoutError as error:
            raise ConfigError(
                f"{engine.workers} workers did not start in {START_SECONDS:.0f} seconds; try fewer"
            ) from error
        if set(found) != {self.contract.schema.digest}:
            raise ConfigError(
                "workers built another model or method from this job; install the same versions everywhere"
            )

    def answers(self, tasks: list[GroupTask], got: Collected) -> Iterator[list[Reply]]:
        """The replies of all groups; group k is trained by worker k, modulo the number of workers."""
        sent = {id(task.group.public): self.ray.put(pack(_on(task.group.public, "cpu"))) for task in tasks}
        jobs = []
        for k, task in enumerate(tasks):
            rest = task._replace(group=task.group._replace(public=None))  # type: ignore[arg-type]
            public = sent[id(task.group.public)]
            jobs.append(self.workers[k % len(self.workers)].train.remote(pack(rest), public))
        try:
            self.downloads(got)
            for job in jobs:
                yield [one._replace(message=bytes(one.message)) for one in unpack(self.ray.get(job))]
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # as if it had happened here
        finally:
            self.ray.wait(jobs, num_returns=len(jobs))


class Worker:
    """A worker process: the same federation, which trains the groups that it is given."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.federation = Federation(engine, job)
        self.clients = SimulatedClients(self.federation)

    def schema(self) -> bytes:
        """The hash of method, model, initial weights and seed, which must be the same everywhere."""
        return self.federation.contract.schema.digest

    def train(self, task: Packed, public: Packed) -> Packed:
        """Train a group (a `GroupTask` without public state) from a public state; returns its replies."""
        given, start = unpack(task), _on(unpack(public), self.federation.device)
        with self.federation.compute():
            replies = self.clients.answer(given._replace(group=given.group._replace(public=start)))
        return pack([one._replace(message=memoryview(one.message)) for one in replies])  # views are not copied


def _on(public: PublicState, device: torch.device | str) -> PublicState:
    """The public state on another device."""
    return PublicState(public.version, *bring(public[1:], device))


def shares(workers: int, nodes: list[dict[str, float]]) -> tuple[int, float]:
    """Cores and GPUs of one worker, so that all find room on these machines.

    >>> shares(2, [{"CPU": 8}]), shares(2, [{"CPU": 3}, {"CPU": 2}]), shares(3, [{"CPU": 16, "GPU": 2}])
    ((4, 0.0), (2, 0.0), (5, 0.5))
    """
    cores, gpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("CPU", "GPU"))
    if workers > sum(cores):
        raise ConfigError(f"workers must be at most the {sum(cores)} cores that Ray knows, not {workers}")
    most = next(share for share in range(max(cores), 0, -1) if sum(n // share for n in cores) >= workers)
    each = next((n for n in range(1, workers + 1) if n * sum(gpus) >= workers), 0)  # workers on one GPU
    return most, math.floor(1e4 / each) / 1e4 if each else 0.0
