"""The learning rate of an own task is found by trials, and optimizers and schedules have the names of torch."""

from functools import partial

import pytest
import torch
from torch import nn

import thinwire as tw
from benchmarks.stranger_tasks import TASKS
from tests.federation import digits
from thinwire.errors import ConfigError
from thinwire.optimizers import SGD, Adam, ConstantLR, CosineLR
from thinwire.runs import probe
from thinwire.runs.config import resolve
from thinwire.runs.run import settings_of


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def simulated(method="fedavg", rounds=2, test=True, **options) -> tw.Run:
    x, y = digits()
    clients = [(x[i:1500:10], y[i:1500:10]) for i in range(10)]
    return tw.simulate(
        network(), clients, method, rounds=rounds, cohort=5, test=(x[1500:], y[1500:]) if test else None, **options
    )


@pytest.mark.parametrize("method", ["fedavg", "mapo"])
def test_a_first_program_trains_well_and_twice_alike(method):
    assert simulated(method, rounds=50, eval_every=10).accuracy >= 0.9
    once, again = simulated(method), simulated(method)
    for name, block in once.weights.items():
        assert torch.equal(block, again.weights[name])


def test_the_rate_and_its_trials_are_recorded_and_no_test_data_is_read(tmp_path):
    run, other = simulated(out=tmp_path / "run"), simulated(test=False)
    settings = run._table
    trials = settings["lr_trials"]
    assert 3 <= len(trials) <= 8
    assert len({loss for _, loss in trials}) == len(trials)
    assert settings["method"]["client_opt"]["lr"] == other._table["method"]["client_opt"]["lr"]
    assert "auto_lr" not in settings
    assert simulated(out=tmp_path / "run").accuracy == run.accuracy  # a finished run is used again


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.05}, {"set": {"method.client_opt.lr": 0.05}}, {"method": tw.Method(client_opt=SGD(0.05))}],
    ids=["lr", "set", "method"],
)
def test_a_rate_that_is_stated_is_used(options):
    table = simulated(**options)._table
    assert table["method"]["client_opt"]["lr"] == 0.05
    assert "lr_trials" not in table


def test_any_task_and_any_optimizer_can_have_a_rate_that_is_found():
    assert settings_of("fedavg", "digits", {"lr": "auto"}).auto_lr
    assert not resolve("fedavg", on="digits").auto_lr
    run = tw.run("fedadam", "digits", lr="auto", rounds=2)
    assert "lr_trials" not in run._table  # its server normalizes the update
    private = {"method.privacy": {"kind": "dp", "clip": 1.0}, "method.client_weight": "uniform"}
    assert "lr_trials" not in simulated(set=private)._table  # trials would look at the examples
    task = TASKS["causal"](1)
    run = tw.simulate(task.model, task.clients, optimizer="adam", rounds=2, cohort=4, backend="loop")
    assert run._table["method"]["client_opt"]["kind"] == "adam"
    assert 1e-4 < run._table["method"]["client_opt"]["lr"] < 0.1
    assert run.history[-1].loss < 3.2  # log 29 = 3.37 at chance


def test_a_rate_at_which_networks_die_is_not_the_best_though_it_lowers_the_loss(monkeypatch):
    # of FLASC on "tabular" on a GPU: 0.4 to 1.13 leave a network that answers the same to every input
    losses = {0.1: 2.29, 0.4: 2.15, 1.6: 2.35, 0.8: 2.16, 1.13: 2.2, 0.025: 1.6, 0.00625: 2.1}
    monkeypatch.setattr(probe, "_loss", lambda *_: 2.32)
    monkeypatch.setattr(
        probe, "_trained", lambda federation, *_: losses[float(f"{federation.job.method.client_opt.lr:.3g}")]
    )
    assert simulated()._table["method"]["client_opt"]["lr"] == 0.05


def test_optimizers_and_schedules_have_the_names_of_torch():
    def of(**options):
        return settings_of("fedavg", "digits", options).method

    assert type(of(optimizer=torch.optim.Adam).client_opt) is Adam
    momentum = of(optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9)).client_opt
    assert (momentum.lr, momentum.momentum, momentum.clip_norm) == (0.2, 0.9, 5.0)  # the recipe clips
    assert of(schedule=torch.optim.lr_scheduler.CosineAnnealingLR).lr_schedule == CosineLR()
    assert of(schedule="constant").lr_schedule == ConstantLR()
    for options, word in (
        ({"optimizer": torch.optim.LBFGS}, "lbfgs"),
        ({"optimizer": torch.optim.SGD(network().parameters())}, "torch.optim.Adam"),
        ({"schedule": lambda number: 0.1}, "'cosine'"),
        ({"lr": "fast"}, "'auto'"),
    ):
        with pytest.raises(ConfigError, match=word):
            of(**options)


def test_a_method_that_changes_one_part_keeps_the_recipe():
    part = settings_of(tw.Method(space=tw.spaces.MAPO(k=32)), "digits", {}).method
    assert part.client_opt == resolve("fedavg", on="digits").method.client_opt
    assert part.lr_schedule == resolve("fedavg", on="digits").method.lr_schedule
    assert settings_of(tw.Method(), "digits", {"recipe": "paper"}).method.lr_schedule == ConstantLR()


def test_a_run_that_still_improves_says_so():
    assert "still improving" in repr(simulated(rounds=10, lr=0.02))
    assert "still improving" not in repr(simulated(rounds=30, lr=1.0))
