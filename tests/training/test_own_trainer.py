"""Trainers of one's own: the same protocol around them, what they return is checked, and nothing else leaves."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from tests.federation import same_public
from tests.flower.in_memory import FlowerServer, InMemory
from thinwire.data.task import pool_clients
from thinwire.federation.engine import Engine
from thinwire.federation.job import Job
from thinwire.federation.simulation import make_simulation
from thinwire.flower.app_folder import write_app
from thinwire.flower.apps import read_experiment
from thinwire.flower.client import Client
from thinwire.flower.policy import RoundPolicy
from thinwire.runs.config import digest


def clients(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [(20, 4), (13, 4), (17, 4)][:count]
    return [(torch.randn(*s, generator=generator), torch.randint(0, 3, s[:1], generator=generator)) for s in sizes]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(model, records, lr):
    """Plain SGD on the batches of the round."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in records.batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


LOCAL = tw.Local(epochs=2, batch=8)
SPACES = {
    "full": tw.Method(client_opt=tw.optimizers.SGD(0.2)),
    "lora": tw.methods.lora(rank=2),
    "ffa": tw.methods.ffa_lora(rank=2),
    "mapo": tw.methods.mapo(k=8),
    "fedpara": tw.methods.fedpara(),
    "route": tw.Method(space=tw.spaces.Route((("0.*", tw.spaces.Full()), ("*", tw.spaces.Frozen())))),
}


@pytest.mark.parametrize("name", SPACES)
def test_our_own_steps_written_as_a_trainer_give_the_same_run(name):
    options = {"rounds": 2, "local": LOCAL, "backend": "loop", "chunk": 1, "lr": 0.1}
    ours = tw.simulate(network(), clients(), SPACES[name], **options)
    theirs = tw.simulate(network(), clients(), SPACES[name], trainer=fit, **options)
    assert theirs.bytes_total == ours.bytes_total
    start = network().state_dict()
    for block, value in ours.weights.items():
        torch.testing.assert_close(theirs.weights[block], value, rtol=0, atol=1e-5)
    assert any(not torch.allclose(value, start[block], atol=1e-3) for block, value in ours.weights.items())


def play(runner, rounds: int):
    state, messages = runner.start(), []
    for _ in range(rounds):
        state, _ = runner.round(state, lambda *message: messages.append(message))
    return state, messages


def job(method: tw.Method, trainer, rounds: int = 3) -> Job:
    task = tw.Task(network(), *pool_clients(clients()))
    return Job(task, method, rounds, 2, tw.Local(epochs=1, batch=8, trainer=trainer), seed=4)


MASKED = tw.methods.flasc(rank=2, density=0.5)
CASES = {
    "fedavg": (tw.Method(), fit),
    "compressed": (
        tw.Method(
            up=tw.codecs.ErrorFeedback(tw.codecs.TopK(0.3, inner=tw.codecs.Quantize(4))), down=tw.codecs.Quantize(8)
        ),
        fit,
    ),
    "adapters-under-a-mask": (MASKED, fit),
    "private-head": (tw.Method(schedule=tw.schedules.AllBlocks(private=("2.*",))), fit),
    "sampled-masks": (tw.methods.fedpm(), fit),
}


@pytest.mark.parametrize("name", CASES)
def test_a_deployment_with_a_trainer_equals_the_simulation(name):
    method, trainer = CASES[name]
    one = job(method, trainer)
    theirs, their_messages = play(make_simulation(Engine(), one), 3)
    transport = InMemory(Client(Engine(), one))
    ours, messages = play(FlowerServer(Engine(), one, transport, RoundPolicy(quorum=1.0)), 3)
    assert same_public(ours.server.public, theirs.server.public)
    assert sorted(messages) == sorted(their_messages)


def test_private_blocks_stay_at_home():
    method = tw.Method(schedule=tw.schedules.AllBlocks(private=("2.*",)))
    state, messages = play(make_simulation(Engine(), job(method, fit)), 3)
    assert all(set(one.unsent) == {"2.weight", "2.bias"} for one in state.clients.values())
    ups = {len(message) for _, direction, _, message in messages if direction == "up"}
    assert max(ups) < 4 * (4 * 6 + 6) + 40  # the first layer alone


def test_a_run_that_is_resumed_has_the_same_bits(tmp_path):
    options = {"trainer": fit, "local": LOCAL, "rounds": 4, "checkpoint_every": 1}
    whole = tw.simulate(network(), clients(), **options)
    with pytest.raises(KeyboardInterrupt):
        tw.simulate(network(), clients(), **options, out=tmp_path / "run", on_round=_stop_after_two)
    again = tw.simulate(network(), clients(), **options, out=tmp_path / "run", resume=True)
    assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())


def _stop_after_two(record):
    if record.round == 2:
        raise KeyboardInterrupt


def _wrong(change):
    def trainer(model, records):
        return change(model)

    return trainer


def _with(name, value):
    return _wrong(lambda model: {**model.state_dict(), name: value})


def _raises(model, records):
    raise ValueError("no\ngood")


def _changes_frozen(model, records):
    with torch.no_grad():
        model[0].weight.add_(1)


