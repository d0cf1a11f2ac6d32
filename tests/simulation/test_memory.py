"""Cohorts that do not fit into the memory of a GPU: an error stands for it here, `test_devices.py` has a real one."""

import pytest
import torch

from tests.simulation.test_local import bits, job, play, same_public
from thinwire.errors import ConfigError
from thinwire.simulation import LocalEngine
from thinwire.training.cuda_graph import CudaGraphCache


def small_gpu(monkeypatch, most: int):
    """A device that cannot hold more than so many clients."""
    train = CudaGraphCache.train

    def short(self, lesson):
        if len(lesson.work) <= most:
            return train(self, lesson)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(CudaGraphCache, "train", short)


@pytest.mark.parametrize("backend", ["auto", "graph"])
def test_clients_that_do_not_fit_into_memory_are_trained_in_halves(backend, monkeypatch):
    _, chunked, records = play(job(cohort=6), LocalEngine(backend="graph", chunk=2))
    small_gpu(monkeypatch, 2)
    simulation = LocalEngine(backend=backend).prepare(job(cohort=6))
    state = simulation.start()._replace(how="graph", why="asked for")  # as on a GPU
    again = []
    for _ in range(3):
        state, record = simulation.round(state)
        again.append(record)
    assert (state.backend, state.chunk) == ("graph", 2)
    assert state.backend_reason.count("clients at a time are more than the memory of cpu holds") == 2, "6, and 3"
    assert bits(records) == bits(again)
    assert same_public(state.server.public, chunked[-1].server.public)


@pytest.mark.parametrize(
    ("most", "chunk", "says"),
    [
        (2, 3, "cpu has too little memory to train 3 clients at a time; write for example engine.chunk = 1"),
        (0, 0, "cpu has too little memory to train one client at a time; write for example local.batch = 8"),
    ],
)
def test_where_halves_cannot_help_one_line_says_what_can(most, chunk, says, monkeypatch):
    small_gpu(monkeypatch, most)
    with pytest.raises(ConfigError) as refused:
        play(job(cohort=6), LocalEngine(backend="graph", chunk=chunk))
    assert str(refused.value) == says
