"""SparseLoCo: what is sent, what stays at home, and that a resumed run and a deployment have the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.federation import same_public
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.codecs import Peer
from thinwire.data.task import pool_clients
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy

METHOD = tw.methods.sparseloco(k=8, chunk=64, lr=0.01)
LOCAL = tw.Local(steps=4, batch=8)


def clients(count: int = 3):
    """Two classes of points that a linear model separates."""
    generator = torch.Generator().manual_seed(1)
    out = []
    for _ in range(count):
        x = torch.randn(30, 8, generator=generator)
        out.append((x, (x[:, 0] > 0).long()))
    return out


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def test_messages_take_two_bits_a_value_and_the_bits_of_a_set_of_positions():
    codec, x = tw.methods.sparseloco().up, {"w": tw.Key(1).normal(64 * 4096)}
    data, state = codec.encode(x, codec.init(tw.Spec.of(x)), Peer(tw.Key(2)))
    decoded = codec.decode(data, tw.Spec.of(x), Peer(tw.Key(2)))["w"]
    assert decoded.view(64, 4096).ne(0).sum(1).tolist() == [64] * 64
    assert 9.0 < 8 * len(data) / 4096 < 9.7  # the published coding has 12 + 2
    assert torch.equal(state["rest/w"], x["w"] - decoded)
    sent = decoded != 0
    error = (decoded - x["w"])[sent].square().sum() / x["w"][sent].square().sum()
    assert error < 0.01  # of the values that are sent; one bit, the sign alone, loses twice as much
    again, kept = codec.encode({"w": torch.zeros_like(x["w"])}, state, Peer(tw.Key(3)))
    second = codec.decode(again, tw.Spec.of(x), Peer(tw.Key(3)))["w"]
    assert torch.allclose(kept["rest/w"], 0.95 * state["rest/w"] - second, atol=1e-6)


def test_zeros_stay_zeros():
    codec = tw.codecs.Quantize(2, "sign-magnitude", block=4)
    x = {"w": torch.tensor([0.0, 1.0, -2.0, 0.0, -0.0, 2.0, -1.0, 5.0])}
    data, _ = codec.encode(x, {}, Peer(tw.Key(0)))
    assert codec.decode(data, tw.Spec.of(x), Peer(tw.Key(0)))["w"].tolist() == [0, 1, -2, 0, 0, 2, -1, 5]


def test_it_trains_and_the_moments_of_adamw_stay_at_home():
    run = tw.simulate(network(), clients(), METHOD, rounds=12, local=LOCAL, test=clients()[0], backend="loop")
    assert run.accuracy > 0.8
    dense = tw.simulate(network(), clients(), rounds=1, local=LOCAL, backend="loop")
    assert run.history[-1].bytes_up < dense.history[0].bytes_up / 5


def test_a_resumed_run_has_the_same_bits_and_forgetting_moments_others(tmp_path):
    options = {"rounds": 4, "local": LOCAL, "checkpoint_every": 1, "cohort": 2, "backend": "loop"}
    whole = tw.simulate(network(), clients(), METHOD, **options)

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tw.simulate(network(), clients(), METHOD, **options, out=tmp_path / "run", on_round=stop)
    again = tw.simulate(network(), clients(), METHOD, **options, out=tmp_path / "run", resume=True)
    assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())
    fresh = tw.simulate(network(), clients(), METHOD.replace(opt_lifetime="round"), **options)
    assert any(not torch.equal(fresh.weights[name], weight) for name, weight in whole.weights.items())


def test_a_deployment_equals_the_simulation():
    job = Job(tw.Task(network(), *pool_clients(clients())), METHOD, 4, 2, LOCAL, seed=3)
    engine = Engine(backend="loop", chunk=1)

    def play(runner):
        state, messages = runner.start(), []
        for _ in range(4):
            state, _ = runner.round(state, lambda *message: messages.append(message))
        return state, messages

    theirs, their_messages = play(make_simulation(engine, job))
    transport = InMemory(Client(engine, job))
    ours, messages = play(FlowerServer(engine, job, transport, RoundPolicy(quorum=1.0)))
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)
    assert all(set(one.opt) == {"count", "m", "v"} for one in theirs.clients.values())


def test_wrong_settings_are_refused():
    with pytest.raises(tw.ConfigError, match="k must be from 1 to the 64 values of a chunk, not 65"):
        tw.methods.sparseloco(k=65, chunk=64)
