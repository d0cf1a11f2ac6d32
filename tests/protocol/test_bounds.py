"""Bounds on influence: weights by what is known, parts by what they do, medians that are 0."""

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.core.tree import norm
from thinwire.data.examples import Arrays
from thinwire.data.partition import Assignment
from thinwire.data.task import Task
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.protocol import Method
from thinwire.protocol.bounds import Known, bound_uploads
from thinwire.protocol.upload import Upload
from thinwire.training import Local


def upload(length: float, weight: float = 10.0, steps: float = 0.0, **more) -> Upload:
    code = {"w": torch.tensor([length, 0.0])}
    report = {"steps": torch.tensor(steps)} if steps else {}
    return Upload(code, weight, {}, report, {}, norm(code))._replace(**more)


def bounded(*uploads: Upload, known=None, **more):
    return bound_uploads(dict(enumerate(uploads)), 3.0, {}, more.pop("buffers", {}), known=known or {}, **more)


def test_an_update_counts_three_medians_and_a_huge_one_is_refused():
    found = bounded(*(upload(1.0) for _ in range(6)), upload(-10.0), upload(2000.0))
    assert found.uploads[6].code["w"].tolist() == [-3.0, 0.0]
    assert (found.bounded.keys(), found.refused.keys(), found.heavy) == ({6}, {7}, {6, 7})


def test_a_weight_is_cut_to_the_known_one_and_never_refused():
    known = {0: Known(10.0, 1), 1: Known(1e6, 1), 2: Known(10.0, 1)}
    found = bounded(upload(1.0, 1e9), upload(1.0, 1e6), upload(1.0, 7.0), known=known)
    assert [one.weight for one in found.uploads.values()] == [10.0, 1e6, 7.0]
    assert (found.bounded.keys(), found.refused) == ({0}, {})
    unknown = bounded(upload(1.0, 1e9), upload(1.0), upload(1.0, 20.0))
    assert [one.weight for one in unknown.uploads.values()] == [200.0, 10.0, 20.0]
    claimed = bounded(upload(1.0, 60.0), upload(1.0), upload(1.0), known={0: Known(30.0)})
    assert claimed.uploads[0].weight == 30.0, "the first claim holds"


def test_weight_and_update_are_bounded_together_where_the_size_is_not_known():
    """A reversed update of honest length with a large weight turned the model round."""
    uploads = [*(upload(1.0) for _ in range(6)), upload(-2.0, 1e6)]
    found = bounded(*uploads).uploads[6]
    assert (found.weight, found.code["w"].tolist()) == (30.0, [-1.0, 0.0]), "as one median client three times"
    known = {i: Known(10.0, 1) for i in range(7)}
    found = bounded(*uploads, known=known).uploads[6]
    assert (found.weight, found.code["w"].tolist()) == (10.0, [-2.0, 0.0])


def test_more_local_steps_may_move_further_where_they_are_known():
    uploads = upload(1.0), upload(1.0), upload(40.0)
    assert bounded(*uploads).bounded
    assert not bounded(*uploads, known={i: Known(10.0, 20 if i == 2 else 1) for i in range(3)}).bounded


def test_the_division_of_fednova_comes_before_the_bound():
    def factor(one: Upload) -> float:
        return 1 / float(one.report["steps"])

    found = bounded(*(upload(8.0, steps=8.0) for _ in range(4)), upload(8.0, steps=1.0), factor=factor)
    assert found.uploads[4].code["w"].tolist() == [3.0, 0.0]
    assert found.bounded.keys() == {4}


def test_each_buffer_is_bounded_alone():
    start = {"mean": torch.zeros(2), "count": torch.tensor(0)}
    honest = {"mean": torch.full((2,), 0.1), "count": torch.tensor(800)}
    bad = {**honest, "mean": torch.full((2,), 1e30)}
    found = bounded(*(upload(1.0, buffers=honest) for _ in range(4)), upload(1.0, buffers=bad), buffers=start)
    assert float(found.uploads[4].buffers["mean"][0]) == pytest.approx(0.6)
    assert found.uploads[4].buffers["count"].dtype == torch.int64
    still = [upload(1.0, buffers=start)] * 3
    assert bounded(*still, upload(1.0, buffers=bad), buffers=start).uploads[3].buffers["mean"].tolist() == [0.0, 0.0]


def test_clients_without_a_gradient_do_not_silence_the_others():
    found = bounded(upload(0.0), upload(0.0), upload(0.0), upload(1.0), upload(1.2))
    assert not found.bounded
    assert not bounded(upload(0.0), upload(0.0), upload(5.0)).bounded


@pytest.mark.parametrize("big", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_client_with_nearly_all_examples_trains_as_without_bounds(big, seed):
    sizes, generator = (big, 1, 1), torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n + 1000, 20, generator=generator)
    y = (x @ torch.randn(20, generator=generator) > 0).long()
    parts = Assignment(np.arange(n), np.concatenate(([0], np.cumsum(sizes))))
    torch.manual_seed(seed)
    task = Task(nn.Linear(20, 2), Arrays(x[:n], y[:n]), parts, Arrays(x[n:], y[n:]))
    accuracy = []
    for limit in (0.0, 3.0):
        local = Local(epochs=1, batch=500)
        job = Job(task, Method(norm_bound=limit), rounds=2, cohort=3, local=local, seed=seed)
        simulation = make_simulation(Engine("cpu", "loop"), job)
        state = simulation.start()
        for _ in range(2):
            state, record = simulation.round(state)
            assert (record.refused, record.left_out) == (0, 0)
            assert "0" not in record.why
        accuracy.append(record.accuracy)
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.002)
