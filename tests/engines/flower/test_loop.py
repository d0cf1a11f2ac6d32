"""The loop of a deployment over a transport in memory: as the simulation, bit for bit."""

from __future__ import annotations

import pytest

from tests.federation import same_public
from thinwire.engines.flower.client import Client
from thinwire.engines.flower.server import Patience, Served
from thinwire.engines.flower.transport import InMemory
from thinwire.run.build import build_job
from thinwire.run.config import resolve

ALONE = {"engine.vectorise": "loop", "engine.chunk": 1}


def experiment(method: str, **overrides):
    quick = {"task.clients": 4, "cohort.size": 3, "local.steps": 3, "rounds": 4}
    return resolve(method, "digits", {**quick, **ALONE, **overrides})


def play(simulation, rounds: int, state=None):
    """Some rounds; gives the state, the records without their seconds, and all messages."""
    state, records, messages = state or simulation.start(), [], []
    for _ in range(rounds):
        state, record = simulation.round(state, lambda *seen: messages.append(seen))
        records.append(record._replace(seconds=0.0, own_accuracy=None))
    return state, records, messages


@pytest.mark.parametrize("method", ["fedavg", "mapo", "scaffold", "pfedpara", "fedlama", "ef+topk+int4", "fedper"])
def test_a_deployment_is_the_simulation(method):
    chosen = experiment(method)
    job = build_job(chosen)
    theirs, their_records, their_messages = play(chosen.engine.prepare(job), 4)
    served = Served(chosen.engine, job, lambda *_: InMemory(Client(chosen.engine, job)), Patience(quorum=1.0))
    ours, records, messages = play(served, 4)
    assert same_public(ours.server.public, theirs.server.public)
    assert messages == their_messages
    assert records == their_records
