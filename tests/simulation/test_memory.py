"""Cohorts that do not fit into the memory of a GPU, with a simulated error; `test_devices.py` has a real one."""

import pytest
import torch

from tests.simulation.test_engine import bits, job, play, same_public
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.training.cuda_graph import CudaGraphCache


def limit_memory(monkeypatch, most: int):
    """Raise an error for more than this number of clients at a time."""
    train = CudaGraphCache.train

    def limited(self, inputs):
        if len(inputs.work.samples) <= most:
            return train(self, inputs)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(CudaGraphCache, "train", limited)


@pytest.mark.parametrize("backend", ["auto", "graph"])
def test_a_cohort_that_does_not_fit_into_memory_is_trained_in_smaller_groups(backend, monkeypatch):
    _, chunked, records = play(job(cohort=6), Engine(backend="graph", chunk=2))
    limit_memory(monkeypatch, 2)
    simulation = make_simulation(Engine(backend=backend), job(cohort=6))
    state = simulation.start()._replace(backend="graph", backend_reason="given")  # as on a GPU
    again = []
    for _ in range(3):
        state, record = simulation.round(state)
        again.append(record)
    assert (state.backend, state.chunk) == ("graph", 2)
    assert state.backend_reason.count("clients at a time do not fit into the memory of cpu") == 2, "6, and 3"
    assert bits(records) == bits(again)
    assert same_public(state.server.public, chunked[-1].server.public)


@pytest.mark.parametrize(
    ("most", "chunk", "message"),
    [
        (2, 3, "cpu has too little memory to train 3 clients at a time; write for example engine.chunk = 1"),
        (0, 0, "cpu has too little memory to train one client at a time; write for example local.batch = 8"),
    ],
)
def test_groups_that_cannot_be_smaller_are_an_error(most, chunk, message, monkeypatch):
    limit_memory(monkeypatch, most)
    with pytest.raises(ConfigError) as raised:
        play(job(cohort=6), Engine(backend="graph", chunk=chunk))
    assert str(raised.value) == message
