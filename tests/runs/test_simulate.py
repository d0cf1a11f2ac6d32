"""`tw.simulate` with a Method, a method expression and an experiment file; and the round loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.core.tree import same
from thinwire.errors import ConfigError
from thinwire.federation.federation import Federation
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.config import resolve
from thinwire.runs.execute import execute
from thinwire.runs.records import rounds_in
from thinwire.runs.run_directory import RunFolder


def data(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    clients = [(torch.randn(24, 4, generator=generator), torch.arange(24) % 3) for _ in range(4)]
    return clients, (torch.randn(120, 4, generator=generator), torch.arange(120) % 3)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(4, 3)


FILE = """\
method = "fedprox+int8"
rounds = 3
seed = 7

[task]
kind = "digits"

[cohort]
size = 2

[local]
epochs = 2
batch = 8

[eval]
every = 2

[engine]
backend = "loop"
"""


def test_a_file_an_expression_and_a_method_give_the_same_run(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(FILE)
    clients, test = data()
    given = {
        "rounds": 3,
        "seed": 7,
        "cohort": 2,
        "local": tw.Local(2, 8),
        "eval_every": 2,
        "backend": "loop",
        "lr": 0.1,
    }
    by_file = tw.simulate(model(), clients, str(file), test=test, lr=0.1)
    by_name = tw.simulate(model(), clients, "fedprox+int8", test=test, **given)
    by_method = tw.simulate(model(), clients, resolve("fedprox+int8", "arrays").method, test=test, **given)
    for run in (by_name, by_method):
        assert same(run.weights, by_file.weights)
        assert [r._replace(seconds=0) for r in run.history] == [r._replace(seconds=0) for r in by_file.history]
    assert [record.accuracy is None for record in by_file.history] == [True, False, False]
    assert by_file.backend == "loop"


def test_arguments_override_the_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text(FILE)
    clients, _ = data()
    run = tw.simulate(model(), clients, str(file), rounds=1, cohort=4, out=tmp_path / "run")
    assert len(run.history) == 1
    assert run.history[0].clients == 4
    table = RunFolder.open(tmp_path / "run").table
    assert (table["name"], table["seed"], table["local"]["batch"]) == ("my", 7, 8)


def test_a_file_may_state_a_method_of_its_own_and_a_target_accuracy(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        'name = "mine"\nrecipe = "paper"\n'
        '[method]\nclient_opt = { kind = "sgd", lr = 0.5 }\n[eval]\ntarget_accuracy = 0.01\n'
    )
    clients, test = data()
    run = tw.simulate(model(), clients, str(file), test=test)
    assert (run.name, len(run.history)) == ("mine", 1)


def test_the_defaults_are_fedavg_with_fifty_rounds_of_all_clients():
    clients, _ = data()
    run = tw.simulate(model(), clients)
    assert [record.clients for record in run.history] == [4] * 50


def test_invalid_methods_and_files_are_refused(tmp_path):
    clients, _ = data()
    with pytest.raises(ConfigError, match="method must be a Method, the name of one or a file"):
        tw.simulate(model(), clients, 3)
    with pytest.raises(ConfigError, match="no such experiment file"):
        tw.simulate(model(), clients, str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'"):
        tw.simulate(model(), clients, "fedavgg")
    file = tmp_path / "bad.toml"
    file.write_text("[engine]\ndevise = 'cpu'\n")
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        tw.simulate(model(), clients, str(file))


# -- the round loop ----------------------------------------------------------------------------------------------------


def small(**overrides):
    quick = {"rounds": 4, "local.epochs": 1, "cohort.size": 2, "task.clients": 4, "engine.backend": "loop"}
    return resolve("fedavg", "digits", {**quick, **overrides})


def test_the_loop_and_a_run_directory_have_the_same_records(tmp_path):
    experiment = small()
    execute(experiment, tmp_path / "run")
    federation = make_simulation(experiment.engine, build_job(experiment))
    state, records = federation.start(), []
    for _ in range(4):
        state, record = federation.round(state)
        records.append(record)
    kept = RunFolder.open(tmp_path / "run").history()
    assert [r._replace(seconds=0) for r in records] == [r._replace(seconds=0) for r in kept]


def test_the_loop_ends_at_the_target_accuracy_and_saves_the_last_round(tmp_path):
    chosen = {"rounds": 30, "checkpoint.every": 100, "eval.target_accuracy": 0.2}
    execute(small(**chosen), tmp_path / "run")
    *earlier, last = RunFolder.open(tmp_path / "run").history()
    assert all(record.accuracy < 0.2 for record in earlier)
    assert last.accuracy >= 0.2
    assert rounds_in(tmp_path / "run/checkpoints") == [last.round]


def test_an_interrupted_round_saves_the_state_before_it(tmp_path, monkeypatch):
    train = Federation.round

    def interrupted(self, state, on_message=None):
        if state.round == 2:
            raise KeyboardInterrupt
        return train(self, state, on_message)

    monkeypatch.setattr(Federation, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(small(), tmp_path / "run")
    assert rounds_in(tmp_path / "run/checkpoints") == [2]
