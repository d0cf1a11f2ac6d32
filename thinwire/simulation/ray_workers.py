"""A simulation whose clients train in several processes: on all cores, GPUs or machines that Ray knows.

    engine.workers = 4                      four processes on this machine, a GPU each if the device is `cuda`
    RAY_ADDRESS=head:6379 thinwire run ...  the same on a cluster that was started with `ray start`

Every worker has the whole job, model and data, and calls the same `cohort_round` on its chunks of the cohort. Server,
evaluation and all states stay in this process. Chunks are trained as one process would train them: with as many cores
each, the same `chunk` gives the same bits. What travels is pickled by Ray, so all its machines must trust each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from thinwire.core.tree import to_device
from thinwire.errors import ConfigError
from thinwire.protocol.client import Haste, Reply
from thinwire.protocol.state import Public
from thinwire.runtime.job import Job
from thinwire.simulation.simulation import Portion, Simulation

if TYPE_CHECKING:
    from thinwire.simulation.engine import LocalEngine

INSTALL = "pip install 'thinwire[ray]'"
PATIENCE = 300.0  # seconds until all workers must have started


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


class RaySimulation(Simulation):
    """A job on its device and on workers; rounds, records and bytes are those of `Simulation`."""

    def __init__(self, engine: LocalEngine, job: Job) -> None:
        super().__init__(engine, job)
        self.ray = need_ray()
        cores, gpus = shares(engine.workers, [node["Resources"] for node in self.ray.nodes() if node["Alive"]])
        if self.device.type == "cuda":
            if not gpus:
                raise ConfigError("device 'cuda' was asked for, but Ray knows no GPU; write device = 'cpu'")
            cores = 1
        make = self.ray.remote(Worker).options(num_cpus=cores, num_gpus=gpus if self.device.type == "cuda" else 0)
        alone = replace(engine, device=self.device.type, workers=0)  # Ray shows a worker its own GPU only
        whole = self.ray.put(job)
        self.workers = [make.remote(alone, whole) for _ in range(engine.workers)]
        try:
            found = self.ray.get([worker.schema.remote() for worker in self.workers], timeout=PATIENCE)
        except self.ray.exceptions.GetTimeoutError as error:
            raise ConfigError(f"{engine.workers} workers did not start in {PATIENCE:.0f} seconds; try fewer") from error
        if set(found) != {self.contract.schema.digest}:
            raise ConfigError("workers made another model or method of this job; give all machines the same versions")

    def _replies(self, portions: list[tuple[Portion, Public]], haste: Haste) -> Iterator[Reply]:
        """What the clients of each portion give back; number k is trained by worker k, and round again."""
        sent = {id(seen): self.ray.put(_on(seen, "cpu")) for _, seen in portions}
        jobs = []
        for k, (portion, seen) in enumerate(portions):
            jobs.append(self.workers[k % len(self.workers)].train.remote(portion, sent[id(seen)]))
        try:
            if haste.meanwhile is not None:
                haste.meanwhile()
            for job in jobs:
                yield self.ray.get(job)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # as if it had happened here
        finally:
            self.ray.wait(jobs, num_returns=len(jobs))


class Worker:
    """What runs in another process."""

    def __init__(self, engine: LocalEngine, job: Job) -> None:
        self.simulation = Simulation(engine, job)

    def schema(self) -> bytes:
        """What both ends must have agreed on."""
        return self.simulation.contract.schema.digest

    def train(self, portion: Portion, seen: Public) -> Reply:
        """Train some clients."""
        here = self.simulation
        with here.kernels(portion.onednn):
            reply = here.train_portion(portion, _on(seen, here.device))
        return reply._replace(messages=list(map(bytes, reply.messages)))  # a view does not travel


def _on(public: Public, device: torch.device | str) -> Public:
    """The public state on another device."""
    trees = (public.base, public.coords, public.shared, public.buffers)
    return Public(public.version, *(to_device(tree, device) for tree in trees))


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
