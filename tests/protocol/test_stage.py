"""Two stages: the weights first, then an adapter initialized from them (FLoRA, SLoRA)."""

from dataclasses import replace

import pytest
import torch

import thinwire as tw
from tests.federation import Federation, digits_task, same_public
from thinwire.core.key import Key
from thinwire.core.tree import ALL_BLOCKS, flatten, same, sub
from thinwire.errors import ConfigError, IncompatibleParts
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from thinwire.runs.config import update
from thinwire.runs.presets import preset
from thinwire.training import Local

STAGED = ("flora", "slora")


def named(name: str, at: int = 2, **changes) -> tw.Method:
    method = replace(update(tw.Method(), preset("methods", name).table["method"]), **changes)
    return replace(method, next_stage=replace(method.next_stage, at=at))


def weights(federation: Federation):
    public = federation.server.public
    space = federation.contract.at(public.version).method.space
    return space.expand(public.base, federation.contract.basis(public.version, "cpu"), public.coords)


def after(method: tw.Method, rounds: int) -> Federation:
    federation = Federation(method, local=Local(1, batch=8))
    for _ in range(rounds):
        federation.round((0, 1, 2))
    return federation


@pytest.mark.parametrize("name", STAGED)
def test_the_switch_is_exact_for_updates_of_rank_at_most_r(name):
    # rank 10 represents any update of the last layer (10 x 12); the first layer (12 x 64) is frozen: rank 0
    rules = (("2.weight", tw.spaces.Full()), ("*", tw.spaces.Frozen()))
    stage = tw.Stage(
        2, tw.spaces.LoRA(rank=10, alpha=7.0), mask=tw.masks.NoMask(), up=tw.codecs.Raw(), down=tw.codecs.Raw()
    )
    method = replace(named(name), space=tw.spaces.Route(rules), next_stage=stage)
    later = replace(method, next_stage=replace(stage, at=3))
    switched, still = after(method, 2), after(later, 2)
    assert list(switched.server.public.coords) == ["0.weight/a", "0.weight/b", "2.weight/a", "2.weight/b"]
    assert list(still.server.public.coords) == ["2.weight"]
    for block, other in zip(weights(switched).values(), weights(still).values(), strict=True):
        assert torch.allclose(block, other, atol=1e-6, rtol=0)
    assert float(flatten(sub(weights(still), still.first.base)).abs().max()) > 1e-3  # the weights have changed
    # an adapter of an update of zero can still be trained
    assert float(switched.server.public.coords["0.weight/a"].abs().max()) > 0
    assert not switched.server.public.coords["0.weight/b"].any()


@pytest.mark.parametrize("shape", [(6, 9), (6, 3, 2, 2), (9, 6)])
@pytest.mark.parametrize("transposed", [False, True])
def test_from_weights_is_the_best_approximation_of_its_rank(shape, transposed):
    if transposed and len(shape) > 2:
        return
    space = tw.spaces.LoRA(rank=2, alpha=5.0, fan_in_fan_out=("w",) if transposed else ())
    base, full = {"w": Key(1).normal(*shape)}, {"w": Key(2).normal(*shape)}
    made = space.expand(base, {}, space.from_weights(base, full, Key(3)))["w"]
    change, got = ((x - base["w"]).reshape(shape[0], -1).double() for x in (full["w"], made))
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    assert torch.allclose(got, (u[:, :2] * s[:2]) @ v[:2], atol=1e-5)
    low = {"w": base["w"] + (Key(4).normal(shape[0], 1) @ Key(5).normal(1, change.shape[1])).reshape(shape)}
    assert torch.allclose(space.expand(base, {}, space.from_weights(base, low, Key(3)))["w"], low["w"], atol=1e-5)


