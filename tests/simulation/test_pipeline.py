"""Training ahead of the messages changes nothing but the time: on a CPU, where nothing is saved by it."""

from dataclasses import replace

import pytest
import torch
from thinwire.protocol.foresight import Foreseen, foreseeable

from tests.simulation.test_local import METHODS, bits, digits_task, job, same_public
from thinwire.optimizers import SGD, Adam, FedProx
from thinwire.protocol import Method
from thinwire.protocol.round import plan_round
from thinwire.simulation.engine import LocalEngine
from thinwire.spaces import MAPO
from thinwire.training.cuda_graph import CudaGraphCache

FORESEEN = {
    "plain": Method(),
    "proximal": Method(correction=FedProx(0.1)),
    "half a step": Method(server_opt=SGD(0.5, weight_decay=0.01)),
    "bases": Method(space=MAPO(k=40, redraw_every=3), client_opt=SGD(0.5)),
}
ROUNDS = 8


@pytest.fixture
def trainings(monkeypatch):
    """How many cohorts were trained."""
    count = []
    train = CudaGraphCache.train
    monkeypatch.setattr(CudaGraphCache, "train", lambda self, lesson: count.append(1) or train(self, lesson))
    return count


def play(method, hasty, task=None, **settings):
    simulation = LocalEngine(backend="graph").prepare(job(method, task or digits_task(), rounds=ROUNDS, **settings))
    simulation.ahead.on = hasty
    state, records, early = simulation.start(), [], []
    for _ in range(ROUNDS):
        state, record = simulation.round(state)
        records.append(record)
        early.append(simulation.ahead.early is not None)
    return state, records, early


@pytest.mark.parametrize("name", FORESEEN)
def test_haste_gives_the_same_bits_and_trains_no_cohort_twice(name, trainings):
    slow, records, _ = play(FORESEEN[name], False, eval_every=4)
    trainings.clear()
    fast, again, early = play(FORESEEN[name], True, eval_every=4)
    assert len(trainings) == ROUNDS
    assert bits(records) == bits(again)
    assert same_public(slow.server.public, fast.server.public)
    # not before the first round is over, nor past the last one or the end of a basis
    ends = {3, 6} if name == "bases" else set()
    assert early == [number not in {1, ROUNDS} | ends for number in range(1, ROUNDS + 1)]


def test_what_was_foreseen_wrongly_is_dropped_and_not_tried_again(trainings, monkeypatch):
    slow, records, _ = play(Method(), False)
    trainings.clear()
    monkeypatch.setattr(Foreseen, "confirmed", lambda self, code: False)
    fast, again, early = play(Method(), True, eval_every=ROUNDS)
    assert len(trainings) == ROUNDS + 1
    assert not any(early)
    assert [record.loss for record in records] == [record.loss for record in again]
    assert same_public(slow.server.public, fast.server.public)


def test_a_step_is_confirmed_by_its_bits():
    step = torch.tensor([1.0, 0.0])
    foreseen = Foreseen(step, {}, step.sum())
    assert foreseen.confirmed({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])})
    assert not foreseen.confirmed({"a": torch.tensor([1.0, -0.0])})
    assert not foreseen.confirmed({"a": torch.tensor([1.0])})


def test_another_state_than_the_one_foreseen_is_trained_anew(trainings):
    simulation = LocalEngine(backend="graph").prepare(job(Method(), digits_task(), rounds=ROUNDS, eval_every=ROUNDS))
    simulation.ahead.on = True
    first, _ = simulation.round(simulation.start())
    second, _ = simulation.round(first)
    assert simulation.ahead.early is not None
    again, _ = simulation.round(first)  # as after a return to a checkpoint
    assert same_public(second.server.public, again.server.public)
    assert len(trainings) == 5  # one for each round, and two ahead


@pytest.mark.parametrize("name", [*METHODS, "adam"])
def test_only_plain_means_of_plain_numbers_are_foreseen(name):
    method = Method(server_opt=Adam(0.01)) if name == "adam" else METHODS[name]
    simulation = LocalEngine(backend="graph").prepare(job(method))
    server = simulation.start().server
    contract = simulation.contract.at(0)
    expected = name == "fedavg"  # and what draws a basis in every round leaves no round to foresee
    assert foreseeable(contract, server, plan_round(contract, server)) is expected
    if expected:
        for change in ({"upload": "weights"}, {"download": "full"}, {"secure_aggregation": True}):
            other = LocalEngine(backend="graph").prepare(job(replace(method, **change)))
            state = other.start().server
            assert not foreseeable(other.contract.at(0), state, plan_round(other.contract, state))


def test_where_two_cohorts_are_too_much_one_is_trained_at_a_time(monkeypatch):
    slow, records, _ = play(Method(), False, eval_every=ROUNDS)
    train, count = CudaGraphCache.train, []

    def short_of_memory(self, lesson):
        count.append(1)
        if len(count) == 3:
            raise torch.OutOfMemoryError("two cohorts")
        return train(self, lesson)

    monkeypatch.setattr(CudaGraphCache, "train", short_of_memory)
    fast, again, early = play(Method(), True, eval_every=ROUNDS)
    assert not any(early)
    assert len(count) == ROUNDS + 1
    assert bits(records) == bits(again)
    assert same_public(slow.server.public, fast.server.public)
