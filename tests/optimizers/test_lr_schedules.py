"""Learning-rate schedules against torch, and their use in rounds."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, records_of
from thinwire.core.registry import entries
from thinwire.core.tree import flatten, same
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.optimizers import Optimizer
from thinwire.runs.config import from_table, resolve, to_table
from thinwire.runs.execute import execute
from thinwire.runs.run_directory import RunFolder
from thinwire.training import Local

S = torch.optim.lr_scheduler
PAIRS = [
    (tw.optimizers.ConstantLR(), lambda opt: S.ConstantLR(opt, factor=1.0)),
    (tw.optimizers.ExponentialLR(0.9), lambda opt: S.ExponentialLR(opt, 0.9)),
    (tw.optimizers.MultiStepLR((3, 7), 0.1), lambda opt: S.MultiStepLR(opt, [3, 7], 0.1)),
    (tw.optimizers.CosineLR(12), lambda opt: S.CosineAnnealingLR(opt, 12)),
    (tw.optimizers.CosineLR(12, floor=0.2), lambda opt: S.CosineAnnealingLR(opt, 12, eta_min=0.2 * 0.5)),
    (tw.optimizers.WarmupLR(5), lambda opt: S.LinearLR(opt, 1 / 5, 1.0, total_iters=4)),
    (
        tw.optimizers.WarmupLR(5, inner=tw.optimizers.ExponentialLR(0.9)),
        lambda opt: S.ChainedScheduler([S.LinearLR(opt, 1 / 5, 1.0, total_iters=4), S.ExponentialLR(opt, 0.9)]),
    ),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRS, ids=[repr(pair[0]) for pair in PAIRS])
def test_twelve_rounds_have_the_learning_rates_of_torch(mine, theirs):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = theirs(opt)
    for version in range(12):
        assert tw.optimizers.SGD(0.5).scaled(mine.factor(version)).lr == pytest.approx(
            opt.param_groups[0]["lr"], rel=1e-6
        )
        opt.step()
        scheduler.step()


def test_factors_are_at_most_one_and_multiply_the_learning_rate():
    for entry in entries("lr_schedule").values():
        schedule = entry.make().over(100)
        for version in (0, 1, 100, 10**6):
            assert schedule.factor(version) <= 1
            assert tw.optimizers.Adam(0.1).scaled(schedule.factor(version)).lr == pytest.approx(
                0.1 * schedule.factor(version)
            )


def test_a_round_trains_with_the_learning_rate_of_its_version():
    """Two rounds with a decreasing learning rate equal two rounds with two optimizers."""
    falling = Federation(tw.Method(client_opt=tw.optimizers.SGD(0.4), lr_schedule=tw.optimizers.ExponentialLR(0.25)))
    falling.round((0, 1))
    first = falling.server.public.coords
    falling.round((0, 1))
    fixed = Federation(tw.Method(client_opt=tw.optimizers.SGD(0.1)))
    fixed.server = fixed.server._replace(public=falling.first._replace(version=1, coords=first))
    fixed.public = dict.fromkeys(fixed.public, fixed.server.public)
    fixed.server = fixed.server._replace(ledger=fixed.server.ledger.append(b"", frozenset(), limit=-1, longest=-1))
    fixed.round((0, 1))
    assert same(fixed.server.public.coords, falling.server.public.coords)


def test_scaffold_divides_by_the_learning_rate_of_the_round():
    """After one full-batch step c is the mean gradient, for any learning rate."""
    method = tw.Method(
        correction=tw.optimizers.Scaffold(),
        client_weight=tw.aggregators.Uniform(),
        client_opt=tw.optimizers.SGD(0.2),
        lr_schedule=tw.optimizers.WarmupLR(10),
    )
    federation = Federation(method, local=Local(batch=0))
    before = federation.server.public.coords
    federation.round(tuple(range(len(federation.task.clients))))
    after = federation.server.public
    gradient = (flatten(before) - flatten(after.coords)) / (0.2 * 0.1)
    assert torch.allclose(flatten(after.shared), gradient, atol=1e-4)


def test_the_server_has_its_own_lr_schedule():
    start, plain, slow = (
        Federation(m) for m in (tw.Method(), tw.Method(), tw.Method(server_lr_schedule=tw.optimizers.WarmupLR(4)))
    )
    plain.round((0, 1))
    slow.round((0, 1))
    here = flatten(start.server.public.coords)
    step, short = (flatten(f.server.public.coords) - here for f in (plain, slow))
    assert torch.allclose(short, step / 4, atol=1e-7)


@pytest.mark.parametrize("opt", [tw.optimizers.SGD(0.2, momentum=0.9), tw.optimizers.AdamW(0.01)], ids=repr)
def test_vmap_and_loop_train_with_the_same_learning_rates(opt):
    method = tw.Method(
        client_opt=opt,
        lr_schedule=tw.optimizers.WarmupLR(2, inner=tw.optimizers.CosineLR(3)),
        correction=tw.optimizers.Scaffold(),
    )
    losses = []
    for backend in ("vmap", "loop"):
        job = Job(digits_task(), method, rounds=3, cohort=3, local=Local(batch=8))
        records = records_of(Engine(backend=backend), job)
        losses.append([record.loss for record in records])
        assert [record.lr for record in records] == pytest.approx([opt.lr * f for f in (0.5, 0.75, 0.25)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_lr_schedules_can_be_configured_in_tables(tmp_path):
    table = {"kind": "warmup", "rounds": 3, "inner": {"kind": "multistep", "at": [4], "by": 0.5}}
    experiment = resolve(
        "fedavg", overrides={"method.lr_schedule": table, "method.server_lr_schedule.kind": "exponential", "rounds": 5}
    )
    assert experiment.method.lr_schedule == tw.optimizers.WarmupLR(3, inner=tw.optimizers.MultiStepLR((4,), 0.5))
    assert experiment.method.server_lr_schedule == tw.optimizers.ExponentialLR()
    assert from_table(to_table(experiment)) == experiment
    execute(experiment, tmp_path / "run")
    history = RunFolder.open(tmp_path / "run").history()
    assert [record.lr for record in history] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.15])


def test_invalid_settings_are_refused():
    for make in (
        lambda: tw.optimizers.ExponentialLR(0.0),
        lambda: tw.optimizers.ExponentialLR(1.5),
        lambda: tw.optimizers.MultiStepLR(()),
        lambda: tw.optimizers.MultiStepLR((5, 3)),
        lambda: tw.optimizers.MultiStepLR((5,), 0.0),
        lambda: tw.optimizers.CosineLR(-1),
        lambda: tw.optimizers.CosineLR(fraction=0.0),
        lambda: tw.optimizers.CosineLR(fraction=1.01),
        lambda: tw.optimizers.CosineLR(fraction=math.nan),
        lambda: tw.optimizers.CosineLR(10, floor=-0.1),
        lambda: tw.optimizers.CosineLR(10, floor=math.nan),
        lambda: tw.optimizers.WarmupLR(-1),
        lambda: tw.optimizers.WarmupLR(fraction=0.0),
        lambda: tw.optimizers.WarmupLR(fraction=2.0),
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
        Federation(tw.Method(client_opt=_FixedLR(), lr_schedule=tw.optimizers.ExponentialLR()))


FRACTIONS = [
    (tw.optimizers.CosineLR(), tw.optimizers.CosineLR(40)),
    (tw.optimizers.CosineLR(fraction=0.5, floor=0.1), tw.optimizers.CosineLR(20, floor=0.1)),
    (tw.optimizers.CosineLR(fraction=1e-9), tw.optimizers.CosineLR(1)),
    (tw.optimizers.WarmupLR(), tw.optimizers.WarmupLR(2)),
    (
        tw.optimizers.WarmupLR(fraction=1.0, inner=tw.optimizers.CosineLR()),
        tw.optimizers.WarmupLR(40, inner=tw.optimizers.CosineLR(40)),
    ),
    (tw.optimizers.WarmupLR(40, inner=tw.optimizers.WarmupLR(inner=tw.optimizers.MultiStepLR((40,)))), None),
    (tw.optimizers.ExponentialLR(0.9), tw.optimizers.ExponentialLR(0.9)),
]


@pytest.mark.parametrize(("fraction", "count"), FRACTIONS, ids=repr)
def test_fractions_of_forty_rounds_are_counts(fraction, count):
    count = count or tw.optimizers.WarmupLR(40, inner=tw.optimizers.WarmupLR(2, inner=tw.optimizers.MultiStepLR((40,))))
    bound = fraction.over(40)
    assert [bound.factor(t) for t in range(50)] == [count.factor(t) for t in range(50)]
    assert bound.over(40) == bound


def test_warmup_and_cosine_over_the_run_end_with_it():
    schedule = tw.optimizers.WarmupLR(inner=tw.optimizers.CosineLR()).over(100)
    factors = [schedule.factor(t) for t in range(100)]
    assert factors[0] == pytest.approx(0.2)
    assert factors[4] == pytest.approx((1 + math.cos(math.pi * 0.04)) / 2)
    assert max(factors) == factors[4]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert 0 < factors[-1] < 3e-4
    assert schedule.factor(10**6) == factors[-1]


@pytest.mark.parametrize(
    "schedule",
    [
        tw.optimizers.CosineLR(),
        tw.optimizers.WarmupLR(),
        tw.optimizers.WarmupLR(2, tw.optimizers.CosineLR()),
    ],
)
def test_a_fraction_of_an_unknown_number_of_rounds_is_refused(schedule):
    with pytest.raises(
        ConfigError, match=r"fraction of a run of unknown length; write rounds, or call over\(rounds\)$"
    ):
        schedule.factor(0)


@pytest.mark.parametrize("slot", ["lr_schedule", "server_lr_schedule"])
@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (tw.optimizers.CosineLR(11), "a cosine of 11 rounds, but the run has 10"),
        (tw.optimizers.WarmupLR(11), "a warm-up of 11 rounds, but the run has 10"),
        (tw.optimizers.WarmupLR(2, inner=tw.optimizers.CosineLR(500)), "a cosine of 500 rounds"),
        (tw.optimizers.MultiStepLR((5, 11)), r"a multistep at \[5, 11\], but the run has 10; write earlier ones"),
    ],
    ids=repr,
)
def test_a_schedule_longer_than_the_run_is_refused_where_the_job_is_made(slot, schedule, message):
    method = tw.Method(**{slot: schedule})
    with pytest.raises(ConfigError, match=f"longer than the run: {message}") as error:
        Job(digits_task(), method, rounds=10, cohort=3)
    assert "\n" not in str(error.value)
    Job(digits_task(), method, rounds=500, cohort=3)


def test_fractions_and_counts_give_the_same_bits_and_another_length_another_schema():
    by_fraction, by_count, longer = (
        make_simulation(Engine(), Job(digits_task(), tw.Method(lr_schedule=schedule), rounds=rounds, cohort=3))
        for schedule, rounds in (
            (tw.optimizers.CosineLR(), 4),
            (tw.optimizers.CosineLR(4), 4),
            (tw.optimizers.CosineLR(), 5),
        )
    )
    assert by_fraction.contract.schema == by_count.contract.schema != longer.contract.schema
    states = [simulation.start() for simulation in (by_fraction, by_count)]
    for _ in range(4):
        states = [simulation.round(state)[0] for simulation, state in zip((by_fraction, by_count), states, strict=True)]
    assert same(states[0].server.public.coords, states[1].server.public.coords)


def test_the_second_stage_goes_on_with_the_schedule_of_the_run():
    method = tw.Method(
        client_opt=tw.optimizers.SGD(0.4),
        lr_schedule=tw.optimizers.CosineLR(),
        download="full",
        next_stage=tw.Stage(2, client_opt=tw.optimizers.SGD(0.8)),
    )
    records = records_of(Engine(), Job(digits_task(), method, rounds=4, cohort=3))
    assert [r.lr for r in records] == pytest.approx([0.4, 0.3414, 0.4, 0.1172], abs=1e-4)


def test_a_run_that_stops_early_has_the_same_learning_rates(tmp_path):
    overrides = {"method.lr_schedule": {"kind": "warmup", "fraction": 0.5, "inner": "cosine"}, "rounds": 6}
    execute(resolve("fedavg", overrides=overrides), tmp_path / "whole")
    execute(resolve("fedavg", overrides={**overrides, "eval.target_accuracy": 0.2}), tmp_path / "early")
    whole, early = ([r.lr for r in RunFolder.open(tmp_path / name).history()] for name in ("whole", "early"))
    assert len(early) < len(whole) == 6
    assert early == whole[: len(early)]


def test_a_run_that_is_continued_has_the_learning_rates_and_the_bits_of_the_whole():
    run = Job(
        digits_task(), tw.Method(lr_schedule=tw.optimizers.WarmupLR(inner=tw.optimizers.CosineLR())), rounds=5, cohort=3
    )
    first, second = (make_simulation(Engine(), run) for _ in range(2))
    state = first.start()
    states, rates = [state], []
    for _ in range(5):
        state, record = first.round(state)
        states.append(state)
        rates.append(record.lr)
    state = states[3]
    for expected in rates[3:]:
        state, record = second.round(state)
        assert record.lr == expected
    assert same(state.server.public.coords, states[-1].server.public.coords)
