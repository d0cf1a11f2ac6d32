"""CUDA graphs train like vmap, also with short batches, clients that finish early and changing bases."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.federation import SIZES, digits_task, same_public, workload
from tests.simulation.test_engine import METHODS, job, play
from thinwire.core.key import Key
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD, Adam, ExponentialLR, Jacobian
from thinwire.protocol import Method
from thinwire.protocol.client import Group, initial_client_state, training_inputs
from thinwire.protocol.round import Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.spaces import MAPO, FedPara
from thinwire.training import Local
from thinwire.training.backends import VmapTrainer
from thinwire.training.cuda_graph import KEPT, CudaGraphCache
from thinwire.training.functional import Functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the step is called instead of replayed
MORE = {
    "adam": Method(client_opt=Adam(0.01)),
    "momentum": Method(client_opt=SGD(0.05, momentum=0.9)),
    "mapo": Method(space=MAPO(k=32)),
    "mapo for 2 rounds": Method(space=MAPO(k=32, redraw_every=2)),
    "fedpara": Method(space=FedPara()),
    "a penalty with a learning rate that changes": Method(
        space=FedPara(), penalty=Jacobian(10.0), lr_schedule=ExponentialLR(0.5)
    ),
}


@pytest.mark.parametrize("method", {**METHODS, **MORE}.values(), ids={**METHODS, **MORE})
def test_graphs_train_like_vmap(method):
    run = job(method, rounds=4, cohort=4)  # clients of different sizes: short batches, and clients that finish early
    (_, by_graph, records), (_, by_vmap, others) = (play(run, Engine(DEVICE, backend)) for backend in ("graph", "vmap"))
    assert by_graph[-1].backend == "graph"
    for a, b in zip(records, others, strict=True):
        assert (a.bytes_up, a.bytes_down, a.bytes_catchup) == (b.bytes_up, b.bytes_down, b.bytes_catchup)
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
    for x, y in zip(by_graph[-1].server.public[1:], by_vmap[-1].server.public[1:], strict=True):
        for name in x:
            assert float((x[name] - y[name]).abs().max()) < 1e-5


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: nothing is recorded on a CPU")
def test_a_recording_that_is_garbage_is_not_freed_during_another():
    run = job(Method(), rounds=1, cohort=4)
    for _ in range(3):
        engine = play(run, Engine(DEVICE, "graph"))
        gc.set_threshold(1)
        cycle = [engine]
        cycle.append(cycle)
        del engine, cycle
        try:
            assert play(run, Engine(DEVICE, "graph"))[1][-1].backend == "graph"
        finally:
            gc.set_threshold(700, 10, 10)


@pytest.mark.parametrize("optimizer", [SGD(0.05), SGD(0.05, momentum=0.9)], ids=repr)
def test_kernels_with_channels_last_in_memory_train_like_others(optimizer):
    net = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten())
    task, graphs = digits_task(nn.Sequential(*net, nn.Linear(128, 10))), CudaGraphCache()
    model = replace(Functional.of(task.model, task.loss, DEVICE), products="fused")
    contract, public = make_contract(Method(client_opt=optimizer), model.weights(), model.buffers(), Key(0))
    plan, state = (
        Round.open(contract, initial_server_state(contract, public)).plan,
        initial_client_state(contract, public),
    )
    work = workload(task, (0, 1), [Key(0), Key(1)], Local(batch=4))  # some batches are short
    work = replace(work, index=work.index.to(DEVICE), gather=task.train.to(DEVICE).gather)
    inputs = training_inputs(contract, model, Group(public, plan, (0, 1), (state, state)), work)
    ours, theirs = graphs.train(inputs), VmapTrainer().train(inputs)
    assert next(iter(graphs._kept.values())).coords["3.weight"].stride(2) == 1
    for name, block in ours.coords.items():
        assert block.is_contiguous()
        assert float((block - theirs.coords[name]).abs().max()) < 1e-5


def test_graphs_give_the_same_bits_again_and_in_a_resumed_run():
    run = job(MORE["momentum"], rounds=4)
    (simulation, first, _), (_, second, _) = (play(run, Engine(DEVICE, "graph")) for _ in range(2))
    assert same_public(first[-1].server.public, second[-1].server.public)
    state = first[2]
    other = make_simulation(Engine(DEVICE, "graph"), run)  # as in a resumed run, nothing is recorded
    for _ in range(2):
        state, _ = other.round(state)
    assert same_public(state.server.public, first[-1].server.public)
    assert len(simulation.clients.backends.trainers["graph"]._kept) == 1


def test_each_chunk_size_has_its_own_recording_and_the_oldest_are_dropped():
    simulation, states, _ = play(job(cohort=5), Engine(DEVICE, "graph", chunk=2))
    whole = play(job(cohort=5), Engine(DEVICE, "vmap"))[1]
    assert len(simulation.clients.backends.trainers["graph"]._kept) == 2
    for name, block in states[-1].server.public.coords.items():
        assert float((block - whole[-1].server.public.coords[name]).abs().max()) < 1e-5
    full_batch = job(
        local=Local(batch=0), cohort=1, rounds=30
    )  # the width of a batch is the number of examples of the client
    simulation = play(full_batch, Engine(DEVICE, "graph"))[0]
    assert 1 < len(simulation.clients.backends.trainers["graph"]._kept) <= KEPT


def test_running_statistics_are_those_of_vmap():
    task = digits_task(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)))
    by_graph, by_vmap = (play(job(task=task), Engine(DEVICE, backend))[1][-1] for backend in ("graph", "vmap"))
    assert float(by_graph.server.public.buffers["2.running_mean"].abs().max()) > 0
    for name, block in by_graph.server.public.buffers.items():
        assert float((block - by_vmap.server.public.buffers[name]).abs().max()) < 1e-5


def test_a_model_that_draws_random_numbers_is_not_recorded():
    task = digits_task(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)))
    with pytest.raises(ConfigError, match=r"'graph': the model draws random numbers .*; write backend = 'auto'"):
        play(job(task=task), Engine(DEVICE, "graph"))
    simulation = make_simulation(Engine(DEVICE), job(task=task))
    state, _ = simulation.round(simulation.start()._replace(backend="graph"))
    assert state.backend == "vmap"
    assert state.backend_reason.endswith("graph failed: the model draws random numbers in training")


def test_a_later_round_may_have_more_steps_than_the_recorded_one():
    task, graphs, steps = digits_task(), CudaGraphCache(), []
    model = Functional.of(task.model, task.loss, DEVICE)
    contract, public = make_contract(Method(), model.weights(), model.buffers(), Key(0))
    plan, state = (
        Round.open(contract, initial_server_state(contract, public)).plan,
        initial_client_state(contract, public),
    )
    gather = task.train.to(DEVICE).gather
    by_size = sorted(range(len(SIZES)), key=SIZES.__getitem__)
    for client in (by_size[0], by_size[-1], by_size[0]):
        work = workload(task, (client,), [Key(client)], Local(batch=4))
        work = replace(work, index=work.index.to(DEVICE), gather=gather)
        inputs = training_inputs(contract, model, Group(public, plan, (client,), (state,)), work)
        ours, theirs = graphs.train(inputs), VmapTrainer().train(inputs)
        for name, block in ours.coords.items():
            assert float((block - theirs.coords[name]).abs().max()) < 1e-5
        steps.append(work.rows.shape[1])
    assert len(graphs._kept) == 1
    assert steps[0] * 2 < steps[1], "the batches of one round are copied in several parts"
