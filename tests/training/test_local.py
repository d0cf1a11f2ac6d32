"""Local training: many clients in one program do what each does alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.federation import SIZES, digits, digits_task, perceptron, workload
from tests.parts import Drift, Product
from thinwire.core.key import Key
from thinwire.core.tree import Tree, repeat, stack, unstack
from thinwire.data.examples import Arrays
from thinwire.data.task import Task
from thinwire.optimizers import SGD, Scaffold
from thinwire.protocol import Method
from thinwire.protocol.round import agree
from thinwire.training import Local
from thinwire.training.functional import Functional
from thinwire.training.inputs import TrainingInputs, local_train

LOCAL = Local(epochs=2, batch=8)
EVERYBODY = range(len(SIZES))


class Named(nn.Module):
    """Two named inputs, one of them a weight for each pixel."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, pixels, gain):
        return self.net(pixels * gain)


def mean_loss(outputs, targets):
    return F.cross_entropy(outputs, targets)


def train(method: Method, task: Task, how: str, local: Local = LOCAL, clients=EVERYBODY, model=None):
    model = model or Functional.of(task.model, task.loss)
    contract, public = agree(method, model.weights(), model.buffers(), Key(0))
    work = workload(task, clients, [Key(1).fold(i) for i in clients], local)
    start = repeat(public.coords, len(work))
    memory = method.correction.init_client(public.coords)
    mine = stack([{n: b + 0.01 * (i + 1) for n, b in memory.items()} for i in range(len(work))]) if memory else {}
    return local_train(TrainingInputs(method, model, public, contract.basis(0, "cpu"), start, mine, work), how)


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
    "controls": (Method(correction=Scaffold()), digits_task),
}


@pytest.mark.parametrize("case", CASES)
def test_vmap_equals_loop(case):
    method, make = CASES[case]
    together, alone = (train(method, make(), how) for how in ("vmap", "loop"))
    assert together.steps == alone.steps == tuple(2 * -(-n // min(8, n)) for n in SIZES)
    assert_close(together.coords, alone.coords)
    assert_close(together.buffers, alone.buffers)
    torch.testing.assert_close(together.loss, alone.loss, rtol=1e-5, atol=1e-5)
    assert (alone.loss > 0).all()


@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("batch", [8, 0])
def test_a_mean_loss_equals_a_loss_of_each_example(how, batch):
    local = Local(epochs=2, batch=batch)
    each, mean = (train(Method(), digits_task(loss=loss), how, local) for loss in (F_each, mean_loss))
    assert_close(each.coords, mean.coords)
    torch.testing.assert_close(each.loss, mean.loss, rtol=1e-5, atol=1e-5)


def F_each(outputs, targets):  # noqa: N802
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_a_client_is_trained_as_by_hand(how):
    """One client of 17 examples in batches of 8, 8 and 1, between larger clients."""
    task = digits_task()
    trained = train(Method(client_opt=SGD(0.1, momentum=0.9)), task, how)
    work = workload(task, range(len(SIZES)), [Key(1).fold(i) for i in range(len(SIZES))], LOCAL)
    model = perceptron()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = digits()
    total = 0.0
    for step in range(trained.steps[1]):
        rows = work.index[1, step, : work.rows[1, step]]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(rows)
    assert_close(unstack(trained.coords, 1), {n: p.detach() for n, p in model.named_parameters()})
    assert trained.loss[1].item() == pytest.approx(total / (2 * 17), rel=1e-5)


def test_company_does_not_change_what_a_client_learns():
    task = digits_task()
    alone = train(Method(), task, "vmap", clients=[3])
    together = train(Method(), task, "vmap")
    assert_close(unstack(together.coords, 3), unstack(alone.coords, 0))


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_training_changes_nothing_that_it_was_given(how):
    task = digits_task(perceptron(norm=True))
    model = Functional.of(task.model, task.loss)
    before = {name: block.clone() for name, block in task.model.state_dict().items()}
    mine = {name: block.clone() for name, block in model.module.state_dict().items()}
    torch.manual_seed(4)
    generator = torch.get_rng_state()
    train(Method(), task, how, model=model)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, block in before.items():
        assert torch.equal(task.model.state_dict()[name], block)
        assert torch.equal(model.module.state_dict()[name], mine[name])


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_dropout_is_the_same_every_time_and_different_for_each_client(how):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    x, y = digits()
    twice = Arrays(x[:20].repeat(2, 1), y[:20].repeat(2))
    task = digits_task(net, sizes=(20, 20))
    task = Task(net, twice, task.clients)
    work = workload(task, (0, 1), [Key(1), Key(1)], Local(batch=0, steps=2))
    model = Functional.of(net)
    contract, public = agree(Method(), model.weights(), model.buffers(), Key(0))
    assert contract.basis(0, "cpu") == {}
    start = repeat(public.coords, 2)
    if how == "loop":
        work = type(work)(work.index, work.rows, work.samples, (Key(1), Key(2)), work.gather)
    runs = []
    for seed in (0, 1):  # whatever the state of torch's generator
        torch.manual_seed(seed)
        runs.append(local_train(TrainingInputs(Method(), model, public, {}, start, {}, work), how))
    for name in start:
        assert torch.equal(runs[0].coords[name], runs[1].coords[name])
    assert not torch.equal(runs[0].coords["0.weight"][0], runs[0].coords["0.weight"][1])
