"""Gradient clipping: against torch, in all backends, with masks, at the server, and what it must not change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.func import vmap

import thinwire as tw
from tests.federation import Federation
from tests.simulation.test_engine import job, play
from thinwire.core.key import Key
from thinwire.core.tree import add, flatten, same, stack, sub, unstack
from thinwire.errors import ConfigError
from thinwire.federation.engine import Engine
from thinwire.optimizers import clip_by_global_norm
from thinwire.runs.config import digest, from_table, to_table
from thinwire.runs.toml import loads
from thinwire.testing import check_optimizer
from thinwire.training import Local

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"w": (4, 3), "b": (4,), "s": ()}
PAIRS = [
    (tw.optimizers.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (tw.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1)),
    (tw.optimizers.SGD(0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    (tw.optimizers.Adam(0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    (tw.optimizers.AdamW(0.1), lambda p: torch.optim.AdamW(p, 0.1)),
    (tw.optimizers.Adagrad(0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, 0.1)),
]
OPTIMIZERS = [*(pair[0] for pair in PAIRS), tw.optimizers.Yogi(0.1)]


def tree(key: Key, size: float = 1.0):
    return {name: size * key.fold(name).normal(*shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("mine", "theirs"), PAIRS, ids=[repr(pair[0]) for pair in PAIRS])
@pytest.mark.parametrize("clip_norm", [0.5, 4.0])  # always shorter than the gradient, and sometimes
def test_clipped_steps_equal_those_of_torch(mine, theirs, clip_norm):
    mine = replace(mine, clip_norm=clip_norm)
    coords = tree(Key(1))
    parameters = {name: torch.nn.Parameter(block.clone()) for name, block in coords.items()}
    optimizer, state = theirs(list(parameters.values())), mine.init(coords)
    for step in range(6):
        grads = tree(Key(2).fold(step), 1 + step % 2)
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(parameters.values(), clip_norm)
        optimizer.step()
        change, state = mine.update(grads, state, coords)
        coords = add(coords, change)
        for name, parameter in parameters.items():
            torch.testing.assert_close(coords[name], parameter.detach(), rtol=1e-5, atol=1e-5)


def test_a_step_of_yogi_is_that_of_the_clipped_gradient():
    grads, coords = tree(Key(3)), tree(Key(4))
    clipped, plain = tw.optimizers.Yogi(0.1, clip_norm=0.25), tw.optimizers.Yogi(0.1)
    short = {name: block * (0.25 / float(flatten(grads).norm())) for name, block in grads.items()}
    for name, block in clipped.update(grads, clipped.init(coords), coords)[0].items():
        torch.testing.assert_close(block, plain.update(short, plain.init(coords), coords)[0][name])


@dataclass(frozen=True, repr=False)
class _Unclipped(tw.optimizers.SGD):
    """Has the setting, and does not use it."""

    def update(self, grads, state, coords):
        return replace(self, clip_norm=math.inf)._plain(grads, state, coords)

    def _plain(self, grads, state, coords):
        return super().update(grads, state, coords)


def test_an_optimizer_that_ignores_its_clip_norm_fails():
    with pytest.raises(AssertionError, match="not that of the clipped gradient"):
        check_optimizer(_Unclipped(0.1))


def test_each_client_has_its_own_norm():
    each = [tree(Key(i), size) for i, size in enumerate((0.001, 1.0, 1000.0))]
    together = vmap(lambda grads: clip_by_global_norm(grads, 1.0))(stack(each))
    assert same(unstack(together, 0), each[0]), "a short gradient keeps its bits"
    for i in (1, 2):
        alone = clip_by_global_norm(each[i], 1.0)
        assert float(flatten(alone).norm()) == pytest.approx(1.0, rel=1e-6)
        torch.testing.assert_close(flatten(unstack(together, i)), flatten(alone))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_stays_so_and_zero_stays_zero(bad):
    grads = tree(Key(5))
    grads["w"][1] = bad  # the square of 3e38 is not a float32
    clipped = clip_by_global_norm(grads, 1.0)
    assert bool(flatten(clipped).isnan().all())
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert same(clip_by_global_norm(nothing, 1e-6), nothing)
    assert clip_by_global_norm({}, 1.0) == {}


@pytest.mark.parametrize("opt", OPTIMIZERS, ids=repr)
def test_a_finite_gradient_within_the_norm_gives_the_bits_of_no_clipping(opt):
    grads, coords = tree(Key(6)), tree(Key(7))
    (a, one), (b, two) = (
        replace(opt, clip_norm=limit).update(grads, opt.init(coords), coords) for limit in (1e6, math.inf)
    )
    assert same(a, b)
    assert all(same(one[slot], two[slot]) for slot in one)


@pytest.mark.parametrize(
    "opt", [tw.optimizers.SGD(0.3, momentum=0.9, clip_norm=0.4), tw.optimizers.AdamW(0.01, clip_norm=0.05)], ids=repr
)
@pytest.mark.parametrize("backend", ["loop", "threads", "graph"])
def test_all_backends_clip_alike(opt, backend):
    method = tw.Method(client_opt=opt, lr_schedule=tw.optimizers.WarmupLR(fraction=0.5, inner=tw.optimizers.CosineLR()))
    run = job(method, rounds=3, cohort=4)
    (_, found, records), (_, expected, others) = (play(run, Engine(DEVICE, one)) for one in (backend, "vmap"))
    assert found[-1].backend == backend
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)
    torch.testing.assert_close(
        *(flatten(states[-1].server.public.coords) for states in (found, expected)), rtol=1e-4, atol=2e-5
    )


def test_clipping_bounds_a_client_whose_rate_is_far_too_large():
    """With one full-batch step the update of every client has the norm lr clip_norm."""
    federation = Federation(tw.Method(client_opt=tw.optimizers.SGD(100.0, clip_norm=0.001)), local=Local(batch=0))
    before = federation.server.public.coords
    federation.round((0,))
    moved = flatten(sub(federation.server.public.coords, before))
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)


def test_the_norm_is_over_what_is_trained():
    """A mask of a tenth of the values: their update has the whole norm; those that are frozen do not count."""
    method = tw.Method(client_opt=tw.optimizers.SGD(1.0, clip_norm=0.001), mask=tw.masks.RandomMask(0.1))
    federation = Federation(method, local=Local(batch=0))
    before = federation.server.public.coords
    federation.round((0,))
    moved = flatten(sub(federation.server.public.coords, before))
    assert 0 < int((moved != 0).sum()) <= 0.11 * len(moved)
    assert float(moved.norm()) == pytest.approx(0.001, rel=1e-3)


def test_the_server_clips_the_mean_update():
    start, plain, short = (
        Federation(m) for m in (tw.Method(), tw.Method(), tw.Method(server_opt=tw.optimizers.SGD(1.0, clip_norm=0.01)))
    )
    plain.round((0, 1))
    short.round((0, 1))
    here = flatten(start.server.public.coords)
    step, clipped = (flatten(f.server.public.coords) - here for f in (plain, short))
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(clipped, step * (0.01 / step.norm()), rtol=1e-3, atol=1e-7)


def test_the_learning_rate_factor_of_a_recording_is_that_of_a_smaller_rate():
    """A recorded step is multiplied by the factor, others are made with lr times the factor: clipping comes before."""
    schedule = tw.optimizers.ExponentialLR(0.5)
    opt = tw.optimizers.SGD(0.2, momentum=0.9, weight_decay=0.01, clip_norm=0.1)
    run = job(tw.Method(client_opt=opt, lr_schedule=schedule), rounds=4)
    ends = [play(run, Engine(DEVICE, one))[1][-1].server.public.coords for one in ("graph", "loop")]
    torch.testing.assert_close(flatten(ends[0]), flatten(ends[1]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make", [tw.optimizers.SGD, tw.optimizers.Adam, tw.optimizers.AdamW, tw.optimizers.Yogi, tw.optimizers.Adagrad]
)
@pytest.mark.parametrize("clip_norm", [0.0, -1.0, -math.inf, math.nan])
def test_invalid_norms_are_refused_in_one_line(make, clip_norm):
    with pytest.raises(
        ConfigError, match=r"^clip_norm must be above 0, not .*; write for example clip_norm = inf"
    ) as error:
        make(clip_norm=clip_norm)
    assert "\n" not in str(error.value)


def test_without_clipping_tables_digests_and_messages_are_those_of_before():
    # the digest of this experiment before there was a clip_norm
    table = loads(BEFORE, "the experiment")
    experiment = from_table(table)
    assert digest(experiment) == "256a11cfa6d2"
    assert "clip_norm" not in str(to_table(experiment))
    assert repr(tw.optimizers.SGD(0.3)) == "SGD(lr=0.3, momentum=0.0, nesterov=False, weight_decay=0.0)"
    assert eval(repr(tw.optimizers.SGD(clip_norm=2.0)), {"SGD": tw.optimizers.SGD}) == tw.optimizers.SGD(clip_norm=2.0)


BEFORE = """
name = "fedavg"
seed = 0
rounds = 60

