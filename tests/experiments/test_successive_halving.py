"""Successive halving over artificial measures, and the search for a learning rate on real runs."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.chance import validation_chance
from thinwire.experiments.collapse import Chance
from thinwire.experiments.config import resolve
from thinwire.experiments.search_record import SearchRecord, read_search, write_search
from thinwire.experiments.successive_halving import Measured, ladder, plan, successive_halving
from thinwire.experiments.trials import Ran, Spent, Trials
from thinwire.experiments.tune_rate import RateSearch, rate_key, tune_rate
from thinwire.experiments.validation_runs import held_out, measured, over

SMALL = {"rounds": 8, "task.clients": 10, "cohort.size": 2, "local.steps": 8, "eval.every": 8, "seed": 100}
RATES = ladder(1.0, 8)  # 1/8 to 16


def counted(accuracy, status=lambda rate, rounds: "finished", loss=lambda rate: 0.0):
    calls = []

    def measure(rate, rounds):
        calls.append((rate, rounds))
        return Measured(accuracy(rate), loss(rate), 10 * rounds, rounds, status(rate, rounds))

    return measure, calls


def closeness(best):
    return lambda rate: 1 / (1 + abs(rate - best))


# -- the search over any measure -------------------------------------------------------------------------------------


def test_each_rung_keeps_the_better_half_and_doubles_the_rounds():
    measure, calls = counted(closeness(4.0))
    rungs = []
    found = successive_halving(measure, RATES, 40, on_rung=rungs.append)
    assert found.value == 4.0
    assert [(len(rung.trials), rung.rounds) for rung in found.rungs] == [(8, 5), (4, 10), (2, 20), (1, 40)]
    assert [rung.kept for rung in found.rungs] == [(4.0, 2.0, 1.0, 0.5), (4.0, 2.0), (4.0,), ()]
    assert calls[0] == (1.0, 5), "the method's own rate is tried first"
    assert tuple(rungs) == found.rungs
    assert found.rounds == sum(rounds for _, rounds in calls) == 4 * 40
    assert found.bytes == 10 * found.rounds
    assert not found.at_end
    assert not found.stopped


@pytest.mark.parametrize(("best", "expected"), [(64.0, 64.0), (1 / 64, 1 / 64), (1e9, 256.0), (1e-9, 2.0**-7)])
def test_a_best_rate_at_an_end_extends_the_ladder_there_up_to_a_bound(best, expected):
    measure, calls = counted(lambda rate: -abs(torch.tensor(rate / best).log2().item()))
    found = successive_halving(measure, RATES, 40, extend=4)
    assert found.value == expected
    assert found.at_end == (best in (1e9, 1e-9))
    assert len([rate for rate, rounds in calls if rounds == 5]) <= 12
    assert [len(rung.trials) for rung in found.rungs[1:]] == [4, 2, 1], "later rungs cost the same"
    assert list(found.tried) == sorted(found.tried)
    fixed = successive_halving(measure, RATES, 40)
    assert (fixed.value, fixed.at_end) == (16.0 if best > 1 else 0.125, True)


def test_if_all_rates_fail_nothing_is_found_and_smaller_ones_are_tried_first():
    measure, calls = counted(closeness(1.0), lambda rate, rounds: "diverged")
    found = successive_halving(measure, RATES, 40, extend=4)
    assert found.value is None
    assert len(found.rungs) == 1
    assert min(found.tried) == 0.125 / 16
    assert len(calls) == 12
    # a smaller rate than the ladder has works
    measure, _ = counted(closeness(1.0), lambda rate, rounds: "finished" if rate < 0.1 else "diverged")
    assert successive_halving(measure, RATES, 40, extend=4).value == 0.0625


def test_a_rate_that_fails_in_a_longer_rung_is_out():
    # the larger rates are the best of short runs and collapse in long ones
    measure, _ = counted(closeness(16.0), lambda rate, rounds: "collapsed" if rate * rounds > 100 else "finished")
    found = successive_halving(measure, RATES, 40)
    assert [trial.value for trial in found.rungs[1].trials] == [2.0, 4.0, 8.0, 16.0]
    assert found.rungs[1].kept == (8.0, 4.0)
    assert found.rungs[2].kept == (4.0,)
    assert found.rungs[3].trials[0].failed
    assert found.value == 2.0, "the best that never failed; it is of the second rung"


@pytest.mark.parametrize("status", ["at chance", "at chance so far"])
def test_a_rate_at_chance_is_never_the_result(status):
    measure, calls = counted(closeness(1.0), lambda rate, rounds: status)
    assert successive_halving(measure, RATES, 40).value is None
    assert len(calls) == (8 if status == "at chance" else 15), "a short run may go on"


def test_ties_are_decided_by_loss_then_by_bytes():
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: abs(rate - 0.5))
    assert successive_halving(measure, RATES, 40).value == 0.5
    nan = float("nan")
    measure, _ = counted(lambda rate: 0.9, loss=lambda rate: 3.0 if rate == 2.0 else nan)
    assert successive_halving(measure, RATES, 40).value == 2.0
    found = successive_halving(lambda rate, rounds: Measured(0.9, 1.0, int(abs(rate - 8) * 9), rounds), RATES, 40)
    assert found.value == 8.0
    measure, _ = counted(  # accuracies at chance are noise
        lambda rate: 0.11 if rate == 1.0 else 0.1,
        lambda rate, rounds: "at chance so far" if rounds < 40 else "finished",
        lambda rate: abs(rate - 4),
    )
    assert successive_halving(measure, RATES, 40).value == 4.0
    regression = successive_halving(lambda rate, rounds: Measured(None, abs(rate - 4), 1, rounds), RATES, 40)
    assert regression.value == 4.0


def test_a_spent_budget_returns_the_best_so_far():
    def within(limit):
        spent = 0

        def measure(rate, rounds):
            nonlocal spent
            if spent + 10 * rounds > limit:
                raise Spent(limit - spent + 1, 2)
            spent += 10 * rounds
            return Measured(closeness(2.0)(rate), 0.0, 10 * rounds, rounds)

        return successive_halving(measure, RATES, 40)

    first = within(5 * 50)  # in the first rung: the rates around the middle
    assert first.stopped
    assert first.tried == (0.25, 0.5, 1.0, 2.0, 4.0)
    assert (first.value, first.bytes, first.rounds) == (2.0, 251, 27)
    second = within(8 * 50 + 100)  # the best of the first rung is the first of the second
    assert [len(rung.trials) for rung in second.rungs] == [8, 1]
    assert second.value == 2.0
    with pytest.raises(ConfigError, match="before one run finished"):
        within(10)
    assert not within(10_000).stopped


def test_numbers_that_cannot_be_searched_are_refused():
    for rates in ((1.0,), (2.0, 1.0), (0.0, 1.0), (1.0, float("inf"))):
        with pytest.raises(ConfigError, match="ascending"):
            successive_halving(lambda rate, rounds: Measured(0.0, 0.0, 0, 1), rates, 40)
    with pytest.raises(ConfigError, match="the last needs 8 rounds or more, not 7"):
        plan(8, 7)
    for count in (1, 65):
        with pytest.raises(ConfigError, match="from 2 to 64 rates"):
            ladder(1.0, count)
    assert ladder(0.3, 3) == (0.15, 0.3, 0.6)


# -- learning rates of real runs -------------------------------------------------------------------------------------


def test_the_searched_rate_is_the_one_that_decides_the_step():
    server = {"evofed", "fedadam", "fedyogi", "fedadagrad", "flasc", "dp-fedadam"}
    for name in (*server, "fedavg", "mapo", "thin", "fedavgm", "lora", "ef+topk+int4"):
        assert rate_key(resolve(name)) == f"method.{'server' if name in server else 'client'}_opt.lr"


def test_the_criterion_is_the_accuracy_on_validation_examples_and_the_search_beats_bad_rates(tmp_path):
    experiment = resolve("fedavg", "digits", {**SMALL, "method.client_opt.lr": 0.01})
    found = tune_rate(experiment, RateSearch(rates=4), out=tmp_path)
    assert found.key == "method.client_opt.lr"
    assert found.found.value > 0.08, "the ladder has 0.005 to 0.04, and is extended upward"
    assert found.seed == 100
    assert "10 % of each client's examples" in found.chosen_by
    by_run = {}
    for folder in tmp_path.iterdir():
        totals = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        by_run[lines[0]["lr"], totals["rounds"]] = totals, lines
    for rung in found.found.rungs:
        for trial in rung.trials:
            totals, lines = by_run[trial.value, rung.rounds]
            assert trial.measured.bytes == totals["bytes_total_honest"] > 0
            assert trial.measured.rounds == rung.rounds
            assert trial.measured.accuracy == totals["final_client_accuracy"] != totals["final_accuracy"]
            assert trial.measured.loss == lines[-1]["client_loss"] != lines[-1]["test_loss"]
    assert found.found.bytes == sum(totals["bytes_total_honest"] for totals, _ in by_run.values())
    assert found.found.rounds == sum(totals["rounds"] for totals, _ in by_run.values())
    assert found.record().rungs == tuple((len(rung.trials), rung.rounds) for rung in found.found.rungs)
    final = found.applied(resolve("fedavg", "digits", {"seed": 3}))
    assert (final.method.client_opt.lr, final.seed) == (found.found.value, 3)
    assert final.task.validation_fraction == 0, "the final run trains on all examples"


def test_a_stopped_search_continues(tmp_path):
    experiment, search = resolve("fedavg", "digits", SMALL), RateSearch(rates=2, extend=0)
    whole = tune_rate(experiment, search, out=tmp_path / "whole")
    first = whole.found.rungs[0].trials[0].measured.bytes
    part = tune_rate(experiment, search, budget=first + 10, out=tmp_path / "part")
    assert part.found.stopped
    assert first < part.found.bytes <= first + whole.found.rungs[0].trials[1].measured.bytes
    done = {file: file.stat().st_mtime_ns for file in (tmp_path / "part").glob("*/summary.json")}
    assert len(done) == 1
    again = tune_rate(experiment, search, budget=whole.found.bytes, out=tmp_path / "part")
    assert again == whole
    assert all(file.stat().st_mtime_ns == time for file, time in done.items())


def test_the_chance_of_validation_examples_is_that_of_a_constant_prediction():
    experiment = held_out(resolve("fedavg", "digits", SMALL), 0.1)
    simulation = experiment.engine.prepare(build_job(experiment))
    chance = validation_chance(simulation)
    task = simulation.job.task
    own = [task.train.targets[task.client_tests.client(i)] for i in range(10)]
    shares = [sum((labels == c).double().mean().item() for labels in own) / 10 for c in range(10)]
    assert chance.share == pytest.approx(max(shares))
    assert chance.metric == "client_accuracy"
    private = held_out(resolve("local", "digits", SMALL), 0.1)
    assert validation_chance(private.engine.prepare(build_job(private))).share > chance.share
    plain = resolve("fedavg", "digits", SMALL)
    assert validation_chance(plain.engine.prepare(build_job(plain))) is None


def test_a_run_is_judged_by_validation_examples_alone(tmp_path):
    chance = Chance(0.2, 200, 10, "client_accuracy")

    def ran(values, status="finished"):
        lines = [
            {"round": i + 1, "loss": 1.0, "accuracy": 0.9, "client_accuracy": value, "client_loss": 0.5, "seconds": 0.0}
            | dict.fromkeys(("bytes_up", "bytes_down", "bytes_catchup", "clients"), 1)
            for i, value in enumerate(values)
        ]
        (tmp_path / "config.toml").write_text("rounds = 40\n")
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Ran(tmp_path, {"status": status, "rounds": len(values), "bytes_total_honest": 3})

    assert measured(ran([0.2] * 5), chance).status == "at chance so far"
    assert measured(ran([0.2] * 12), chance).status == "at chance"
    assert measured(ran([0.2, 0.8, 0.2]), chance).status == "collapsed"
    assert measured(ran([0.8] * 3, "diverged"), chance).status == "diverged"
    assert measured(ran([0.8] * 3, "at chance"), chance).status == "finished", "that status is of the test set"
    assert measured(ran([0.5] * 20 + [0.6, 0.7, 0.8]), chance).accuracy == pytest.approx(0.7), "the last tenth"
    with pytest.raises(ConfigError, match="no accuracy and no loss on validation examples"):
        measured(ran([]), chance)


def test_counts_of_rounds_keep_their_fraction_of_the_run():
    schedule = {"kind": "multistep", "at": [20, 60], "by": 0.1}
    experiment = resolve("fedavg", "digits", {"rounds": 80, "method.lr_schedule": schedule})
    assert over(experiment, 16).method.lr_schedule.at == (4, 12)
    assert over(experiment, 80) is experiment
    cosine = resolve("fedavg", "digits", {"rounds": 80, "method.lr_schedule": {"kind": "cosine", "rounds": 80}})
    assert over(cosine, 20).method.lr_schedule.rounds == 20
    staged = tune_rate(resolve("slora", "digits", {**SMALL, "method.next_stage.at": 4}), RateSearch(rates=2, extend=0))
    assert staged.found.rounds == 4 + 4 + 8


def test_a_target_on_the_test_set_does_not_end_a_run_of_the_search(tmp_path):
    experiment = resolve("fedavg", "digits", {**SMALL, "eval.target_accuracy": 0.01})
    found = tune_rate(experiment, RateSearch(rates=2, extend=0), out=tmp_path)
    assert found.found.rounds == 4 + 4 + 8


def test_trials_count_the_bytes_of_all_runs(tmp_path):
    experiment = resolve("fedavg", "digits", SMALL)
    trials = Trials(tmp_path)
    once, twice = trials.run(experiment), trials.run(experiment)
    assert once == twice
    assert trials.spent == 2 * once.bytes
    with pytest.raises(Spent) as spent:
        Trials(tmp_path, budget=once.bytes - 1).run(experiment)
    assert (spent.value.lost, spent.value.rounds) == (once.bytes, 8)


# -- the command line ------------------------------------------------------------------------------------------------

WORDS = ["--on", "digits", "--rounds", "8", "--clients", "10", "--cohort", "2"]
WORDS += ["--set", "local.steps=8", "--set", "eval.every=8"]


def call(*words, code=0):
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def test_the_command_prints_every_rung_its_cost_and_the_command_to_run(tmp_path):
    words = ["tune", "fedavg", *WORDS, "--rates", "4", "--out", str(tmp_path)]
    facts = json.loads(call(*words, "--json").stdout)
    assert [rung["rounds"] for rung in facts["rungs"]] == [2, 4, 8]
    trials = [trial for rung in facts["rungs"] for trial in rung["trials"]]
    assert facts["bytes_of_the_search"] == sum(trial["bytes"] for trial in trials) > 0
    assert facts["rounds_of_the_search"] == sum(trial["rounds"] for trial in trials)
    assert facts["seed"] == 100
    assert facts["searched"] == "method.client_opt.lr"
    rate = facts["value"]
    assert facts["command"] == (
        f"thinwire run fedavg --on digits --rounds 8 --clients 10 --cohort 2 --set local.steps=8 --set eval.every=8 "
        f"--set method.client_opt.lr={rate}"
    )
    text = call(*words).stdout
    assert text.count("rung ") == 3
    assert "goes on" in text
    assert facts["command"] in text
    assert f"{facts['bytes_of_the_search']:,}" in text
    run = call(*facts["command"].split()[1:], "--json", "--out", str(tmp_path / "final"), "-q")
    assert json.loads(run.stdout)["seed"] == 0, "not the seed of the search"


def test_if_no_rate_trains_the_command_says_so_in_one_line(tmp_path):
    words = ["tune", "fedavg", *WORDS, "--rates", "2", "--out", str(tmp_path), "-q"]
    done = call(*words, "--set", "method.client_opt.lr=1e20", code=1)
    assert done.stderr.count("\n") == 1
    assert "no method.client_opt.lr from 5e+19 to 2e+20 trains fedavg on digits in 4 rounds (3 diverged)" in done.stderr
    assert "thinwire run" not in done.stdout
    slow = call(*words, "--set", "method.client_opt.lr=1e-9", code=1)
    assert "at chance" in slow.stderr


def test_a_comparison_searches_every_method_with_the_same_budget(tmp_path):
    page = tmp_path / "page.html"
    words = ["compare", "fedavg", "fedadam", *WORDS, "--seeds", "2", "--tune", "--tune-rates", "4"]
    words += ["--out", str(tmp_path / "runs"), "--html", str(page), "-q"]
    rows = json.loads(call(*words, "--json").stdout)
    searches = {row["method"]: row["search"] for row in rows}
    assert searches["fedavg"]["setting"] == "method.client_opt.lr"
    assert searches["fedadam"]["setting"] == "method.server_opt.lr"
    for row in rows:
        search = row["search"]
        assert (search["seed"], search["rungs"], search["rounds"]) == (100, [[4, 2], [2, 4], [1, 8]], 24)
        assert search["value"] in search["tried"]
        assert search["bytes"] > row["bytes_total_honest"]
        assert row["seeds"] == 2
    runs = list((tmp_path / "runs").glob("*/config.toml"))
    assert len(runs) == 4, "the runs of the search are in a folder of their own"
    for run in runs:
        record = read_search(run.parent)
        assert record.value == searches[run.parent.name.split("-")[0]]["value"]
        assert "validation_fraction = 0.0" in run.read_text()
    before = page.read_text()
    text = call(*words).stdout
    for shown in (text, before):
        for words_of_it in ("on seed 100", "10 % of each client", "method.server_opt.lr", "4 x 2 + 2 x 4 + 1 x 8"):
            assert words_of_it in shown
    assert page.read_text() == before
    call("report", str(tmp_path / "runs"), "--html", str(tmp_path / "later.html"))
    assert "Searched settings" in (tmp_path / "later.html").read_text()


def test_the_seed_of_the_search_is_not_one_of_the_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "fedavg", *WORDS, "--tune", "--seed", "99", "--seeds", "3"]
    with pytest.raises(
        ConfigError, match=r"100, is among the seeds of the comparison, 99 to 101; write --tune-seed 102"
    ):
        call(*words)
    assert not list(Path().iterdir())


def test_a_search_record_that_is_damaged_is_ignored(tmp_path):
    record = SearchRecord("method.client_opt.lr", 0.5, (0.25, 0.5), ((2, 4), (1, 8)), 100, "accuracy", 16, 900)
    write_search(tmp_path, record)
    assert read_search(tmp_path) == record
    assert record.at_end
    text = (tmp_path / "search.json").read_text()
    for damaged in ("", "[]", text.replace("900", '"x"'), text.replace("[2, 4]", "[2]"), text.replace("0.25", "null")):
        (tmp_path / "search.json").write_text(damaged)
        assert read_search(tmp_path) is None
    assert read_search(tmp_path / "absent") is None
