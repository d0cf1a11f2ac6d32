"""CPU and GPU agree: random draws bit for bit, replayed models up to rounding. Skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value, vmap

from benchmarks.stranger_tasks import TASKS
from thinwire import models
from thinwire.core.key import Key
from thinwire.core.parallel import compute_with
from thinwire.core.tree import Spec
from thinwire.data.examples import Images
from thinwire.data.partition import Assignment
from thinwire.data.task import Task, pool_clients
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.kernels import conv as convolve, projection as random_products, recurrent
from thinwire.kernels.projection import draw_rows
from thinwire.kernels.support import has_triton
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.protocol.drift_check import project
from thinwire.protocol.receive import receive
from thinwire.protocol.round import Round
from thinwire.runs.build import build_task
from thinwire.runs.config import resolve
from thinwire.spaces import MAPA, MAPAX, MAPO, Full, projection
from thinwire.training import Local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPACES = [
    MAPO(k=128),
    MAPO(k=128, entries="gaussian", layout="contiguous"),
    MAPO(k=100, layout="strided", normalize="none"),
    MAPA(p=32),
    MAPA(p=32, entries="gaussian"),
    MAPAX(segment=64, budget=512, entries="gaussian"),
]


@pytest.mark.parametrize("draw", ["words", "signs", "normal", "uniform", "normal_integers"])
def test_random_draws_have_the_same_bits_on_the_gpu(draw):
    for start in (0, 5, (1 << 32) + 3):
        key = Key(7).fold("frame", start)
        here = getattr(key, draw)(10_001, start=start)
        there = getattr(key, draw)(10_001, start=start, device="cuda")
        assert there.is_cuda
        assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("size", [1000, (1 << 17) + 1, 20_000_000])
def test_a_drift_check_has_the_same_bits_on_the_gpu(size):
    state = {"w": Key(1).normal(size) * torch.logspace(-30, 6, size), "b": Key(2).normal(7)}
    there = {name: block.cuda() for name, block in state.items()}
    for version in range(3):
        assert project(state, Key(version).signs) == project(there, Key(version).signs)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_basis_has_the_same_bits_on_the_gpu(space):
    spec = Spec.of({"w": torch.zeros(11_000), "b": torch.zeros(274)})
    here, there = space.basis(spec, Key(11), "cpu"), space.basis(spec, Key(11), "cuda")
    assert here.keys() == there.keys()
    for name in here:
        assert torch.equal(here[name], there[name].cpu())


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
def test_rows_drawn_on_demand_have_the_same_bits_on_the_gpu(entries):
    here = draw_rows(Key(2), 5, 7, 10_007, entries, 0.25, "cpu")
    assert torch.equal(here, draw_rows(Key(2), 5, 7, 10_007, entries, 0.25, "cuda").cpu())


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_steps_replayed_on_the_cpu_give_the_model_of_the_gpu(space):
    task = build_task(resolve("fedavg").task, Key(0))
    space = MAPAX(k=50, p=4) if isinstance(space, MAPAX) else space
    job = Job(
        task,
        Method(space=space, client_opt=SGD(0.05 if space.normalize == "row" else 0.01)),
        rounds=20,
        cohort=5,
        local=Local(batch=16),
    )
    gpu = make_simulation(Engine("cuda"), job)
    cpu = make_simulation(Engine("cpu"), job)
    state = gpu.start()
    public = cpu.first
    for _ in range(20):
        state, _ = gpu.round(state)
        message = Round.open(gpu.contract, state.server).downloads.messages({0: public.version})[0]
        public = receive(cpu.contract, public, message).public
    expected = gpu.weights(state.server.public)
    for name, block in cpu.weights(public).items():
        assert float((block - expected[name].cpu()).abs().max()) <= 1e-6


def test_a_run_on_the_gpu_is_reproducible_and_agrees_with_the_cpu():
    task = build_task(resolve("fedavg").task, Key(0))
    job = Job(task, Method(), rounds=5, cohort=5, local=Local(batch=16))
    runs = {}
    for name, device in (("first", "cuda"), ("second", "cuda"), ("cpu", "cpu")):
        simulation = make_simulation(Engine(device), job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, _ = simulation.round(state)
        runs[name] = {k: v.cpu() for k, v in simulation.weights(state.server.public).items()}
    for block in runs["cpu"]:
        assert torch.equal(runs["first"][block], runs["second"][block])
        assert float((runs["first"][block] - runs["cpu"][block]).abs().max()) < 1e-3


# channels in, size, channels out, kernel, stride, padding
CONVOLUTIONS = [
    (1, 28, 8, 5, 1, 2),
    (8, 14, 16, 5, 1, 2),
    (16, 9, 32, 3, 2, 1),
    (16, 8, 32, 1, 2, 0),
    (64, 8, 80, 3, 1, 1),
]
triton_only = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(torch.device("cuda")), reason="needs triton"
)


@triton_only
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_fused_convolutions_and_their_gradients_equal_torch(shape, kind, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    i, size, o, k, stride, padding = shape
    torch.manual_seed(0)
    given = torch.randn(3, 4, i, size, size), torch.randn(3, o, i, k, k), torch.randn(3, o)
    args = [block.to("cuda", kind) for block in given]

    def loss(x, kernel, bias):
        return torch.sin(F.conv2d(x, kernel, bias, stride, padding).float()).sum()

    def fused(*args):
        with convolve.by_products():
            return loss(*args)

    wanted, _ = vmap(grad_and_value(loss, argnums=(0, 1, 2)))(*(block.double() for block in args))
    first, _ = vmap(grad_and_value(fused, argnums=(0, 1, 2)))(*args)
    again, _ = vmap(grad_and_value(fused, argnums=(0, 1, 2)))(*args)
    plain, _ = vmap(grad_and_value(loss, argnums=(0, 1, 2)))(*args)
    for a, b, c, d in zip(first, again, wanted, plain, strict=True):
        assert a.dtype == kind
        assert torch.equal(a, b)
        far = float((d.double() - c).abs().max())  # the error of torch's own
        assert float((a.double() - c).abs().max()) <= 4 * far + 1e-5 * float(c.abs().max())


@triton_only
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16, 32), (64, 8, 8), (512, 32, 2)], ids=str)  # channels, groups, size
def test_fused_group_norms_and_their_gradients_equal_torch(shape, kind):
    channels, groups, size = shape
    torch.manual_seed(0)
    x, factor = (torch.randn(3, 4, channels, size, size, device="cuda").to(kind) for _ in range(2))
    weight, bias = torch.randn(2, 3, channels, device="cuda")

    def loss(x, weight, bias, factor):
        return (F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype)) * factor).float().sum()

    def fused(*args):
        with convolve.by_products():
            return loss(*args)

    args = (x, weight, bias, factor)
    wanted, _ = vmap(grad_and_value(loss, argnums=(0, 1, 2)))(*(block.double() for block in args))
    first, _ = vmap(grad_and_value(fused, argnums=(0, 1, 2)))(*args)
    again, _ = vmap(grad_and_value(fused, argnums=(0, 1, 2)))(*args)
    for a, b, c in zip(first, again, wanted, strict=True):
        assert torch.equal(a, b)
        assert float((a.double() - c).abs().max()) <= (2e-2 if kind == torch.bfloat16 else 1e-5) * float(c.abs().max())


@triton_only
@pytest.mark.parametrize("norm", ["gn", "bn_noaffine"])
def test_norms_without_parameters_train_in_a_graph_as_in_a_loop(norm):
    torch.manual_seed(0)
    task = replace(
        build_task(resolve("fedavg").task, Key(0)), model=models.build("wrn16-4", classes=10, channels=1, norm=norm)
    )
    local = Local(batch=16, steps=1)  # more steps amplify rounding
    job = Job(task, Method(client_opt=SGD(0.01)), rounds=1, cohort=3, local=local)
    found = []
    for how in ({"backend": "graph", "conv": "fused"}, {"backend": "loop"}):
        simulation = make_simulation(Engine("cuda", **how), job)
        first = {name: block.cpu() for name, block in simulation.model.weights().items()}
        state, _ = simulation.round(simulation.start())
        assert state.backend == how["backend"]
        after = simulation.weights(state.server.public)
        found.append(torch.cat([(after[name].cpu() - block).flatten() for name, block in first.items()]))
    fused, plain = found
    assert float((fused - plain).norm()) < 0.02 * float(plain.norm())


@triton_only
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("examples", [5, 40])
def test_the_recurrence_of_an_lstm_and_its_gradients_equal_torch(examples, kind):
    torch.manual_seed(0)
    inputs, factor = torch.randn(3, 7, examples, 4 * 48, device="cuda"), torch.randn(3, 7, examples, 48, device="cuda")
    args = (inputs.to(kind), (0.2 * torch.randn(3, 4 * 48, 48, device="cuda")).to(kind), factor)

    def loss(recurrence):
        return vmap(grad_and_value(lambda x, w, f: (recurrence(x, w).to(f.dtype) * f).sum(), argnums=(0, 1)))

    wanted, _ = loss(recurrent._by_steps)(*(block.double() for block in args))
    first, _ = loss(recurrent.recurrence)(*args)
    again, _ = loss(recurrent.recurrence)(*args)
    for a, b, c in zip(first, again, wanted, strict=True):
        assert torch.equal(a, b)
        assert float((a.double() - c).norm()) <= (2e-2 if kind == torch.bfloat16 else 1e-5) * float(c.norm())


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_an_lstm_is_evaluated_as_on_the_cpu(precision):
    torch.manual_seed(0)
    model, codes = models.NextCharacter(20, hidden=64), torch.randint(0, 20, (50, 30))
    with torch.no_grad(), compute_with(torch.device("cuda"), precision):
        expected = model(codes)
        found = model.cuda()(codes.cuda()).cpu()
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < (1e-5 if precision == "float32" else 2e-3)


@triton_only
@pytest.mark.parametrize("optimizer", [SGD(0.05), SGD(0.05, momentum=0.9, weight_decay=1e-3, clip_norm=0.5)], ids=repr)
@pytest.mark.parametrize(("channels", "hidden"), [(1, 0), (1, 12), (3, 12)])
def test_a_chain_of_layers_without_autograd_equals_a_run_on_the_cpu(channels, hidden, optimizer):
    torch.manual_seed(0)
    net = models.cnn.conv_net(channels, 12, (4, 16), hidden, 5)
    pixels = torch.randint(0, 256, (90, channels, 12, 12), dtype=torch.uint8)
    images = Images(pixels, Key(6).integers(90, 5), (0.5,) * channels, (0.4,) * channels)
    task = Task(net, images, Assignment(np.arange(90), np.array([0, 20, 37, 90])))  # clients of different sizes
    job = Job(task, Method(client_opt=optimizer), rounds=3, cohort=3, local=Local(batch=8))
    ends = []
    for engine in (Engine("cuda", "graph"), Engine("cuda", "graph"), Engine("cpu", "vmap")):
        simulation = make_simulation(engine, job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, record = simulation.round(state)
        kept = simulation.clients.backends.trainers["graph"]._kept.values()
        assert engine.device == "cpu" or all(recording.chain is not None for recording in kept)
        ends.append((record.loss, {k: v.cpu() for k, v in simulation.weights(state.server.public).items()}))
    for name, block in ends[2][1].items():
        assert torch.equal(ends[0][1][name], ends[1][1][name])
        assert float((ends[0][1][name] - block).abs().max()) < 1e-5
    assert abs(ends[0][0] - ends[2][0]) < 1e-5


@triton_only
@pytest.mark.parametrize("entries", ["sign", "gaussian"])
@pytest.mark.parametrize("vectors", [1, 10])
def test_products_with_a_random_matrix_equal_the_reference(entries, vectors):
    p, e = 200, 30_001
    key = random_products.key_words(Key(9), "cuda")
    torch.manual_seed(0)
    product = random_products._Product.apply
    for back, length in ((False, p), (True, e)):
        given = torch.randn(vectors, length, device="cuda")
        found = product(given, key, p, e, entries, 0.5, back)
        wanted = product(given.cpu(), key.cpu(), p, e, entries, 0.5, back)
        assert torch.equal(found, product(given, key, p, e, entries, 0.5, back))
        assert float((found.cpu() - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@triton_only
@pytest.mark.parametrize("space", [Full(), MAPA(p=30), MAPA(p=30, entries="gaussian", normalize="none")], ids=repr)
def test_a_cuda_graph_with_our_kernels_equals_a_run_on_the_cpu(space, monkeypatch):
    monkeypatch.setattr(projection, "STORED", 1)  # entries of the basis are drawn in the product
    torch.manual_seed(0)
    clients = [(torch.randn(20, 1, 8, 8), torch.randint(0, 3, (20,))) for _ in range(3)]
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3)
    )
    job = Job(
        Task(net, *pool_clients(clients)),
        Method(space=space, client_opt=SGD(0.01)),
        rounds=10,
        cohort=3,
        local=Local(batch=8),
    )
    ends = []
    for engine in (Engine("cuda", "graph", conv="fused"), Engine("cpu", "vmap")):
        simulation = make_simulation(engine, job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, _ = simulation.round(state)
        ends.append(simulation.weights(state.server.public))
    for name, block in ends[0].items():
        assert float((block.cpu() - ends[1][name]).abs().max()) < 1e-4


@pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")  # of cuDNN, in the loop
@pytest.mark.parametrize("name", ["speakers", "text", "causal"])
def test_recurrent_layers_and_masked_attention_train_in_a_graph_as_in_a_loop(name):
    given = TASKS[name](1)
    task = Task(given.model, *pool_clients(given.clients[:4]))
    job = Job(task, Method(client_opt=SGD(0.1)), rounds=2, cohort=4, local=Local(batch=16))
    found = []
    for how in ("graph", "loop"):
        simulation = make_simulation(Engine("cuda", how), job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, _ = simulation.round(state)
        assert state.backend == how, state.backend_reason
        found.append(simulation.weights(state.server.public))
    for name, block in found[0].items():
        assert float((block - found[1][name]).abs().max()) < 1e-4


def test_a_cohort_that_does_not_fit_into_memory_is_trained_in_smaller_groups():
    images, targets = Key(5).normal(256 * 3 * 32 * 32).reshape(256, 3, 32, 32), Key(6).integers(256, 10)
    clients = [(images[i::64], targets[i::64]) for i in range(64)]
    task = Task(models.build("cnn-cifar"), *pool_clients(clients))
    job = Job(task, Method(), rounds=2, cohort=64, local=Local(batch=4))
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + (1 << 30)) / total)  # 64 clients of 4.6 MB need more
    try:
        simulation = make_simulation(Engine("cuda", "graph"), job)
        state, _ = simulation.round(simulation.start())
        assert 0 < state.chunk < 64
        state, record = simulation.round(state)
        assert record.clients == 64
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