[task]
kind = "digits"
clients = 20
partition = { kind = "dirichlet", alpha = 0.5, min_size = 10 }
model = { kind = "mlp" }
validation_fraction = 0.0
participating_clients = 0
scale = "unit"
augment = "none"

[cohort]
size = 10

[local]
epochs = 2
batch = 16
steps = 0

[engine]
device = "cpu"
backend = "auto"
chunk = 0
precision = "float32"
conv = "auto"

[eval]
every = 1
target_accuracy = 1.0
metrics = []

[checkpoint]
every = 10

[method]
space = { kind = "full" }
sketch = { kind = "identity" }
schedule = { kind = "all-blocks", private = [] }
up = { kind = "raw" }
down = { kind = "raw" }
merge_codec = { kind = "raw" }
client_weight = { kind = "samples" }
aggregator = { kind = "weighted" }
client_opt = { kind = "sgd", lr = 0.3, momentum = 0.0, nesterov = false, weight_decay = 0.0 }
server_opt = { kind = "sgd", lr = 1.0, momentum = 0.0, nesterov = false, weight_decay = 0.0 }
lr_schedule = { kind = "constant" }
server_lr_schedule = { kind = "constant" }
correction = { kind = "none" }
penalty = { kind = "none" }
privacy = { kind = "none" }
download = "incremental"
upload = "delta"
drift_check = true
"""
