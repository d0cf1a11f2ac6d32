"""A deployment over a transport in memory equals the simulation, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.federation import same_public
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.data.partition import Assignment
from thinwire.data.task import Task, pool_clients
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve

ALONE = {"engine.backend": "loop", "engine.chunk": 1}


def experiment(method: str, **overrides):
    quick = {"task.clients": 4, "cohort.size": 3, "local.steps": 3, "rounds": 4}
    return resolve(method, "digits", {**quick, **ALONE, **overrides})


def play(runner, rounds: int, state=None):
    """Run some rounds; the state, the records without their seconds, and all messages."""
    state, records, messages = state or runner.start(), [], []
    for _ in range(rounds):
        state, record = runner.round(state, lambda *message: messages.append(message))
        records.append(record._replace(seconds=0.0, client_accuracy=None))
    return state, records, messages


# a window, states of clients, private blocks, a schedule, state of a codec, no backward pass, masks, tiers, two stages,
# products of factors, sampled masks, sketches
METHODS = [
    "mapo",
    "scaffold",
    "pfedpara",
    "fedlama",
    "ef+topk+int4",
    "decomfl",
    "flasc",
    "hetlora",
    "slora",
    "flora-stack",
]
METHODS += ["flora-stack", "fedpm", "fetchsgd"]
METHODS += ["diloco", "muloco", "rolora", "fedsvd", "fedmud"]
MORE = ["fedavg", "lattice-topk", "fedper", "highest-tier", "sparse-adapter", "federated-select", "flora"]
MORE += ["fed-sb", "fedex-lora", "fedkseed", "ferret", "fedmrn"]

SETTINGS = {name: {"method.next_stage.at": 2} for name in ("flora", "slora")}
SETTINGS |= {"fedkseed": {"method.space.p": 100}, "decomfl": {"method.space.p": 6, "method.client_opt.directions": 2}}


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_a_deployment_equals_the_simulation(method):
    chosen = experiment(method, seed=3, **SETTINGS.get(method, {}))
    job = build_job(chosen)
    theirs, their_records, their_messages = play(make_simulation(chosen.engine, job), 4)
    transport = InMemory(Client(chosen.engine, job))
    server = FlowerServer(chosen.engine, job, transport, RoundPolicy(quorum=1.0))
    ours, records, messages = play(server, 4)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)  # the simulation trains tier by tier
    assert records == their_records


@pytest.mark.parametrize(("method", "keeps"), [("decomfl", False), ("fedkseed", False), ("fedavg", True)])
def test_without_a_backward_pass_no_tensor_is_kept_for_one(method, keeps):
    chosen, kept = experiment(method, **SETTINGS.get(method, {})), []
    job = build_job(chosen)
    server = FlowerServer(chosen.engine, job, InMemory(Client(chosen.engine, job)))
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        play(server, 1)
    assert bool(kept) == keeps


def test_noise_for_privacy_does_not_depend_on_the_seed():
    """Clients know the seed, so a deployment draws its noise from another source; everything else is equal."""
    chosen = experiment("dp-fedadam")
    job = build_job(chosen)

    def ends(sigma: float):
        private = replace(job, method=replace(job.method, privacy=replace(job.method.privacy, sigma=sigma)))
        server = FlowerServer(chosen.engine, private, InMemory(Client(chosen.engine, private)))
        return play(server, 1)[0].server.public, play(make_simulation(chosen.engine, private), 1)[0].server.public

    assert same_public(*ends(0.0))
    assert not same_public(*ends(0.5))


class OwnData(InMemory):
    """Clients that have only their own examples."""

    def __init__(self, sites: dict[int, Client]) -> None:
        super().__init__(sites[0])
        self.places = sites

    def respond(self, number, request):
        self.client = self.places[number]
        return super().respond(number, request)


def test_clients_with_only_their_own_examples_equal_the_simulation():
    chosen = experiment("scaffold", rounds=2)
    job = build_job(chosen)
    sites = {}
    for i in range(4):
        inputs, targets = job.task.train.gather(torch.from_numpy(job.task.clients.client(i)))
        pool, _ = pool_clients([(inputs, targets)])
        every = Assignment(np.tile(np.arange(len(pool)), 4), len(pool) * np.arange(5))
        task = Task(job.task.model, pool, every)
        sites[i] = Client(chosen.engine, replace(job, task=task))
    theirs, _, their_messages = play(make_simulation(chosen.engine, job), 2)
    ours, _, messages = play(FlowerServer(chosen.engine, job, OwnData(sites)), 2)
    assert same_public(ours.server.public, theirs.server.public)
    assert messages == their_messages
