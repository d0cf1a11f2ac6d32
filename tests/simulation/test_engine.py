"""Simulation on one machine: same seed, same bits; byte counts; fallbacks; any model; error messages."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.federation import SIZES, digits_task, keeps_nothing, perceptron, records_of, same_public
from tests.parts import Drift, Half, Project, Remember, Turns
from thinwire.aggregators import Uniform
from thinwire.core import parallel
from thinwire.core.key import Key
from thinwire.core.tree import same
from thinwire.data.examples import Arrays, Examples
from thinwire.data.partition import Assignment
from thinwire.data.task import Task, pool_clients
from thinwire.errors import ConfigError, Diverged
from thinwire.federation import Job
from thinwire.federation.backends import Backends
from thinwire.federation.engine import Engine
from thinwire.federation.federation import Federation
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import SGD, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.receive import receive
from thinwire.schedules import AllBlocks
from thinwire.training import Local

LOCAL = Local(epochs=1, batch=16)
METHODS = {
    "fedavg": Method(),
    "full download": Method(download="full", down=Half()),
    "random directions": Method(space=Drift(), client_opt=SGD(0.5)),
    "scaffold": Method(correction=Scaffold(), client_opt=SGD(0.05)),
    "private blocks": Method(schedule=AllBlocks(private=("2.*",))),
    "sketch": Method(sketch=Project(), client_weight=Uniform()),
    "codec state": Method(up=Remember(), down=Remember()),
}


def job(method: Method | None = None, task: Task | None = None, **settings) -> Job:
    settings = {"rounds": 3, "cohort": 3, "local": LOCAL, **settings}
    return Job(task or digits_task(), method or Method(), **settings)


def play(run: Job, engine: Engine | None = None):
    """Run all rounds; the states before and after each, and the records."""
    simulation = make_simulation(engine or Engine(), run)
    states = [simulation.start()]
    records = []
    for _ in range(run.rounds):
        state, record = simulation.round(states[-1])
        states.append(state)
        records.append(record)
    return simulation, states, records


def bits(records):
    """Records without their seconds."""
    return [record._replace(seconds=0.0) for record in records]


# -- same for every method ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LoggedExamples(Examples):
    """Examples that log the requested indices."""

    inner: Arrays
    requested: list

    def __len__(self):
        return len(self.inner)

    @property
    def targets(self):
        return self.inner.targets

    def gather(self, index):
        self.requested.append(index.tolist())
        return self.inner.gather(index)

    def to(self, device):
        return self


def test_cohorts_batches_and_initial_weights_depend_on_the_seed_alone():
    seen = {}
    for name, method in METHODS.items():
        plain = digits_task()
        task = Task(plain.model, LoggedExamples(plain.train, []), plain.clients)
        simulation, states, _ = play(job(method, task), Engine(backend="loop"))
        cohorts = [state.cohort for state in states[1:]]
        by_round = Counter(str(index) for index in task.train.requested)
        seen[name] = cohorts, by_round, simulation.weights(simulation.first)
    for name, (cohorts, batches, weights) in seen.items():
        assert cohorts == seen["fedavg"][0], name
        assert batches == seen["fedavg"][1], name
        assert same(weights, seen["fedavg"][2]), name
    assert len({tuple(sorted(c)) for c in seen["fedavg"][0]}) > 1
    other = play(job(seed=1))[1]
    assert [state.cohort for state in other[1:]] != seen["fedavg"][0]


@pytest.mark.parametrize(
    ("name", "backend"),
    [("scaffold", "vmap"), ("codec state", "vmap"), *(("fedavg", one) for one in ("loop", "threads", "chain"))],
)
def test_same_seed_gives_same_bits(name, backend):
    engine = Engine(backend=backend)
    (_, first, records), (_, second, again) = (play(job(METHODS[name]), engine) for _ in range(2))
    assert bits(records) == bits(again)
    assert same_public(first[-1].server.public, second[-1].server.public)


@pytest.mark.parametrize("name", METHODS)
def test_bytes_of_a_record_are_the_lengths_of_its_messages(name):
    seen = []
    run = job(METHODS[name], rounds=5)
    records = records_of(Engine(), run, on_message=lambda *message: seen.append(message))
    assert [record.round for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        lengths = [(direction, len(data)) for number, direction, _, data in seen if number == record.round]
        up, down = ([n for direction, n in lengths if direction == wanted] for wanted in ("up", "down"))
        assert len(up) == len(down) == record.clients == 3
        assert sum(up) == record.bytes_up
        assert sum(down) == record.bytes_down + record.bytes_catchup
    # short entries are replayed; where an entry is as long as the state, missed rounds cost no more bytes
    assert (sum(record.bytes_catchup for record in records) > 0) == (
        name in ("random directions", "sketch", "codec state")
    )


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_apply_the_messages_reach_the_state_of_the_server(name):
    method = METHODS[name]
    simulation = make_simulation(Engine(), job(method, rounds=6))
    state, received = simulation.start(), {}
    for _ in range(6):
        down = {}
        before = state.server.public
        state, _ = simulation.round(
            state, lambda _, direction, i, data, down=down: down.update({i: data} if direction == "down" else {})
        )
        for client, data in down.items():
            known = received.get(client, simulation.first)
            received[client] = receive(simulation.contract, known, data).public
            if method.download == "incremental":
                assert same_public(received[client], before)
            assert received[client].version == before.version


@pytest.mark.parametrize("name", METHODS)
def test_results_do_not_depend_on_the_chunk_size(name):
    results = [play(job(METHODS[name], cohort=5, rounds=2), Engine(chunk=chunk)) for chunk in (0, 1, 2)]
    results.append(play(job(METHODS[name], cohort=5, rounds=2), Engine(backend="loop")))
    simulation, states, records = results[0]
    whole = simulation.weights(states[-1].server.public)
    for _, others, again in results[1:]:
        for name_, block in simulation.weights(others[-1].server.public).items():
            torch.testing.assert_close(block, whole[name_], rtol=1e-5, atol=1e-5)
        for one, two in zip(records, again, strict=True):
            assert one.loss == pytest.approx(two.loss, abs=1e-5)
            assert (one.bytes_up, one.bytes_down, one.bytes_catchup) == (
                two.bytes_up,
                two.bytes_down,
                two.bytes_catchup,
            )


def test_a_run_can_be_continued_from_any_state():
    _, states, records = play(job(METHODS["codec state"]))
    again = make_simulation(Engine(), job(METHODS["codec state"]))
    state = states[2]
    for expected in records[2:]:
        state, record = again.round(state)
        assert bits([record]) == bits([expected])
    assert same_public(state.server.public, states[-1].server.public)


def test_a_schedule_can_keep_the_cohort():
    _, states, _ = play(job(Method(schedule=Turns(2)), rounds=6))
    cohorts = [state.cohort for state in states[1:]]
    assert cohorts[0::2] == cohorts[1::2]
    assert len(set(cohorts)) > 1


def test_evaluation_every_n_rounds_and_after_the_last():
    records = records_of(Engine(), job(rounds=5, eval_every=2))
    assert [record.accuracy is not None for record in records] == [False, True, False, True, True]
    assert all(0 <= record.accuracy <= 1 for record in records if record.accuracy is not None)
    assert all(r.accuracy is None and r.test_loss is None for r in records_of(Engine(), job(task=digits_task(test=0))))


def test_training_improves_accuracy():
    records = records_of(Engine(), job(Method(client_opt=SGD(0.5)), rounds=8, cohort=6, local=Local(3, 8)))
    assert records[-1].accuracy > records[0].accuracy + 0.2
    assert records[-1].loss < records[0].loss


def test_the_loss_of_a_round_is_the_mean_over_examples():
    """One full-batch step from the initial weights: the loss is that of the untrained model on the cohort."""
    run = job(local=Local(batch=0), rounds=1)
    _, states, (record,) = play(run)
    rows = np.concatenate([run.task.clients.client(i) for i in states[1].cohort])
    x, y = run.task.train.gather(torch.from_numpy(rows))
    assert record.loss == pytest.approx(F.cross_entropy(run.task.model(x), y).item(), rel=1e-5)


# -- client states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_methods_without_client_state_keep_no_tensors_per_client(name):
    _, states, _ = play(job(METHODS[name]))
    stateful = {"scaffold", "private blocks", "codec state"}
    sampled = {i for state in states for i in state.cohort}
    assert set(states[-1].clients) == sampled
    assert all(keeps_nothing(state) == (name not in stateful) for state in states[-1].clients.values())


def test_rounds_do_not_change_their_input_states():
    _, states, _ = play(job(METHODS["scaffold"]))
    again = make_simulation(Engine(), job(METHODS["scaffold"]))
    state = again.start()
    for expected in states[1:]:
        state, _ = again.round(state)
        assert same_public(state.server.public, expected.server.public)
        assert state.clients.keys() == expected.clients.keys()
        for i in state.clients:
            assert same(state.clients[i].correction, expected.clients[i].correction)
    assert states[0].clients == {}


# -- any model ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Embedding, convolution, GRU, layer norm, a buffer, and an output that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 17)
        self.out.weight = self.embed.weight
        self.register_buffer("gain", torch.full((8,), 0.5))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        h = self.embed(x)
        h = self.norm(self.conv(h.transpose(1, 2)).transpose(1, 2))
        h, _ = self.gru(h * self.gain * self.frozen)
        return self.out(h[:, -1])


class Branching(nn.Module):
    """Data-dependent control flow, which vmap does not support."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


