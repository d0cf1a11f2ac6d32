"""Two devices agree: drawn numbers bit for bit, replayed models to rounding. Needs a GPU; elsewhere all is skipped."""

from __future__ import annotations

import pytest
import torch

from thinwire.core.rng import Key
from thinwire.core.spec import Spec
from thinwire.engines.local import Job, LocalEngine
from thinwire.optim import SGD
from thinwire.rounds import Local, Method
from thinwire.rounds.down import open_round, receive
from thinwire.run.build import build_task
from thinwire.run.config import resolve
from thinwire.spaces import MAPA, MAPAX, MAPO
from thinwire.spaces.generated import draw_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SPACES = [
    MAPO(k=128),
    MAPO(k=128, entries="gaussian", layout="contiguous"),
    MAPO(k=100, layout="strided", normalise="none"),
    MAPA(p=32),
    MAPA(p=32, entries="gaussian"),
    MAPAX(segment=64, budget=512, entries="gaussian"),
]


@pytest.mark.parametrize("draw", ["words", "signs", "normal", "uniform", "normal_integers"])
def test_a_stream_has_the_same_bits_on_the_gpu(draw):
    for start in (0, 5, (1 << 32) + 3):
        key = Key(7).fold("frame", start)
        here = getattr(key, draw)(10_001, start=start)
        there = getattr(key, draw)(10_001, start=start, device="cuda")
        assert there.is_cuda
        assert torch.equal(here, there.cpu())


def test_a_permutation_is_the_same_on_the_gpu():
    assert torch.equal(Key(3).permutation(100_000), Key(3).permutation(100_000, device="cuda").cpu())


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_frame_has_the_same_bits_on_the_gpu(space):
    spec = Spec.of({"w": torch.zeros(11_000), "b": torch.zeros(274)})
    here, there = space.frame(spec, Key(11), "cpu"), space.frame(spec, Key(11), "cuda")
    assert here.keys() == there.keys()
    for name in here:
        assert torch.equal(here[name], there[name].cpu())


@pytest.mark.parametrize("entries", ["sign", "gaussian"])
def test_rows_drawn_as_they_are_needed_have_the_same_bits_on_the_gpu(entries):
    here = draw_rows(Key(2), 5, 7, 10_007, entries, 0.25, "cpu")
    assert torch.equal(here, draw_rows(Key(2), 5, 7, 10_007, entries, 0.25, "cuda").cpu())


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_ledger_replayed_on_the_other_device_gives_the_same_model(space):
    task = build_task(resolve("fedavg").task, Key(0))
    space = MAPAX(k=50, p=4) if isinstance(space, MAPAX) else space
    job = Job(
        task,
        Method(space=space, client_opt=SGD(0.3 if space.normalise == "row" else 0.01)),
        rounds=20,
        cohort=5,
        local=Local(batch=16),
    )
    there = LocalEngine("cuda").prepare(job)
    here = LocalEngine("cpu").prepare(job)
    state = there.start()
    public = here.public
    for _ in range(20):
        state, _ = there.round(state)
        message = open_round(there.contract, state.server, {0: public.version})[0]
        public = receive(here.contract, public, message).public
    far = there.weights(state.server.public)
    near = here.weights(public)
    for name in near:
        assert float((near[name] - far[name].cpu()).abs().max()) <= 1e-6


def test_a_run_on_the_gpu_repeats_itself_bit_for_bit_and_agrees_with_the_cpu():
    task = build_task(resolve("fedavg").task, Key(0))
    job = Job(task, Method(), rounds=5, cohort=5, local=Local(batch=16))
    runs = {}
    for name, device in (("first", "cuda"), ("second", "cuda"), ("cpu", "cpu")):
        simulation = LocalEngine(device).prepare(job)
        state = simulation.start()
        for _ in range(job.rounds):
            state, _ = simulation.round(state)
        runs[name] = {k: v.cpu() for k, v in simulation.weights(state.server.public).items()}
    for block in runs["cpu"]:
        assert torch.equal(runs["first"][block], runs["second"][block])
        assert float((runs["first"][block] - runs["cpu"][block]).abs().max()) < 1e-3
