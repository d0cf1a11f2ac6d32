"""A simulation whose clients train in several processes: on all cores, GPUs or machines that Ray manages.

    engine.workers = 4                      four processes on this machine, a GPU each if the device is `cuda`
    RAY_ADDRESS=head:6379 thinwire run ...  the same on a cluster that was started with `ray start`

Every worker has the whole job, model and data, and trains groups of the cohort as one process would: with as many cores
each, the same `chunk` gives the same bits. Server, evaluation and all states stay in this process. The examples are in
the memory that Ray shares on a machine, once for all its workers. Ray pickles what is exchanged, so all its machines
must trust each other.

Where uploads are values as they are and their weighted mean is what the server computes, they stay in the workers:

    worker   decodes and checks its clients' messages        -> weight, norm, loss, or why it is refused
    server   bounds, standing, fractions p_i of the mean, by these
    workers  sum_i p_i x_i in the order of the clients, from worker to worker, with the bits of one process

The server receives the sum alone. It fetches single updates when it needs them: all of a round in which a client is
bounded, and messages that someone watches. Elsewhere it receives every message: short ones of codecs, corrections,
robust aggregators, privacy and masks, which need each update.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.tree import Remote, Spec, Vector, bring
from thinwire.errors import ConfigError, WireError
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Collected, Federation
from thinwire.federation.job import Job
from thinwire.federation.simulated import GroupTask, SimulatedClients
from thinwire.federation.transfer import Packed, pack, shared, unpack, values_of
from thinwire.protocol.contract import Contract
from thinwire.protocol.method import Method
from thinwire.protocol.round import Reply
from thinwire.protocol.state import PublicState
from thinwire.protocol.upload import Upload, decode_upload
from thinwire.schedules.base import Plan
from thinwire.wire.bits import Bytes

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
        self.ray.util.register_serializer(Tensor, serializer=values_of, deserializer=shared)
        whole = self.ray.put(self.job)
        self.ray.util.deregister_serializer(Tensor)
        self.averages = averages_there(self.contract)
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
            jobs.append(self.workers[k % len(self.workers)].train.remote(pack(rest), public, self.averages))
        try:
            self.downloads(got)
            for k, job in enumerate(jobs):
                found, there = unpack(self.ray.get(job)), self.workers[k % len(self.workers)]
                if self.averages:
                    yield [one._replace(message=Kept(self.ray, there, one.client, *kept)) for one, *kept in found]
                else:
                    yield [one._replace(message=bytes(one.message)) for one in found]
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # as if it had happened here
        finally:
            self.ray.wait(jobs, num_returns=len(jobs))

    def decoded(self, got: Collected, reply: Reply) -> Upload:
        """The decoded upload of a client; raises WireError if its worker, or this process, could not decode it."""
        if not isinstance(reply.message, Kept):
            return super().decoded(got, reply)
        if isinstance(upload := reply.message.upload, str):
            raise WireError(upload)
        sent = self.contract.at(reply.version).sent(got.round.plan).code
        return upload._replace(code=Away(self.ray, reply.message.worker, reply.client, sent))


def averages_there(contract: Contract) -> bool:
    """Whether workers keep the updates of their clients, and the server receives their mean."""

    def suits(method: Method) -> bool:
        plain = method.aggregator.is_weighted_mean and method.upload == "delta" and method.space.stacking is None
        hidden = method.privacy.active or method.secure_aggregation
        exact = all(one.exact for one in method.ups) and method.sketch.is_identity
        return plain and exact and not hidden and not method.correction.active

    return all(suits(one.method) and one.coords.dtype == torch.float32 and not one.has_hints for one in contract.stages)


class Kept:
    """A message that a worker keeps: its length, and its upload without the update, or why it is refused."""

    def __init__(self, ray: Any, worker: Any, client: int, length: int, upload: Upload | str) -> None:
        self.ray, self.worker, self.client, self.length, self.upload = ray, worker, client, length, upload

    def __len__(self) -> int:
        return self.length

    def __bytes__(self) -> bytes:
        return bytes(self.ray.get(self.worker.message.remote(self.client)))


class Away(Remote):
    """The update of a client in a worker; its data is fetched when it is read."""

    ray: Any
    worker: Any
    client: int

    def __init__(self, ray: Any, worker: Any, client: int, spec: Spec) -> None:
        vars(self).update(ray=ray, worker=worker, client=client, spec=spec)

    @cached_property
    def data(self) -> Tensor:  # type: ignore[override]
        """Its values."""
        return torch.from_numpy(self.ray.get(self.worker.add.remote(None, [self.client], [1.0])).copy())

    def weighted_sum(self, trees: Sequence[Away], fractions: Sequence[float]) -> Vector:
        """The sum, from worker to worker."""
        total = None
        for worker, its in itertools.groupby(zip(trees, fractions, strict=True), lambda one: one[0].worker):
            part = [(tree.client, fraction) for tree, fraction in its]
            total = worker.add.remote(total, *map(list, zip(*part, strict=True)))
        return Vector(torch.from_numpy(self.ray.get(total).copy()), self.spec)


class Worker:
    """A worker process: the same federation, which trains the groups that it is given."""

    def __init__(self, engine: Engine, job: Job) -> None:
        # tensors of the job are in the memory that processes share; of these, only a model is ever written to
        task = replace(job.task, model=copy.deepcopy(job.task.model))
        self.federation = Federation(engine, replace(job, task=task))
        self.clients = SimulatedClients(self.federation)
        self.kept = dict[int, tuple[Bytes, Tensor]]()  # message and update of each client
        self.round = -1

    def schema(self) -> bytes:
        """The hash of method, model, initial weights and seed, which must be the same everywhere."""
        return self.federation.contract.schema.digest

    def train(self, task: Packed, public: Packed, keep: bool = False) -> Packed:
        """Train a group from a public state; returns its replies.

        Args:
            task: a `GroupTask` without public state.
            public: the public state.
            keep: whether messages stay here; replies have their length, and the upload without the update, or why not.
        """
        given, start = unpack(task), _on(unpack(public), self.federation.device)
        with self.federation.compute():
            replies = self.clients.answer(given._replace(group=given.group._replace(public=start)))
        if self.round != given.number:
            self.kept, self.round = {}, given.number
        if keep:
            return pack([(one._replace(message=b""), *self.keep(one, given.group.plan)) for one in replies])
        return pack([one._replace(message=memoryview(one.message)) for one in replies])  # views are not copied

    def keep(self, reply: Reply, plan: Plan) -> tuple[int, Upload | str]:
        """Keep a message and its update; returns the length, and the upload without it or why it is refused."""
        contract, size = self.federation.contract.at(reply.version), len(reply.message)
        try:
            upload = decode_upload(contract, plan, reply.version, reply.client, bytes(reply.message))
        except WireError as error:
            return size, str(error)
        assert isinstance(upload.code, Vector)
        self.kept[reply.client] = reply.message, upload.code.data
        return size, upload._replace(code={})

    def message(self, client: int) -> bytes:
        """The message of a client."""
        return bytes(self.kept[client][0])

    def add(self, total: np.ndarray | None, clients: Sequence[int], fractions: Sequence[float]) -> np.ndarray:
        """The total and the updates of some clients times their fractions, added in this order."""
        first = total is None
        out = torch.from_numpy(np.array(total)) if total is not None else torch.empty_like(self.kept[clients[0]][1])
        for client, fraction in zip(clients, fractions, strict=True):
            its = self.kept[client][1]
            torch.mul(its, fraction, out=out) if first else out.add_(its, alpha=fraction)
            first = False
        return out.numpy()


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
