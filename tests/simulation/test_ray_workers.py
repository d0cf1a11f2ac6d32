"""Training in Ray workers: same bits as in one process."""

import gc
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thinwire as tw
from tests.federation import same_public
from tests.simulation.test_engine import METHODS, bits, job, play
from thinwire.data.task import pool_clients
from thinwire.errors import ConfigError, Diverged
from thinwire.federation import Job
from thinwire.federation.attacks import Scaling
from thinwire.federation.engine import Engine
from thinwire.federation.ray_workers import need_ray, shares
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.runs.config import digest, resolve
from thinwire.training import Local

HERE = Engine(backend="vmap", chunk=2)
TWO = replace(HERE, workers=2)
has_ray = importlib.util.find_spec("ray") is not None
quiet = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def two_machines():
    """A cluster of two nodes with a core each, so that two workers are on different ones."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 1, "object_store_memory": 2**28}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), cluster.address
    need_ray()
    yield ray
    ray.shutdown()
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


@pytest.fixture(autouse=True)
def ended():
    """Workers end with their simulation, which has cycles; the next test needs their cores."""
    yield
    gc.collect()


def node(worker):
    import ray

    return ray.get_runtime_context().get_node_id()


class Received:
    """What the server receives from workers."""

    def __init__(self, ray):
        self.ray, self.sizes = ray, []

    def __getattr__(self, name):
        return getattr(self.ray, name)

    def get(self, ref, **how):
        found = self.ray.get(ref, **how)
        self.sizes += [one.nbytes for one in (found if isinstance(found, list) else [found])]
        return found


def with_receipts(run, engine):
    """The states and records of a run, and what the server received of each round."""
    simulation = make_simulation(engine, run)
    simulation.clients.ray = Received(simulation.clients.ray)
    state, records, sizes = simulation.start(), [], []
    for _ in range(run.rounds):
        state, record = simulation.round(state)
        records.append(record)
        sizes.append(simulation.clients.ray.sizes[:])
        simulation.clients.ray.sizes.clear()
    return simulation, state, records, sizes


@quiet  # Ray leaves files open
@pytest.mark.parametrize("name", METHODS)
def test_workers_on_two_machines_give_the_same_bits(name, monkeypatch, two_machines):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = job(METHODS[name], cohort=6)
    _, here, records = play(run, HERE)
    simulation, there, by_workers, sizes = with_receipts(run, TWO)
    assert bits(by_workers) == bits(records)
    assert same_public(here[-1].server.public, there.server.public)
    assert sorted(here[-1].clients) == sorted(there.clients)
    at = [one.__ray_call__.remote(node) for one in simulation.clients.workers]
    assert {*two_machines.get(at)} == {one["NodeID"] for one in two_machines.nodes()}
    update = simulation.contract.coords.nbytes
    whole = [[size for size in round if size >= update] for round in sizes]
    assert simulation.clients.averages == (name in ("fedavg", "full download", "random directions", "private blocks"))
    if name in ("fedavg", "full download"):  # updates of the others are shorter than what is said about them
        assert all(len(round) == 1 for round in whole), "one sum, for two workers and six clients"
    elif name == "scaffold":
        assert all(len(round) == 3 for round in whole), "each group of two clients"


@quiet
@pytest.mark.parametrize("factor", [30.0, 1e6])
def test_clients_that_are_bounded_or_refused_are_so_by_the_same_bits(factor, monkeypatch, two_machines):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = job(cohort=6, rounds=5, attack=Scaling(fraction=0.2, factor=factor))
    _, here, records = play(run, HERE)
    simulation, there, by_workers, sizes = with_receipts(run, TWO)
    assert simulation.clients.averages
    assert bits(by_workers) == bits(records)
    assert same_public(here[-1].server.public, there.server.public)
    assert here[-1].standing == there.standing
    assert any(record.bounded if factor < 1e3 else record.refused for record in records)
    assert any(record.left_out for record in records) or factor < 1e3
    update = simulation.contract.coords.nbytes
    for record, received in zip(records, sizes, strict=True):
        whole = sum(size >= update for size in received)
        assert whole == (6 if record.bounded else 1 + record.refused), "all updates, where one is scaled down"


@quiet
def test_messages_are_fetched_for_who_watches_them(monkeypatch, two_machines):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def messages(engine):
        simulation, seen = make_simulation(engine, job(cohort=4)), []
        simulation.round(simulation.start(), lambda *one: seen.append(one))
        return sorted(seen, key=lambda one: one[:3])

    assert messages(TWO) == messages(HERE)


@quiet
def test_examples_are_once_in_the_memory_of_a_machine(two_machines):
    def is_shared(worker):
        """Whether the examples are in a mapping that other processes have, too, and the model is not."""
        places = []
        for tensor in (worker.federation.train.inputs, worker.federation.model.module.weight):
            for line in Path("/proc/self/maps").read_text().splitlines():
                start, end = (int(one, 16) for one in line.split()[0].split("-"))
                if start <= tensor.data_ptr() < end:
                    places.append(line.split()[1][3])
        return "".join(places)

    clients = [(torch.randn(1000, 100), torch.arange(1000) % 2) for _ in range(4)]
    task = tw.Task(torch.nn.Linear(100, 2), *pool_clients(clients))
    simulation = make_simulation(TWO, Job(task, rounds=1, cohort=2, local=Local(steps=1, batch=4)))
    simulation.round(simulation.start())
    assert [two_machines.get(one.__ray_call__.remote(is_shared)) for one in simulation.clients.workers] == ["sp", "sp"]


@quiet
def test_runs_are_tasks_of_a_cluster(tmp_path, monkeypatch, two_machines):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = {"seeds": 2, "rounds": 2, "clients": 10, "cohort": 2, "set": {"local.steps": 4}}
    one = tw.compare(["fedavg", "mapo"], "digits", out=tmp_path / "one", **options)
    two = tw.compare(["fedavg", "mapo"], "digits", out=tmp_path / "two", jobs=2, **options)
    assert repr(two) == repr(one)
    for run in one.runs:
        again = tmp_path / "two" / run.path.name / "model.safetensors"
        assert again.read_bytes() == (run.path / "model.safetensors").read_bytes()


@quiet
@pytest.mark.skipif(not (has_ray and torch.cuda.is_available()), reason="needs Ray and a GPU")
@pytest.mark.parametrize("backend", ["vmap", "graph"])
def test_two_workers_share_a_gpu(backend):
    run, alone = job(METHODS["scaffold"]), Engine("cuda", backend, chunk=2)
    (_, here, records), (_, there, by_workers) = (play(run, engine) for engine in (alone, replace(alone, workers=2)))
    assert bits(by_workers) == bits(records)
    assert same_public(here[-1].server.public, there[-1].server.public)


@quiet
def test_an_error_of_a_worker_is_raised_in_the_main_process(two_machines):
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
