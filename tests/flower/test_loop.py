"""The loop of a deployment over a transport in memory: as the simulation, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.federation import same_public
from thinwire.data.task import Task, alone
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.flower.server import FlowerServer
from thinwire.flower.transport import InMemory

ALONE = {"engine.backend": "loop", "engine.chunk": 1}


def experiment(method: str, **overrides):
    quick = {"task.clients": 4, "cohort.size": 3, "local.steps": 3, "rounds": 4}
    return resolve(method, "digits", {**quick, **ALONE, **overrides})


def play(simulation, rounds: int, state=None):
    """Some rounds; gives the state, the records without their seconds, and all messages."""
    state, records, messages = state or simulation.start(), [], []
    for _ in range(rounds):
        state, record = simulation.round(state, lambda *seen: messages.append(seen))
        records.append(record._replace(seconds=0.0, client_accuracy=None))
    return state, records, messages


METHODS = ["fedavg", "mapo", "scaffold", "pfedpara", "fedlama", "ef+topk+int4", "fedper"]
METHODS += ["flasc", "hetlora", "highest-tier", "sparse-adapter", "federated-select"]  # masks, tiers, some not asked
METHODS += ["flora", "slora"]  # two stages


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_is_the_simulation(method):
    chosen = experiment(method, seed=3, **({"method.next_stage.at": 2} if method in ("flora", "slora") else {}))
    job = build_job(chosen)
    theirs, their_records, their_messages = play(chosen.engine.prepare(job), 4)
    served = FlowerServer(chosen.engine, job, lambda *_: InMemory(Client(chosen.engine, job)), RoundPolicy(quorum=1.0))
    ours, records, messages = play(served, 4)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)  # the simulation trains tier by tier
    assert records == their_records


def test_noise_for_privacy_is_nobody_s_to_know():
    """Clients know the seed, from which the simulation draws its noise; a deployment draws anew, all else the same."""
    chosen = experiment("dp-fedadam")
    job = build_job(chosen)

    def ends(sigma: float):
        private = replace(job, method=replace(job.method, privacy=replace(job.method.privacy, sigma=sigma)))
        served = FlowerServer(chosen.engine, private, lambda *_: InMemory(Client(chosen.engine, private)))
        return play(served, 1)[0].server.public, play(chosen.engine.prepare(private), 1)[0].server.public

    assert same_public(*ends(0.0))
    assert not same_public(*ends(0.5))


class OwnData(InMemory):
    """Clients that hold their own examples and nobody else's."""

    def __init__(self, sites: dict[int, Client]) -> None:
        super().__init__(sites[0])
        self.sites = sites

    def answer(self, number, ask):
        self.client = self.sites[number]
        return super().answer(number, ask)


def test_nodes_with_nothing_but_their_own_examples_are_the_simulation_too():
    chosen = experiment("scaffold", rounds=2)
    job = build_job(chosen)
    sites = {}
    for i in range(4):
        inputs, targets = job.task.train.gather(torch.from_numpy(job.task.clients.client(i)))
        task = Task(job.task.model, *alone(inputs, targets, 4))
        sites[i] = Client(chosen.engine, replace(job, task=task))
    theirs, _, their_messages = play(chosen.engine.prepare(job), 2)
    ours, _, messages = play(FlowerServer(chosen.engine, job, lambda *_: OwnData(sites)), 2)
    assert same_public(ours.server.public, theirs.server.public)
    assert messages == their_messages
