"""Local training: the backends agree, with each other and with a plain loop over torch.optim."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.federation import SIZES, digits, digits_task, perceptron, workload
from tests.parts import Drift, Product
from thinwire.core.key import Key
from thinwire.core.tree import Tree, unstack
from thinwire.data.examples import Arrays
from thinwire.data.task import Task
from thinwire.optimizers import SGD, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.client import Group, initial_client_state, training_inputs
from thinwire.protocol.round import Round
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.training import Local
from thinwire.training.backends import LoopTrainer, VmapTrainer
from thinwire.training.functional import Functional
from thinwire.training.inputs import TrainingInputs, Workload

LOCAL = Local(epochs=2, batch=8)
ALL = range(len(SIZES))
TRAINERS = {"vmap": VmapTrainer(), "loop": LoopTrainer()}


class Named(nn.Module):
    """Two named inputs, one of them a weight for each pixel."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, pixels, gain):
        return self.net(pixels * gain)


def mean_loss(outputs, targets):
    return F.cross_entropy(outputs, targets)


def train(method: Method, task: Task, backend: str, local: Local = LOCAL, clients=ALL, model=None):
    model = model or Functional.of(task.model, task.loss)
    work = workload(task, clients, [Key(1).fold(i) for i in clients], local)
    return TRAINERS[backend].train(inputs_of(method, model, clients, work))


def inputs_of(method: Method, model: Functional, clients, work: Workload) -> TrainingInputs:
    """Inputs of the first round; the clients' states of the correction differ."""
    contract, public = make_contract(method, model.weights(), model.buffers(), Key(0))
    plan, first = (
        Round.open(contract, initial_server_state(contract, public)).plan,
        initial_client_state(contract, public),
    )
    states = [
        replace(first, correction={n: b + 0.01 * (i + 1) for n, b in first.correction.items()})
        for i in range(len(clients))
    ]
    return training_inputs(contract, model, Group(public, plan, tuple(clients), tuple(states)), work)


def assert_close(a: Tree, b: Tree, tolerance: float = 1e-5):
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def named_task() -> Task:
    plain = digits_task(Named())
    gain = 0.5 + Key(3).uniform(len(plain.train), 64)
    return Task(plain.model, Arrays({"pixels": plain.train.inputs, "gain": gain}, plain.train.targets), plain.clients)


CASES = {
    "plain": (Method(), digits_task),
    "momentum": (Method(client_opt=SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)), digits_task),
    "batch norm": (Method(), lambda: digits_task(perceptron(norm=True))),
    "dictionary": (Method(), named_task),
    "mean loss": (Method(), lambda: digits_task(loss=mean_loss)),
    "random directions": (Method(space=Drift(k=4)), digits_task),
    "products": (Method(space=Product(), client_opt=SGD(0.05, momentum=0.5)), digits_task),
    "scaffold": (Method(correction=Scaffold()), digits_task),
}


@pytest.mark.parametrize("case", CASES)
def test_vmap_equals_loop(case):
    method, make = CASES[case]
    together, alone = (train(method, make(), backend) for backend in ("vmap", "loop"))
    assert_close(together.coords, alone.coords)
    assert_close(together.buffers, alone.buffers)
    torch.testing.assert_close(together.loss, alone.loss, rtol=1e-5, atol=1e-5)
    assert (alone.loss > 0).all()


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("batch", [8, 0])
def test_a_mean_loss_equals_a_loss_of_each_example(backend, batch):
    local = Local(epochs=2, batch=batch)
    each, mean = (train(Method(), digits_task(loss=loss), backend, local) for loss in (each_loss, mean_loss))
    assert_close(each.coords, mean.coords)
    torch.testing.assert_close(each.loss, mean.loss, rtol=1e-5, atol=1e-5)


def each_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_training_equals_a_loop_over_torch_optim(backend):
    """One client of 17 examples in batches of 8, 8 and 1, between larger clients."""
    task = digits_task()
    trained = train(Method(client_opt=SGD(0.1, momentum=0.9)), task, backend)
    work = workload(task, range(len(SIZES)), [Key(1).fold(i) for i in range(len(SIZES))], LOCAL)
    assert work.steps == tuple(2 * -(-n // min(8, n)) for n in SIZES)
    model = perceptron()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = digits()
    total = 0.0
    for step in range(work.steps[1]):
        rows = work.index[1, step, : work.rows[1, step]]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(rows)
    assert_close(unstack(trained.coords, 1), {n: p.detach() for n, p in model.named_parameters()})
    assert trained.loss[1].item() == pytest.approx(total / (2 * 17), rel=1e-5)


def test_the_result_of_a_client_does_not_depend_on_other_clients():
    task = digits_task()
    alone = train(Method(), task, "vmap", clients=[3])
    together = train(Method(), task, "vmap")
    assert_close(unstack(together.coords, 3), unstack(alone.coords, 0))


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_training_does_not_modify_its_inputs(backend):
    task = digits_task(perceptron(norm=True))
    model = Functional.of(task.model, task.loss)
    before = {name: block.clone() for name, block in task.model.state_dict().items()}
    mine = {name: block.clone() for name, block in model.module.state_dict().items()}
    torch.manual_seed(4)
    generator = torch.get_rng_state()
    train(Method(), task, backend, model=model)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, block in before.items():
        assert torch.equal(task.model.state_dict()[name], block)
        assert torch.equal(model.module.state_dict()[name], mine[name])


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_dropout_depends_on_the_key_and_differs_between_clients(backend):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    x, y = digits()
    twice = Arrays(x[:20].repeat(2, 1), y[:20].repeat(2))
    task = digits_task(net, sizes=(20, 20))
    task = Task(net, twice, task.clients)
    work = workload(task, (0, 1), [Key(1), Key(1)], Local(batch=0, steps=2))
    model = Functional.of(net)
    if backend == "loop":
        work = type(work)(work.index, work.rows, work.samples, (0, 1), Key(2), 0, work.gather)
    runs = []
    inputs = inputs_of(Method(), model, (0, 1), work)
    assert inputs.basis == {}
    for seed in (0, 1):  # any state of torch's generator
        torch.manual_seed(seed)
        runs.append(TRAINERS[backend].train(inputs))
    for name in inputs.start:
        assert torch.equal(runs[0].coords[name], runs[1].coords[name])
    assert not torch.equal(runs[0].coords["0.weight"][0], runs[0].coords["0.weight"][1])
