"""Speculative training of the next cohort does not change results; here on a CPU, where it is otherwise off."""

from dataclasses import replace

import pytest
import torch

from tests.federation import digits_task, same_public
from tests.simulation.test_engine import METHODS, bits, job
from thinwire.core.tree import Tree, same, tmap
from thinwire.federation import federation as federation_module, pipeline as pipeline_module
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.pipeline import PipelinedClients, Trained, is_predictable, predict
from thinwire.federation.simulated import GroupTask
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD, Adam, FedProx
from thinwire.optimizers.base import Optimizer
from thinwire.protocol import Method
from thinwire.protocol.client import Group
from thinwire.protocol.round import Round
from thinwire.protocol.upload import raw
from thinwire.spaces import MAPO
from thinwire.training.cuda_graph import CudaGraphCache
from thinwire.wire import message as wire

PREDICTABLE = {
    "plain": Method(),
    "proximal": Method(correction=FedProx(0.1)),
    "server learning rate": Method(server_opt=SGD(0.5, weight_decay=0.01)),
    "bases": Method(space=MAPO(k=40, redraw_every=3), client_opt=SGD(0.5)),
}
ROUNDS = 8


@pytest.fixture
def trainings(monkeypatch):
    """One entry for each cohort that was trained."""
    count = []
    train = CudaGraphCache.train
    monkeypatch.setattr(CudaGraphCache, "train", lambda self, inputs: count.append(1) or train(self, inputs))
    return count


def prepare(run):
    """A federation with the clients of a GPU."""
    return Federation(Engine(backend="graph"), run, PipelinedClients)


def play(method, speculative, task=None, **settings):
    simulation = prepare(job(method, task or digits_task(), rounds=ROUNDS, **settings))
    simulation.clients.on = speculative
    state, records, ahead = simulation.start(), [], []
    for _ in range(ROUNDS):
        state, record = simulation.round(state)
        records.append(record)
        ahead.append(simulation.clients._next is not None)
    return state, records, ahead


@pytest.mark.parametrize("name", PREDICTABLE)
def test_speculation_gives_the_same_bits_and_trains_no_cohort_twice(name, trainings):
    slow, records, _ = play(PREDICTABLE[name], False, eval_every=4)
    trainings.clear()
    fast, again, ahead = play(PREDICTABLE[name], True, eval_every=4)
    assert len(trainings) == ROUNDS
    assert bits(records) == bits(again)
    assert same_public(slow.server.public, fast.server.public)
    # not in the first round, nor beyond the last one or the end of a window
    ends = {3, 6} if name == "bases" else set()
    assert ahead == [number not in {1, ROUNDS} | ends for number in range(1, ROUNDS + 1)]


def test_batches_planned_in_another_thread_are_those_of_the_round():
    sampler = make_simulation(Engine(backend="graph"), job()).sampler
    for number, planned in ((1, 1), (2, 2), (4, 3)):  # the last: another round is needed than was planned
        clients = sampler.cohort(number)
        expected = sampler.workload(number, clients)
        sampler.plan(planned)
        found = sampler.workload(number, clients)
        assert torch.equal(found.index, expected.index)
        assert (found.rows == expected.rows).all()


def test_batches_planned_for_several_rounds_are_those_of_each():
    simulation = make_simulation(Engine(backend="graph"), job())
    sampler, fresh = (make_simulation(Engine(backend="graph"), simulation.job).sampler for _ in range(2))
    for number in range(1, 25):
        sampler.plan(number)
        clients = sampler.cohort(number)
        assert clients == fresh.cohort(number)
        found, expected = sampler.workload(number, clients), fresh.workload(number, clients)
        assert torch.equal(found.index, expected.index)
        assert (found.rows == expected.rows).all()
    assert sampler._at_once > 1
    assert len(sampler._planned) <= 3 * sampler._at_once


def test_a_copy_of_the_public_state_stays_on_the_host():
    simulation = prepare(job(Method(), digits_task(), rounds=ROUNDS))
    state = simulation.start()
    for number in range(1, ROUNDS):
        before, (state, _) = state, simulation.round(state)
        copy = simulation.clients._on_host(state.server)
        assert (copy is not state.server) is (number > 1)  # the first round is not predicted
        assert same_public(copy.public, state.server.public)
        assert copy.ledger is state.server.ledger
        assert simulation.clients._on_host(before.server) is before.server
    simulation.clients.stop()
    assert simulation.clients._on_host(state.server) is state.server


