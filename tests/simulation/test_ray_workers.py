"""Training in Ray workers: same bits as in one process."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.federation import same_public
from tests.simulation.test_engine import METHODS, bits, job, play
from thinwire.errors import ConfigError, Diverged
from thinwire.federation.engine import Engine
from thinwire.federation.ray_workers import shares
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.runs.config import digest, resolve

HERE = Engine(backend="vmap", chunk=2)
has_ray = importlib.util.find_spec("ray") is not None
quiet = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@quiet  # Ray leaves files open
@pytest.mark.skipif(not has_ray, reason="needs Ray")
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "full download"])
def test_workers_give_the_same_bits(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = job(METHODS[name])
    (_, here, records), (_, there, by_workers) = (play(run, engine) for engine in (HERE, replace(HERE, workers=2)))
    assert bits(by_workers) == bits(records)
    assert same_public(here[-1].server.public, there[-1].server.public)
    assert sorted(here[-1].clients) == sorted(there[-1].clients)


@quiet
@pytest.mark.skipif(not (has_ray and torch.cuda.is_available()), reason="needs Ray and a GPU")
@pytest.mark.parametrize("backend", ["vmap", "graph"])
def test_two_workers_share_a_gpu(backend):
    run, alone = job(METHODS["scaffold"]), Engine("cuda", backend, chunk=2)
    (_, here, records), (_, there, by_workers) = (play(run, engine) for engine in (alone, replace(alone, workers=2)))
    assert bits(by_workers) == bits(records)
    assert same_public(here[-1].server.public, there[-1].server.public)


@quiet
@pytest.mark.skipif(not has_ray, reason="needs Ray")
def test_an_error_of_a_worker_is_raised_in_the_main_process():
    with pytest.raises(Diverged, match=r"round 1: .*smaller learning rate"):
        play(job(Method(client_opt=SGD(1e38))), Engine(backend="vmap", workers=1))


@pytest.mark.skipif(has_ray, reason="Ray is installed")
def test_without_ray_the_error_message_names_the_package():
    with pytest.raises(ConfigError, match=r"pip install 'thinwire\[ray\]'"):
        make_simulation(Engine(workers=2), job())


def test_too_many_workers_are_an_error():
    with pytest.raises(ConfigError, match="at most the 3 cores"):
        shares(4, [{"CPU": 2}, {"CPU": 1}])
    with pytest.raises(ConfigError, match="workers must be 0"):
        Engine(workers=-1)


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("gpus", [(1,), (2,), (3, 1)])
def test_shares_fit_all_workers_on_the_machines(workers, gpus):
    nodes = [{"CPU": 4 + gpu, "GPU": gpu} for gpu in gpus]
    if workers <= sum(node["CPU"] for node in nodes):
        cores, share = shares(workers, nodes)
        assert sum(node["CPU"] // cores for node in nodes) >= workers
        assert sum(gpu * int(1 / share) for gpu in gpus) >= workers


def test_zero_workers_do_not_change_the_digest_of_a_run():
    plain = resolve("fedavg", "digits")
    assert digest(resolve("fedavg", "digits", {"engine.workers": 0})) == digest(plain)
    assert digest(resolve("fedavg", "digits", {"engine.workers": 2})) != digest(plain)
