"""Learning-rate schedules against torch, and their use in rounds."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task
from thinwire.core.registry import entries
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.experiments.config import from_table, resolve, to_table
from thinwire.experiments.execute import execute
from thinwire.experiments.run_directory import RunFolder
from thinwire.optimizers import Optimizer
from thinwire.optimizers.lr_schedules import at_lr_schedule
from thinwire.runtime.job import Job
from thinwire.simulation.engine import LocalEngine
from thinwire.testing import check_lr_schedule
from thinwire.training import Local

S = torch.optim.lr_scheduler
PAIRS = [
    (tw.ConstantLR(), lambda opt: S.ConstantLR(opt, factor=1.0)),
    (tw.ExponentialLR(0.9), lambda opt: S.ExponentialLR(opt, 0.9)),
    (tw.MultiStepLR((3, 7), 0.1), lambda opt: S.MultiStepLR(opt, [3, 7], 0.1)),
    (tw.CosineLR(12), lambda opt: S.CosineAnnealingLR(opt, 12)),
    (tw.CosineLR(12, floor=0.2), lambda opt: S.CosineAnnealingLR(opt, 12, eta_min=0.2 * 0.5)),
    (tw.WarmupLR(5), lambda opt: S.LinearLR(opt, 1 / 5, 1.0, total_iters=4)),
    (
        tw.WarmupLR(5, inner=tw.ExponentialLR(0.9)),
        lambda opt: S.ChainedScheduler([S.LinearLR(opt, 1 / 5, 1.0, total_iters=4), S.ExponentialLR(opt, 0.9)]),
    ),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRS, ids=[repr(pair[0]) for pair in PAIRS])
def test_twelve_rounds_have_the_learning_rates_of_torch(mine, theirs):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = theirs(opt)
    for version in range(12):
        assert at_lr_schedule(tw.SGD(0.5), mine, version).lr == pytest.approx(opt.param_groups[0]["lr"], rel=1e-6)
        opt.step()
        scheduler.step()


def test_lr_schedules_fulfill_their_contract():
    for schedule in (
        *(entry.make() for entry in entries("lr_schedule").values()),
        tw.ExponentialLR(0.1),
        tw.MultiStepLR(tuple(range(1, 40))),
    ):
        check_lr_schedule(schedule)
        for version in (0, 1, 100, 10**6):
            assert schedule.factor(version) <= 1
            assert at_lr_schedule(tw.Adam(0.1), schedule, version).lr == pytest.approx(0.1 * schedule.factor(version))


def test_a_round_trains_with_the_learning_rate_of_its_version():
    """Two rounds with a decreasing learning rate equal two rounds with two optimizers."""
    falling = Federation(tw.Method(client_opt=tw.SGD(0.4), lr_schedule=tw.ExponentialLR(0.25)))
    falling.round((0, 1))
    first = falling.server.public.coords
    falling.round((0, 1))
    fixed = Federation(tw.Method(client_opt=tw.SGD(0.1)))
    fixed.server = fixed.server._replace(public=falling.first._replace(version=1, coords=first))
    fixed.public = dict.fromkeys(fixed.public, fixed.server.public)
    fixed.server = fixed.server._replace(ledger=fixed.server.ledger.append(b"", frozenset(), limit=-1, longest=-1))
    fixed.round((0, 1))
    assert same(fixed.server.public.coords, falling.server.public.coords)


def test_scaffold_divides_by_the_learning_rate_of_the_round():
    """After one full-batch step c is the mean gradient, for any learning rate."""
    method = tw.Method(
        correction=tw.Scaffold(), client_weight=tw.Uniform(), client_opt=tw.SGD(0.2), lr_schedule=tw.WarmupLR(10)
    )
    federation = Federation(method, local=Local(batch=0))
    before = federation.server.public.coords
    federation.round(tuple(range(len(federation.task.clients))))
    after = federation.server.public
    gradient = (flatten(before) - flatten(after.coords)) / (0.2 * 0.1)
    assert torch.allclose(flatten(after.shared), gradient, atol=1e-4)


def test_the_server_has_its_own_lr_schedule():
    start, plain, slow = (
        Federation(m) for m in (tw.Method(), tw.Method(), tw.Method(server_lr_schedule=tw.WarmupLR(4)))
    )
    plain.round((0, 1))
    slow.round((0, 1))
    here = flatten(start.server.public.coords)
    step, short = (flatten(f.server.public.coords) - here for f in (plain, slow))
    assert torch.allclose(short, step / 4, atol=1e-7)


@pytest.mark.parametrize("opt", [tw.SGD(0.2, momentum=0.9), tw.AdamW(0.01)], ids=repr)
def test_vmap_and_loop_train_with_the_same_learning_rates(opt):
    method = tw.Method(client_opt=opt, lr_schedule=tw.WarmupLR(2, inner=tw.CosineLR(3)), correction=tw.Scaffold())
    losses = []
    for backend in ("vmap", "loop"):
        job = Job(digits_task(), method, rounds=3, cohort=3, local=Local(batch=8))
        records = list(LocalEngine(backend=backend).run(job))
        losses.append([record.loss for record in records])
        assert [record.lr for record in records] == pytest.approx([opt.lr * f for f in (0.5, 0.75, 0.25)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_lr_schedules_can_be_configured_in_tables(tmp_path):
    table = {"kind": "warmup", "rounds": 3, "inner": {"kind": "multistep", "at": [4], "by": 0.5}}
    experiment = resolve(
        "fedavg", overrides={"method.lr_schedule": table, "method.server_lr_schedule.kind": "exponential", "rounds": 2}
    )
    assert experiment.method.lr_schedule == tw.WarmupLR(3, inner=tw.MultiStepLR((4,), 0.5))
    assert experiment.method.server_lr_schedule == tw.ExponentialLR()
    assert from_table(to_table(experiment)) == experiment
    execute(experiment, tmp_path / "run")
    history = RunFolder.open(tmp_path / "run").history()
    assert [record.lr for record in history] == pytest.approx([0.1, 0.2])


def test_invalid_settings_are_refused():
    for make in (
        lambda: tw.ExponentialLR(0.0),
        lambda: tw.ExponentialLR(1.5),
        lambda: tw.MultiStepLR(()),
        lambda: tw.MultiStepLR((5, 3)),
        lambda: tw.MultiStepLR((5,), 0.0),
        lambda: tw.CosineLR(0),
        lambda: tw.CosineLR(10, floor=-0.1),
        lambda: tw.CosineLR(10, floor=math.nan),
        lambda: tw.WarmupLR(0),
    ):
        with pytest.raises(ConfigError, match="must be"):
            make()


class _FixedLR(Optimizer):
    """An optimizer without a field `lr`."""

    lr = 0.1

    def init(self, coords):
        return {}

    def update(self, grads, state, coords):
        return {name: -0.1 * g for name, g in grads.items()}, state


def test_an_lr_schedule_of_an_optimizer_without_the_field_lr_is_refused():
    Federation(tw.Method(client_opt=_FixedLR()))
    with pytest.raises(IncompatibleParts, match="has no setting"):
        Federation(tw.Method(client_opt=_FixedLR(), lr_schedule=tw.ExponentialLR()))