def test_a_version_that_is_predicted_is_evaluated_once(monkeypatch):
    evaluations, begin = [], federation_module.begin_evaluation
    monkeypatch.setattr(federation_module, "begin_evaluation", lambda *a, **b: evaluations.append(1) or begin(*a, **b))
    _, records, _ = play(Method(), False, eval_every=2)
    assert len(evaluations) == ROUNDS // 2
    _, again, ahead = play(Method(), True, eval_every=2)
    assert len(evaluations) == ROUNDS
    assert sum(ahead) > 2
    assert bits(records) == bits(again)


def test_plain_sgd_steps_the_server_by_the_bits_of_the_general_rule():
    update = {"w": torch.tensor([0.1, -0.0, 0.0, 3e-39, -7.3])}
    for lr in (1.0, 0.3):
        plain, _ = SGD(lr).server_step(update, {}, {})
        general, _ = Optimizer.server_step(SGD(lr), update, {}, {})
        assert same(plain, general)


def test_a_wrong_prediction_is_discarded_and_speculation_stops(trainings, monkeypatch):
    slow, records, _ = play(Method(), False)
    trainings.clear()

    def wrong(*args):
        step, coords = predict(*args)
        return step + 1, tmap(lambda block: block + 1, coords)

    monkeypatch.setattr(pipeline_module, "predict", wrong)
    fast, again, ahead = play(Method(), True, eval_every=ROUNDS)
    assert len(trainings) == ROUNDS + 1
    assert not any(ahead)
    assert [record.loss for record in records] == [record.loss for record in again]
    assert same_public(slow.server.public, fast.server.public)


def test_a_step_is_confirmed_by_its_bits():
    simulation = prepare(job())
    server, names = simulation.start().server, simulation.contract.coords.named
    predicted = server.public._replace(coords=dict(server.public.coords))
    group = Group(predicted, Round.open(simulation.contract, server).plan, (), ())
    trained = Trained(GroupTask(1, "graph", group, ()), None, None, torch.tensor([1.0, 0.0]), None)

    def confirmed(step: Tree) -> bool:
        clients = PipelinedClients(simulation)
        clients._next = trained
        body = wire.pack_body(wire.Body(names, {wire.COORDS: raw(step)}), simulation.contract.schema)
        ledger = server.ledger.append(body, names, limit=1000, longest=1000)
        after = clients._confirmed(server._replace(ledger=ledger), trained)
        right = after.public.coords is predicted.coords
        assert right or after.public is server.public
        assert (clients.on, clients._next is not None) == (right, right)
        return right

    assert confirmed({"a": torch.tensor([1.0]), "b": torch.tensor([0.0])})
    assert not confirmed({"a": torch.tensor([1.0, -0.0])})
    assert not confirmed({"a": torch.tensor([1.0])})


def test_training_in_advance_is_not_used_for_another_state(trainings):
    simulation = prepare(job(Method(), digits_task(), rounds=ROUNDS, eval_every=ROUNDS))
    first, _ = simulation.round(simulation.start())
    second, _ = simulation.round(first)
    assert simulation.clients._next is not None
    again, _ = simulation.round(first)  # as after a return to a checkpoint
    assert same_public(second.server.public, again.server.public)
    assert len(trainings) == 5  # one for each round, and two in advance


@pytest.mark.parametrize("name", [*METHODS, "adam"])
def test_only_weighted_means_of_exact_uploads_are_predictable(name):
    method = Method(server_opt=Adam(0.01)) if name == "adam" else METHODS[name]
    simulation = make_simulation(Engine(backend="graph"), job(method))
    server = simulation.start().server
    contract = simulation.contract.at(0)
    expected = name == "fedavg"  # with a new basis in every round, no round is predictable
    assert is_predictable(contract, Round.open(simulation.contract, server)) is expected
    if expected:
        for change in ({"upload": "weights"}, {"download": "full"}, {"secure_aggregation": True}):
            other = make_simulation(Engine(backend="graph"), job(replace(method, **change)))
            state = other.start().server
            assert not is_predictable(other.contract.at(0), Round.open(other.contract, state))


def test_without_memory_for_two_cohorts_one_is_trained_at_a_time(monkeypatch):
    slow, records, _ = play(Method(), False, eval_every=ROUNDS)
    train, count = CudaGraphCache.train, []

    def out_of_memory(self, inputs):
        count.append(1)
        if len(count) == 3:
            raise torch.OutOfMemoryError("two cohorts")
        return train(self, inputs)

    monkeypatch.setattr(CudaGraphCache, "train", out_of_memory)
    fast, again, ahead = play(Method(), True, eval_every=ROUNDS)
    assert not any(ahead)
    assert len(count) == ROUNDS + 1
    assert bits(records) == bits(again)
    assert same_public(slow.server.public, fast.server.public)