HALF = torch.zeros(3, 6, dtype=torch.bfloat16)
ERRORS = {
    "missing": (_wrong(lambda model: {"0.weight": model[0].weight}), "returned a model without '0.bias'"),
    "wrapped": (_wrong(lambda model: nn.ModuleDict({"module": model})), "accelerator.unwrap_model"),
    "shape": (_with("2.weight", torch.zeros(3, 5)), r"'2.weight' of shape \[3, 5\]; expected \[3, 6\]"),
    "type": (_with("2.weight", HALF), "of type torch.bfloat16; expected torch.float32"),
    "no tensor": (_with("2.weight", 3), "of type int; expected a dense tensor"),
    "object": (_wrong(lambda model: 3), "object of type int; return the model"),
    "three": (_wrong(lambda model: (model, 1, 2)), r"returned \(1, 2\) beside the model"),
    "loss": (_wrong(lambda model: (model, "x")), r"returned \('x',\) beside the model"),
    "error": (_raises, r"test_own_trainer.py, line \d+: ValueError: no good"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_used_is_refused_in_one_line(name):
    trainer, text = ERRORS[name]
    with pytest.raises(tw.ConfigError, match=text) as error:
        tw.simulate(network(), clients(1), rounds=1, trainer=trainer)
    assert "\n" not in str(error.value)


def test_values_that_are_not_finite_are_divergence():
    for trainer in (_with("2.bias", torch.full((3,), torch.nan)), _wrong(lambda m: (m, float("nan")))):
        with pytest.raises(tw.Diverged, match="round 1: trainer returned"):
            tw.simulate(network(), clients(1), rounds=1, trainer=trainer)


def test_changes_of_what_is_not_trained_are_refused():
    method = tw.Method(space=tw.spaces.Route((("2.*", tw.spaces.Full()), ("*", tw.spaces.Frozen()))))
    with pytest.raises(tw.ConfigError, match=r"changed '0.weight', which this method does not train"):
        tw.simulate(network(), clients(1), method, rounds=1, trainer=_changes_frozen)
    model = network()
    model[0].weight.requires_grad_(False)
    with pytest.raises(tw.ConfigError, match=r"changed '0.weight'"):
        tw.simulate(model, clients(1), rounds=1, trainer=_changes_frozen)


def test_parts_that_need_every_step_are_refused_with_the_reason():
    for method, text in (
        (tw.methods.scaffold(), "corrects each local step"),
        (tw.Method(penalty=tw.optimizers.L1L2(l1=0.1)), "loss"),
    ):
        with pytest.raises(tw.IncompatibleParts, match=text):
            tw.simulate(network(), clients(1), method, trainer=fit)
    with pytest.raises(tw.ConfigError, match="write backend = 'auto'"):
        tw.simulate(network(), clients(1), trainer=fit, backend="vmap")
    with pytest.raises(tw.ConfigError, match="cannot be called: missing a required argument: 'epochs'"):
        tw.simulate(network(), clients(1), trainer=lambda model, records, epochs: model)
    with pytest.raises(tw.ConfigError, match="trainer must be a function"):
        tw.Local(trainer="fit")


FILE = """
import torch

def fit(model, records, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in records.batches():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_trainer_by_reference_is_a_setting_of_files_whose_digest_has_no_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "run.toml").write_text('[method]\nkind = "fedavg"\n[local]\ntrainer = "mine.py:fit"\n')
    monkeypatch.chdir(tmp_path)
    by_file = tw.resolve("run.toml", "digits")
    by_option = tw.resolve("fedavg", "digits", {"local.trainer": "mine.py:fit"})
    assert by_file.local.trainer == by_option.local.trainer == f"{tmp_path}/mine.py:fit"
    assert digest(by_option) == digest(tw.resolve("fedavg", "digits", {"local.trainer": f"{tmp_path}/mine.py:fit"}))


def test_the_command_line_trains_with_a_trainer_and_says_on_one_line_what_is_wrong(thinwire, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    few = ("--rounds", "1", "--set", "cohort.size=2", "--set", "local.steps=2", "-q")
    code, out, err = thinwire("run", "lora+int8", *few, "--set", "local.trainer=mine.py:fit", "--out", "here", "--json")
    assert code == 0, err
    assert json.loads(out)["rounds"] == 1
    assert 'trainer = "' in (tmp_path / "here/config.toml").read_text()
    assert "a trainer of one's own" in (tmp_path / "here/environment.json").read_text()
    code, out, err = thinwire("run", "fedavg", *few, "--set", "local.trainer=mine.py:fitt", "--out", "there")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "did you mean 'fit'?" in err
    assert not (tmp_path / "there").exists()


def test_an_app_for_flower_contains_the_file_of_the_trainer(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    experiment = tw.resolve("fedavg", "digits", {"local.trainer": f"{tmp_path}/mine.py:fit"})
    files = {file.name: file for file in write_app(experiment, tmp_path / "app")}
    assert files["own_trainer.py"].read_text() == FILE
    again = read_experiment(files["experiment.toml"])
    assert again.local.trainer == f"{files['own_trainer.py']}:fit"
    assert str(tmp_path / "mine.py") not in files["experiment.toml"].read_text()


def test_random_numbers_of_a_trainer_are_those_of_seed_round_and_client():
    drawn = []

    def draws(model, records, seed):
        drawn.append((seed, random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002

    for _ in range(2):
        tw.simulate(network(), clients(2), rounds=2, trainer=draws)
    assert drawn[:4] == drawn[4:]
    assert len({one[1:] for one in drawn}) == 4
