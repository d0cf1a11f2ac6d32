"""Training in threads: results of the other backends, the same bits with any number of threads, one core each."""

import threading

import pytest
import torch
from torch import nn

from tests.federation import digits_task, perceptron, same_public
from tests.simulation.test_engine import METHODS, bits, job, play
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.spaces import MAPO, FedPara
from thinwire.training import Local


def convolutions():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers)


@pytest.mark.parametrize("model", [perceptron, convolutions])
def test_all_backends_agree(model, three_cores):
    run = job(task=digits_task(model()), rounds=5, cohort=4)
    ends = {}
    for backend in ("loop", "threads", "vmap", "graph"):
        simulation, states, _ = play(run, Engine(backend=backend))
        ends[backend] = simulation.weights(states[-1].server.public)
    for backend, weights in ends.items():
        for name, block in weights.items():
            assert float((block - ends["loop"][name]).abs().max()) < 1e-4, (backend, name)


@pytest.mark.parametrize(
    "method",
    [
        METHODS["scaffold"],
        Method(client_opt=SGD(0.05, momentum=0.9)),
        Method(space=MAPO(k=32)),
        Method(space=FedPara()),
    ],
)
def test_bits_do_not_depend_on_timing_or_the_number_of_threads(method, three_cores):
    run = job(method, rounds=3, cohort=5)
    runs = [play(run, Engine(backend="threads")) for _ in range(2)]
    torch.set_num_threads(1)
    _, states, records = play(run, Engine(backend="threads"))
    for _, others, again in runs:
        assert bits(again) == bits(records)
        assert same_public(others[-1].server.public, states[-1].server.public)


def test_each_thread_uses_one_core_and_the_main_thread_keeps_its_setting(three_cores):
    seen = []

    class Logged(nn.Linear):
        def forward(self, x):
            seen.append((threading.current_thread().name, torch.get_num_threads()))
            return super().forward(x)

    simulation = make_simulation(Engine(backend="threads"), job(task=digits_task(Logged(64, 10), test=0)))
    seen.clear()
    simulation.round(simulation.start())
    assert {name.split("_")[0] for name, _ in seen} == {"MainThread", "thinwire"}  # the first step of all is alone
    assert {count for _, count in seen} == {1}
    assert torch.get_num_threads() == 3


def test_each_client_has_its_own_running_statistics(three_cores):
    task = digits_task(perceptron(norm=True))
    ends = [play(job(task=task, local=Local(2, 8)), Engine(backend=backend))[1][-1] for backend in ("threads", "loop")]
    for name, block in ends[0].server.public.buffers.items():
        torch.testing.assert_close(block, ends[1].server.public.buffers[name])


def test_a_model_that_draws_random_numbers_is_an_error_and_the_generator_is_unchanged(three_cores):
    task = digits_task(nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)))
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"'threads': the model draws random numbers .*; write backend = 'auto'"):
        play(job(task=task), Engine(backend="threads"))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_in_a_thread_is_raised(three_cores):
    class Broken(nn.Linear):
        def forward(self, x):
            if self.training:
                raise RuntimeError("error in the model")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="error in the model"):
        play(job(task=digits_task(Broken(64, 10))), Engine(backend="threads"))
