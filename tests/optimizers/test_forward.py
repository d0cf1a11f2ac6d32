"""Gradient descent by forward passes alone; DeComFL and FedKSeed, which are that along directions of the seed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.federation import Federation, digits_task, perceptron, same_public, workload
from thinwire.codecs import Threshold
from thinwire.core.key import Key
from thinwire.core.tree import Tree, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import L1L2, SGD, ForwardSGD
from thinwire.protocol import Method
from thinwire.protocol.client import Group, training_inputs
from thinwire.protocol.round import Round
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.spaces import MAPA, projection
from thinwire.training import Local
from thinwire.training.backends import LoopTrainer, VmapTrainer

SPACE = MAPA(p=20, entries="gaussian", normalize="none", scale="unit")


def federation(opt, task=None, steps: int = 4, **parts) -> Federation:
    return Federation(Method(space=SPACE, client_opt=opt, **parts), task or digits_task(), Local(batch=8, steps=steps))


def trained(one: Federation, trainer, clients=(0, 1)) -> Tree:
    """The coordinates of some clients after the first round."""
    states = tuple(one.states[i] for i in clients)
    group = Group(one.first, Round.open(one.contract, one.server).plan, clients, states)
    work = workload(one.task, clients, [Key(1).fold(i) for i in clients], one.local)
    return trainer.train(training_inputs(one.contract, one.model, group, work)).coords


def test_slopes_are_those_of_the_gradient():
    """All coordinates in one step, with a short perturbation: the step of SGD over the number of coordinates."""
    slopes = trained(federation(ForwardSGD(1e-3, directions=20, mu=1e-3), steps=1), LoopTrainer())["model/b"]
    gradient = trained(federation(SGD(1e-3 / 20), steps=1), LoopTrainer())["model/b"]
    assert float((slopes - gradient).norm() / gradient.norm()) < 0.05


def test_every_step_moves_the_next_coordinates():
    for steps, moved in ((1, 5), (3, 15), (4, 20), (6, 20)):
        coords = trained(federation(ForwardSGD(1e-3, directions=5), steps=steps), LoopTrainer())["model/b"]
        assert [int((row != 0).sum()) for row in coords] == [moved, moved]


def test_random_coordinates_are_other_ones_for_each_client():
    one = federation(ForwardSGD(1e-3, directions=1, order="random"), steps=4)
    moved = [set(row.nonzero()[:, 1].tolist()) for row in trained(one, LoopTrainer())["model/b"]]
    assert all(1 <= len(coordinates) <= 4 for coordinates in moved)
    assert moved[0] != moved[1]


def test_directions_that_are_not_stored_give_the_same_steps(monkeypatch):
    """Of those only the ones in use are drawn."""
    stored = trained(federation(ForwardSGD(1e-3, directions=5, mu=0.1)), LoopTrainer())
    monkeypatch.setattr(projection, "STORED", 0)
    drawn = trained(federation(ForwardSGD(1e-3, directions=5, mu=0.1)), LoopTrainer())
    torch.testing.assert_close(drawn, stored, rtol=1e-3, atol=1e-6)


def test_backends_differ_by_rounding_only():
    one = federation(ForwardSGD(1e-3, directions=5, mu=0.1))
    torch.testing.assert_close(trained(one, LoopTrainer()), trained(one, VmapTrainer()), rtol=1e-3, atol=1e-6)


class NoBackward(torch.autograd.Function):
    """The identity, without a backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("a backward pass was run")


class Opaque(nn.Module):
    """A layer through which no gradient can be computed."""

    def forward(self, x):
        assert not torch.is_grad_enabled()
        assert not x.requires_grad
        return NoBackward.apply(x)


def test_no_backward_pass_is_run():
    one = federation(ForwardSGD(1e-3), digits_task(nn.Sequential(perceptron(), Opaque())))
    one.round((0, 1))
    one.round((1, 2))
    assert bool(torch.isfinite(one.server.public.base["0.0.weight"]).all())


def test_random_layers_draw_the_same_for_all_perturbations():
    """Otherwise the difference of two draws, divided by mu, would be larger than any slope."""
    noisy = digits_task(nn.Sequential(perceptron(hidden=12), nn.Dropout(0.5)))
    coords = trained(federation(ForwardSGD(1e-3, mu=1e-3), noisy, steps=2), LoopTrainer())["model/b"]
    assert 0 < float(coords.abs().max()) < 1e-2


def test_everyone_replays_the_slopes():
    one = federation(ForwardSGD(1e-3, directions=5))
    for cohort in ((0, 1), (0,), (2, 3)):
        sizes = {len(data) for data in one.round(cohort).values()}
        assert max(sizes) < 4 * 20 + 20  # twenty values, and a header
    for client in range(4):
        one.download(client)
        assert same_public(one.public[client], one.server.public)
    assert one.drifted == []


def test_the_state_of_a_pool_is_one_scalar_for_each_direction():
    """FedKSeed: pairs of number and scalar go up; a client that missed everything receives the scalars of the pool."""
    space = replace(SPACE, p=30, redraw_every=0)
    forward = ForwardSGD(1e-2, directions=1, order="random")
    method = Method(space=space, client_opt=forward, up=Threshold(0.0), down=Threshold(0.0))
    one = Federation(method, digits_task(), Local(batch=8, steps=3))
    for _ in range(15):
        sizes = [len(data) for data in one.round((0, 1)).values()]
        assert max(sizes) < 3 * (4 + 1) + 20  # at most three numbers and scalars, and a header
    assert len(one.download(3)) < 30 * 4 + 40  # fifteen rounds were missed
    assert same_public(one.public[3], one.server.public)
    assert same(one.server.public.base, one.first.base)
    assert one.drifted == []


def test_a_penalty_and_bad_settings_are_refused():
    with pytest.raises(IncompatibleParts, match=r"runs no backward pass\. Write penalty = 'none'"):
        federation(ForwardSGD(), penalty=L1L2(l1=1e-4))
    for settings, reason in (
        ({"lr": 0.0}, "lr must be above 0"),
        ({"directions": 0}, "directions must be 1 or more, not 0"),
        ({"mu": 0.0}, "mu must be above 0"),
        ({"order": "best"}, "order must be one of turn, random, not 'best'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ForwardSGD(**settings)


@pytest.mark.parametrize(("method", "p"), [pytest.param("decomfl", 50, marks=pytest.mark.slow), ("fedkseed", 100)])
def test_presets_learn_digits(method, p):
    quick = {"method.space.p": p, "cohort.size": 2, "local.batch": 32, "rounds": 10, "eval.every": 10}
    simulation = make_simulation(Engine(backend="loop"), build_job(resolve(method, "digits", quick)))
    state = simulation.start()
    for _ in range(10):
        state, last = simulation.round(state)
    assert last.accuracy > 0.25  # chance is 0.1