def test_slora_trains_and_sends_a_tenth_of_the_weights_and_then_the_adapter():
    federation = Federation(named("slora"), local=Local(1, batch=8))
    first, size = federation.first, federation.contract.coords.size
    moving = flatten(federation.contract.moving)
    assert int(moving.sum()) == size // 10
    for version in range(2):
        for client, data in federation.round((0, 1)).items():
            assert 4 * (size // 10) < len(data) < 4 * (size // 10) + 40  # values, no positions
            received = flatten(federation.public[client].coords)
            assert torch.equal(received[~moving], flatten(first.coords)[~moving])  # known from version 0
        if version == 0:
            moved = flatten(federation.server.public.coords) != flatten(first.coords)
            assert bool(moved[moving].any())
            assert not bool(moved[~moving].any())
            down = len(federation.download(2))
            assert 4 * (size // 10) < down < 4 * (size // 10) + 40
            assert torch.equal(flatten(federation.public[2].coords), flatten(federation.server.public.coords))
    adapter = federation.contract.at(2).coords.size
    for data in federation.round((0, 5)).values():  # client 5 takes part for the first time
        assert 4 * adapter < len(data) < 4 * adapter + 40
    assert same(federation.server.public.base, first.base)  # the base is that of version 0 again


def test_noise_and_moments_are_zero_outside_a_fixed_mask():
    federation = Federation(named("slora", privacy=tw.privacy.DP(sigma=1.0)))
    federation.round((0, 1))
    fixed = ~flatten(federation.contract.moving)
    assert torch.equal(flatten(federation.server.public.coords)[fixed], flatten(federation.first.coords)[fixed])
    for slot in ("m", "v"):
        assert not bool(flatten(federation.server.opt[slot])[fixed].any())


@pytest.mark.parametrize(("name", "backend"), [("flora", "vmap"), ("slora", "loop"), ("slora", "graph")])
def test_a_run_resumes_from_a_checkpoint_of_either_stage(name, backend, tmp_path):
    job = Job(digits_task(), named(name), 4, 3, Local(1, batch=8))
    simulation = make_simulation(Engine(backend=backend), job)
    state = simulation.start()
    for done in range(4):
        save_checkpoint(tmp_path / str(done), Checkpoint(state), "test")
        state, record = simulation.round(state)
    assert record.loss < 2.5
    for done in range(1, 4):
        again = make_simulation(Engine(backend=backend), job)
        other = load_checkpoint(tmp_path / str(done), "test").state
        for _ in range(done, 4):
            other, last = again.round(other)
        assert same_public(state.server.public, other.server.public)
        assert (last.loss, last.accuracy, last.bytes_down) == (record.loss, record.accuracy, record.bytes_down)


def test_states_are_reset_with_the_second_stage():
    method = named("flora", up=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.2)))
    federation = after(method, 2)
    later = federation.contract.at(2)
    opt = federation.server.opt
    assert {name for tree in opt.values() for name in tree if name != ALL_BLOCKS} == set(later.coords.names)
    assert not any(flatten(tree).any() for tree in opt.values())
    federation.round((0, 3))
    assert set(federation.states[0].codec) == set(later.method.up.init(later.code))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"download": "incremental"}, "Write download = 'full'"),
        ({"correction": tw.optimizers.Scaffold()}, "Write correction = 'none'"),
        ({"schedule": tw.schedules.AllBlocks(private=("2.*",))}, "Write schedule = 'all-blocks'"),
        ({"next_stage": tw.Stage(2, tw.spaces.LoRA(rank=2, redraw_every=2))}, "Write redraw_every = 0"),
        (
            {"next_stage": tw.Stage(2, tw.spaces.LoRA(rank=2, freeze_a=True))},
            "Write space = 'lora' with freeze_a = false",
        ),
        ({"next_stage": tw.Stage(2, tw.spaces.FedPara(rank=2))}, "Write space = 'lora'"),
        ({"next_stage": tw.Stage(2, tw.spaces.LoRA(rank=2), mask=tw.masks.RandomMask(0.5))}, "Write mask = 'none'"),
    ],
)
def test_methods_that_cannot_have_stages_are_refused(changes, message):
    with pytest.raises(IncompatibleParts, match=message):
        Federation(replace(named("flora"), **changes))


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match=r"next_stage\.at must be 1 or more"):
        tw.Stage(0)
    with pytest.raises(ConfigError, match="begins after 15 rounds, but the run has 10"):
        Job(digits_task(), named("slora", 15), 10, 3)
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        tw.masks.RandomMask(0.0)