class Noisy(nn.Module):
    """Dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))

    def forward(self, x):
        return self.net(x)


def made(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind()


def pixel_task() -> Task:
    """Predict the last of nine pixels (0 to 16) from the first eight."""
    plain = digits_task(test=0)
    codes = (plain.train.inputs * 16).long()[:, 18:27]
    data = Arrays(codes[:, :8], codes[:, 8])
    return Task(made(Tied), data, plain.clients, Arrays(codes[:50, :8], codes[:50, 8]))


def test_a_custom_model_trains_and_is_not_modified():
    task = pixel_task()
    before = {name: block.clone() for name, block in task.model.state_dict().items()}
    mode = task.model.training
    simulation, states, records = play(job(Method(client_opt=SGD(0.3)), task, rounds=5))
    assert all(math.isfinite(record.loss) for record in records)
    assert records[-1].loss < records[0].loss
    assert task.model.training == mode
    assert all(parameter.grad is None for parameter in task.model.parameters())
    for name, block in task.model.state_dict().items():
        assert torch.equal(block, before[name]), f"{name} of the user's module was modified"
    names = simulation.contract.weights.names
    assert "embed.weight" in names
    assert "out.weight" not in names, "a tied weight is one weight"
    assert "frozen" not in names
    assert simulation.contract.buffers.names == ("gain",)
    trained = simulation.weights(states[-1].server.public)
    assert not torch.equal(trained["embed.weight"], before["embed.weight"])
    assert torch.equal(states[-1].server.public.buffers["gain"], before["gain"])


def test_the_module_and_the_data_of_the_user_are_not_modified():
    model = perceptron(norm=True)
    task = digits_task(model)
    inputs = task.train.inputs.clone()
    before = {name: block.clone() for name, block in model.state_dict().items()}
    pointers = {name: block.data_ptr() for name, block in model.state_dict().items()}
    _, states, _ = play(job(task=task))
    assert torch.equal(task.train.inputs, inputs)
    for name, block in model.state_dict().items():
        assert torch.equal(block, before[name])
        assert block.data_ptr() == pointers[name]
    assert not torch.equal(states[-1].server.public.buffers["1.running_mean"], before["1.running_mean"])


def test_auto_falls_back_to_a_loop_and_records_the_reason():
    task = digits_task(made(Branching))
    _, states, records = play(job(task=task))
    assert states[0].backend == "vmap"
    assert states[-1].backend == "loop"
    assert "vmap failed" in states[-1].backend_reason
    assert "data-dependent control flow" in states[-1].backend_reason
    _, by_loop, again = play(job(task=task), Engine(backend="loop"))
    assert bits(records) == bits(again)
    assert by_loop[-1].backend_reason == "given"
    with pytest.raises(RuntimeError, match="data-dependent"):
        play(job(task=task), Engine(backend="vmap"))


def test_on_a_cpu_model_and_cores_decide_the_backend(three_cores):
    images = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    chain = nn.Sequential(*list(images)[1:])
    large = nn.Sequential(nn.Linear(64, 5000), nn.Tanh(), nn.Linear(5000, 10))
    for model, backend in ((nn.Linear(64, 10), "vmap"), (images, "threads"), (large, "threads")):
        assert make_simulation(Engine(), job(task=digits_task(model))).start().backend == backend
    task = replace(digits_task(chain), train=Arrays(torch.randn(10, 1, 8, 8), torch.zeros(10, dtype=torch.int64)))
    for cores, backend in ((3, "chain"), (5, "threads")):
        torch.set_num_threads(cores)
        assert Backends(Federation(Engine(), job(task=task))).initial() == (backend, "")


def test_random_layers_are_trained_by_vmap():
    model = nn.Sequential(nn.Linear(64, 5000), nn.Dropout(0.5), nn.Linear(5000, 10))
    _, states, _ = play(job(task=digits_task(model)))
    assert states[-1].backend == "vmap"
    assert states[-1].backend_reason == "threads failed: the model draws random numbers in training"


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_dropout_does_not_depend_on_the_state_of_the_generator(backend):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(play(job(task=digits_task(made(Noisy))), Engine(backend=backend)))
        assert torch.equal(torch.get_rng_state(), before)
    assert bits(runs[0][2]) == bits(runs[1][2])
    assert same_public(runs[0][1][-1].server.public, runs[1][1][-1].server.public)


def test_an_error_in_the_model_is_in_the_error_message():
    with pytest.raises(ConfigError, match=r"do not fit.*mat1 and mat2 shapes cannot be multiplied"):
        play(job(task=digits_task(nn.Linear(3, 10))))


def test_a_model_that_returns_no_tensor_is_an_error():
    class Scores(nn.Linear):
        def forward(self, x):
            return {"scores": super().forward(x)}

    with pytest.raises(ConfigError, match="must return a tensor"):
        play(job(task=digits_task(Scores(64, 10))))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["vmap", "loop", "auto"])
def test_diverged_training_names_the_round(backend):
    with pytest.raises(Diverged, match=r"^round \d+: .*smaller learning rate"):
        records_of(Engine(backend=backend), job(Method(client_opt=SGD(1e18)), rounds=20, local=Local(5, 4)))


def test_a_loss_of_nan_names_the_round():
    def nan_loss(outputs, targets):  # finite for the few examples that are tried before round 1
        factor = float("nan") if len(targets) > 8 else 1.0
        return F.cross_entropy(outputs, targets, reduction="none") * factor

    with pytest.raises(Diverged, match=r"^round 1: "):
        records_of(Engine(), job(task=digits_task(loss=nan_loss)))


def test_clients_without_examples_are_an_error():
    plain = digits_task()
    empty = Assignment(np.arange(6), np.array([0, 3, 3, 6, 6]))
    with pytest.raises(ConfigError, match=r"client 1 \(and 1 more\) has no examples; leave empty clients out"):
        Task(plain.model, plain.train, empty)
    with pytest.raises(ConfigError, match="no examples"):
        pool_clients([(torch.zeros(2, 64), torch.zeros(2)), (torch.zeros(0, 64), torch.zeros(0))])
    with pytest.raises(ConfigError, match="no clients"):
        pool_clients([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cohort": 7}, "cohort must be from 1 to the number of clients, 6, not 7"),
        ({"cohort": 0}, "cohort must be from 1"),
        ({"rounds": 0}, "rounds must be 1 or more"),
        ({"eval_every": 0}, "eval_every must be 1 or more"),
    ],
)
def test_invalid_jobs_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        job(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "device must be cpu or cuda, not 'gpu'"),
        ({"device": "meta"}, "device must be cpu or cuda, not 'meta'"),
        ({"backend": "pmap"}, "backend must be one of auto, graph, chain, threads, vmap, loop, not 'pmap'"),
        ({"chunk": -1}, "chunk must be 0"),
        pytest.param(
            {"device": "cuda"},
            "torch sees no GPU here; write device = 'cpu'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_invalid_engine_settings_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_simulation(Engine(**settings), job())


def test_pairs_of_tensors_are_examples():
    plain = digits_task()
    parts = [plain.train.gather(torch.from_numpy(plain.clients.client(i))) for i in range(len(SIZES))]
    pool, clients = pool_clients(parts)
    records = records_of(Engine(), job(task=Task(plain.model, pool, clients, plain.test)))
    assert bits(records) == bits(records_of(Engine(), job()))


def test_cohorts_are_uniform():
    counts = np.zeros(6)
    for r in range(600):
        counts[Key(0).fold("cohort", r).choice(6, 3)] += 1
    assert abs(counts - 300).max() < 60


@pytest.mark.parametrize("name", ["scaffold", "sketch", "codec state"])
def test_messages_made_by_several_threads_have_the_same_bytes(name, three_cores, monkeypatch):
    runs = []
    for least in (parallel.PARALLEL_BYTES, 1):
        monkeypatch.setattr(parallel, "PARALLEL_BYTES", least)
        seen: list = []
        records = records_of(Engine(backend="vmap"), job(METHODS[name]), lambda *message, to=seen: to.append(message))
        assert all(type(message) is bytes for *_, message in seen)
        runs.append((seen, bits(records)))
    assert runs[0] == runs[1]
