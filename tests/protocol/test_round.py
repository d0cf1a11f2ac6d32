"""What a round computes: FedAvg by hand, uploads of weights, divergence."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tests.federation import SIZES, Federation, digits, perceptron, same_public, workload
from tests.parts import Clip, Drift, Half, Product
from tests.protocol.messages import ALL_CLIENTS, assert_close
from thinwire.aggregators import Uniform
from thinwire.core.key import Key
from thinwire.errors import Diverged
from thinwire.optimizers import SGD
from thinwire.protocol import Method
from thinwire.protocol.setup import initial_server_state, make_contract
from thinwire.schedules import AllBlocks, Plan
from thinwire.training import Local


def test_one_full_batch_step_on_every_client_is_gradient_descent_on_the_pooled_loss():
    federation = Federation(Method(client_opt=SGD(0.3)), local=Local(batch=0, steps=1))
    model = perceptron()
    opt = torch.optim.SGD(model.parameters(), 0.3)
    x, y = (part[: sum(SIZES)] for part in digits())
    for _ in range(4):
        federation.round(ALL_CLIENTS)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert_close(federation.weights(), {n: p.detach() for n, p in model.named_parameters()}, 1e-6)


def test_fedavg_equals_a_loop_written_by_hand():
    local = Local(epochs=2, batch=8)
    federation = Federation(Method(client_opt=SGD(0.1, momentum=0.9)), local=local)
    task = federation.task
    ours = perceptron()
    x, y = digits()
    for version, cohort in enumerate(((0, 3, 4), (1, 2, 3), (5, 0, 1))):
        federation.round(cohort)
        total = sum(SIZES[i] for i in cohort)
        mean = {name: torch.zeros_like(p) for name, p in ours.state_dict().items()}
        for i in cohort:
            model = perceptron()
            model.load_state_dict(ours.state_dict())
            opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            work = workload(task, [i], [federation.key.fold("batches", version, i)], local)
            for step in range(work.rows.shape[1]):
                rows = work.index[0, step, : work.rows[0, step]]
                opt.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                opt.step()
            for name, block in model.state_dict().items():
                mean[name] += block * (SIZES[i] / total)
        ours.load_state_dict(mean)
        assert_close(federation.weights(), dict(ours.state_dict()), 1e-5)


def test_uniform_weights_give_the_mean_of_client_losses():
    federation = Federation(Method(client_weight=Uniform(), client_opt=SGD(0.3)), local=Local(batch=0, steps=1))
    federation.round((0, 3))
    model = perceptron()
    x, y = digits()
    start = 0
    total = 0.0
    for i, n in enumerate(SIZES[:4]):
        if i in (0, 3):
            total = total + F.cross_entropy(model(x[start : start + n]), y[start : start + n]) / 2
        start += n
    total.backward()
    by_hand = {n: (p - 0.3 * p.grad).detach() for n, p in model.named_parameters()}
    assert_close(federation.weights(), by_hand, 1e-6)


def test_uploading_weights_equals_uploading_deltas():
    runs = [Federation(Method(upload=kind, server_opt=SGD(0.7, momentum=0.5))) for kind in ("delta", "weights")]
    for cohort in ((0, 1, 2), (3, 4), (5, 0)):
        for federation in runs:
            federation.round(cohort)
    assert_close(runs[0].weights(), runs[1].weights(), 1e-6)


def test_training_lowers_the_loss():
    federation = Federation(Method(client_opt=SGD(0.5)), local=Local(epochs=3, batch=8))
    for _ in range(6):
        federation.round(ALL_CLIENTS)
    n = len(SIZES)
    assert sum(federation.losses[-n:]) < 0.7 * sum(federation.losses[:n])


def test_non_finite_updates_are_found_before_they_are_sent():
    federation = Federation(Method(client_opt=SGD(1e30), up=Half()))
    with pytest.raises(Diverged, match="client 0 trained to a value that is not finite"):
        federation.round((0,))


@dataclass(frozen=True)
class Blast(Clip):
    """Releases values so large that the merged base overflows."""

    def release(self, mean, clients, key):
        return {name: torch.full_like(block, 3e38) for name, block in mean.items()}


@pytest.mark.parametrize("space", [{}, {"space": Drift()}])
def test_overflow_on_the_server_is_found(space):
    federation = Federation(Method(privacy=Blast(), server_opt=SGD(2.0), **space))
    with pytest.raises(Diverged, match="step to version 1 is not finite"):
        federation.round((0,))


def test_a_round_may_synchronize_no_block():
    @dataclass(frozen=True)
    class Rest(AllBlocks):
        def plan(self, state, coords, version):
            return Plan(frozenset() if version == 1 else frozenset(coords.names))

    federation = Federation(Method(schedule=Rest(), server_opt=SGD(1.0, momentum=0.9), up=Half()))
    for cohort in ((0, 1), (0, 2), (1, 2)):
        federation.round(cohort)
    federation.download(5)
    assert same_public(federation.public[5], federation.server.public)


def test_both_sides_derive_the_same_contract():
    weights = {n: p.detach() for n, p in perceptron().named_parameters()}
    one, two = (make_contract(Method(space=Product()), weights, {}, Key(4)) for _ in range(2))
    assert one[0].schema == two[0].schema
    assert same_public(one[1], two[1])
    assert initial_server_state(*one).ledger.version == 0
