"""Searches on real runs: the learning rate, several settings, FLASC-S, methods; the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import thinwire as tw
from thinwire.cli.app import app
from thinwire.core.text import human_bytes
from thinwire.errors import ConfigError
from thinwire.federation.simulation import make_simulation
from thinwire.metrics.objective import Objective
from thinwire.runs.build import build_job
from thinwire.runs.collapse import Chance, validation_chance
from thinwire.runs.config import resolve
from thinwire.runs.jobs import Jobs
from thinwire.runs.probe import rate_key
from thinwire.runs.records import SearchRecord, read_run, read_search, write_search
from thinwire.search.trials import ValidationRuns, held_out, over, trial_of
from thinwire.search.tune import NothingTrains

SMALL = {"rounds": 8, "clients": 10, "cohort": 2}
QUICK = {"local.steps": 8, "eval.every": 8}
SETTINGS = {"rounds": 8, "task.clients": 10, "cohort.size": 2, "seed": 100, **QUICK}


def tune(method, out, overrides=(), **options):
    return tw.tune(method, "digits", out=out, set={**QUICK, **dict(overrides)}, **{**SMALL, **options})


def test_the_searched_rate_is_the_one_that_decides_the_step():
    server = {"evofed", "fedadam", "fedyogi", "fedadagrad", "full", "dp-fedadam"}
    for name in (*server, "fedavg", "mapo", "thin", "fedavgm", "lora", "flasc", "topk+int4"):
        assert rate_key(resolve(name)) == f"method.{'server' if name in server else 'client'}_opt.lr"


def test_the_criterion_is_the_accuracy_on_validation_examples_and_the_search_beats_bad_rates(tmp_path):
    tuned = tune("fedavg", tmp_path, rates=4, overrides={"method.client_opt.lr": 0.01})
    ((_, found),) = tuned.best.point
    assert found > 0.08, "the ladder has 0.005 to 0.04, and is extended upward"
    assert tuned.seed == 100
    assert "10 % of each client's examples" in tuned.chosen_by
    runs = [read_run(folder) for folder in tmp_path.iterdir()]
    by_run = {(run.records[0]["lr"], len(run.records)): run for run in runs}
    for rung in tuned.rungs:
        for trial in rung:
            run = by_run[trial.point[0][1], trial.rounds]
            assert trial.bytes == run.summary["bytes_total_honest"] > 0
            assert trial.value == run.summary["final_client_accuracy"] != run.summary["final_accuracy"]
            assert trial.loss == run.records[-1]["client_loss"] != run.records[-1]["test_loss"]
    assert tuned.rungs[-1][-1].point == tuned.start == (("lr", 0.01),)
    assert tuned.bytes == sum(run.summary["bytes_total_honest"] for run in runs)
    assert tuned.record.rungs == tuple((len(rung), rung[0].rounds) for rung in tuned.rungs)
    assert tuned.experiment.seed == 0 == tuned.experiment.task.validation_fraction, "the final run has all examples"


def test_a_stopped_search_continues(tmp_path):
    def stop(experiment, trial):
        raise KeyboardInterrupt

    whole = tune("fedavg", tmp_path / "whole", rates=2)
    with pytest.raises(KeyboardInterrupt):
        tune("fedavg", tmp_path / "part", rates=2, on_trial=stop)
    done = {file: file.stat().st_mtime_ns for file in (tmp_path / "part").glob("*/summary.json")}
    assert len(done) == 1
    again = tune("fedavg", tmp_path / "part", rates=2)
    assert again.rungs == whole.rungs
    assert all(file.stat().st_mtime_ns == time for file, time in done.items())


def test_several_settings(tmp_path):
    seen = []
    more = {"overrides": {"method.client_opt.lr": 0.02}, "rounds": 4}
    over = {"lr": [0.1, 0.3], "batch": [16, 32]}
    tuned = tune("fedavg", tmp_path, over=over, on_trial=lambda experiment, trial: seen.append(trial), **more)
    assert seen == tuned.trials
    assert tuned.method.client_opt.lr == tuned.settings.get("method.client_opt.lr", 0.02)
    assert [(len(rung), rung[0].rounds) for rung in tuned.rungs] == [(4, 1), (2, 2), (2, 4)]
    assert seen[-1].point == tuned.start, "the start setting is no candidate: it is run last"
    assert len(tuned.cells().rows) == 8
    lines = repr(tuned).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{tuned.best.name} over 4 rounds: ")
    with pytest.raises(
        NothingTrains,
        match=r"none of 2 settings of method.client_opt.lr trains fedavg on digits in 2 rounds \(2 diverged\)",
    ):
        tune("fedavg", tmp_path, over={"lr": [1e20, 1e30]}, **more)


def test_flasc_s_on_real_runs(tmp_path):
    values = {"rank": [1, 2, 4], "density": [0.5, 1]}
    tuned = tune("flasc", tmp_path, over=values, flasc_s=True, rounds=3, validation_fraction=0.2)
    (rung,) = tuned.rungs
    *trials, start = rung
    assert {trial.point[0] for trial in trials} == {("rank", 1), ("rank", 2), ("rank", 4)}
    assert len(trials) < 6, "fewer runs than a grid has"
    assert start.point == tuned.start == (("rank", 8), ("density", 0.25))
    assert rung[0].point == (("rank", 1), ("density", 1.0))
    assert tuned.best.value == max(trial.value for trial in rung)
    for wrong in ({"rank": [1, 4]}, {"rank": [4, 1], "density": [1]}, {"rank": [1], "density": [0.5, 1]}):
        with pytest.raises(ConfigError, match="--flasc-s searches two settings with ascending values"):
            tune("flasc", tmp_path, over=wrong, flasc_s=True)


def test_the_best_method_within_some_bytes(tmp_path):
    methods = ["fedavg", "mapo"]
    within = tune(methods, tmp_path, bytes="150kB")
    assert within.best.point[0][1] in methods
    assert within.best.bytes <= 150_000
    assert within.settings == {"rounds": within.best.rounds}
    assert within.experiment.rounds == within.best.rounds
    fedavg = [trial for trial in within.trials if trial.point == (("method", "fedavg"),)]
    assert max(one.rounds for one in fedavg) < 8, "so many rounds fit"
    sizes = tune("mapo", tmp_path, over={"k": [64, 1024]}, bytes=60_000)
    assert all(one.bytes <= 66_000 for one in sizes.trials), "settings within some bytes: fewer rounds of the larger"
    assert sizes.settings["rounds"] == sizes.best.rounds
    with pytest.raises(NothingTrains, match="one round of each of 2 candidates sends more than 10 B"):
        tune(methods, tmp_path, rounds=4, bytes=10)


def test_what_cannot_be_searched_is_refused(tmp_path):
    for wrong, message in (
        ({"over": {"rounds": [4, 8]}}, "runs of different lengths on one seed, so rounds is not searched"),
        ({"over": {"method.up": [{"kind": "raw"}]}}, "on one seed, so method.up is not searched"),
        ({"over": {"lr": [0.1 * i for i in range(1, 66)]}}, "at most 64 settings, not 65"),
        ({"over": {"lr": [0.1, 0.2, 0.3]}, "rounds": 3}, "3 candidates are searched in 3 rungs"),
        ({"bytes": "1MB", "over": {"lr": [0.1]}, "flasc_s": True}, "also with --bytes; leave one of them out"),
        ({"bytes": 0}, "--bytes is 1 or more"),
        ({"spead": 3}, "unknown option spead; write one of rounds, clients, cohort"),
    ):
        with pytest.raises(ConfigError, match=message):
            tune("fedavg", tmp_path, **wrong)
    with pytest.raises(ConfigError, match="one method is tuned, or several for"):
        tune(["fedavg", "mapo"], tmp_path)
    assert not list(tmp_path.iterdir())


# -- validation runs -------------------------------------------------------------------------------------------------


def test_the_chance_of_validation_examples_is_that_of_a_constant_prediction():
    experiment = held_out(resolve("fedavg", "digits", SETTINGS), 0.1)
    simulation = make_simulation(experiment.engine, build_job(experiment))
    chance = validation_chance(simulation)
    task = simulation.job.task
    own = [task.train.targets[task.client_tests.client(i)] for i in range(10)]
    shares = [sum((labels == c).double().mean().item() for labels in own) / 10 for c in range(10)]
    assert chance.share == pytest.approx(max(shares))
    assert chance.metric == "client_accuracy"
    private = held_out(resolve("local", "digits", SETTINGS), 0.1)
    assert validation_chance(make_simulation(private.engine, build_job(private))).share > chance.share
    plain = resolve("fedavg", "digits", SETTINGS)
    assert validation_chance(make_simulation(plain.engine, build_job(plain))) is None


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
        return read_run(tmp_path)._replace(summary={"status": status, "rounds": len(values), "bytes_total_honest": 3})

    by = Objective()
    assert trial_of((), ran([0.2] * 5), chance, by).status == "at chance so far"
    assert trial_of((), ran([0.2] * 12), chance, by).status == "at chance"
    assert trial_of((), ran([0.2, 0.8, 0.2]), chance, by).status == "collapsed"
    assert trial_of((), ran([0.8] * 3, "diverged"), chance, by).status == "diverged"
    assert trial_of((), ran([0.8] * 3, "at chance"), chance, by).status == "finished", "that status is of the test set"
    assert trial_of((), ran([0.5] * 20 + [0.6, 0.7, 0.8]), chance, by).value == pytest.approx(0.7), "the last tenth"
    with pytest.raises(ConfigError, match="no accuracy and no loss on validation examples"):
        trial_of((), ran([]), chance, by)


def test_counts_of_rounds_keep_their_fraction_of_the_run(tmp_path):
    schedule = {"kind": "multistep", "at": [20, 60], "by": 0.1}
    experiment = resolve("fedavg", "digits", {"rounds": 80, "method.lr_schedule": schedule})
    assert over(experiment, 16).method.lr_schedule.at == (4, 12)
    assert over(experiment, 80) is experiment
    cosine = resolve("fedavg", "digits", {"rounds": 80, "method.lr_schedule": {"kind": "cosine", "rounds": 80}})
    assert over(cosine, 20).method.lr_schedule.rounds == 20
    # neither a target on the test set nor a second stage ends a run of the search
    settings = {**SETTINGS, "method.next_stage.at": 4, "eval.target_accuracy": 0.01}
    staged = resolve("slora", "digits", settings)
    runs = ValidationRuns(over(staged, 4), 0.1, tmp_path)
    lengths = {(("rounds", rounds),): over(staged, rounds) for rounds in (4, 8)}
    assert [trial.rounds for trial in runs.measure(lengths, Jobs())] == [4, 8]


def test_a_search_record_that_is_damaged_is_ignored(tmp_path):
    record = SearchRecord("method.client_opt.lr", 0.5, (0.25, 0.5), ((2, 4), (1, 8)), 100, "accuracy", 16, 900)
    write_search(tmp_path, record)
    assert read_search(tmp_path) == record
    assert record.at_end
    text = (tmp_path / "search.json").read_text()
    for damaged in ("", "[]", text.replace("900", '"x"'), text.replace("rungs", "steps"), text.replace("0.25", "null")):
        (tmp_path / "search.json").write_text(damaged)
        assert read_search(tmp_path) is None
    assert read_search(tmp_path / "absent") is None


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
    assert [{trial["rounds"] for trial in rung} for rung in facts["rungs"]] == [{2}, {4}, {8}]
    trials = [trial for rung in facts["rungs"] for trial in rung]
    assert facts["bytes_of_the_search"] == sum(trial["bytes"] for trial in trials) > 0
    assert facts["rounds_of_the_search"] == sum(trial["rounds"] for trial in trials)
    assert (facts["seed"], facts["searched"]) == (100, ["method.client_opt.lr"])
    assert facts["command"] == (
        f"thinwire run fedavg --on digits --rounds 8 --clients 10 --cohort 2 --set local.steps=8 --set eval.every=8 "
        f"--set method.client_opt.lr={facts['lr']}"
    )
    text = call(*words).stdout
    assert text.count("finished") + text.count("at chance so far") == len(trials)
    assert facts["command"] in text
    assert human_bytes(facts["bytes_of_the_search"]) in text
    run = call(*facts["command"].split()[1:], "--json", "--out", str(tmp_path / "final"), "-q")
    assert json.loads(run.stdout)["seed"] == 0, "not the seed of the search"


def test_the_command_recommends_a_method(tmp_path):
    words = ["tune", "fedavg", "mapo", *WORDS, "--out", str(tmp_path), "--bytes", "200kB"]
    text = call(*words).stdout
    facts = json.loads(call(*words, "--json").stdout)
    assert facts["command"] in text
    assert facts["command"].startswith(f"thinwire run {facts['method']} --on digits ")
    assert facts["command"].endswith(f"--set rounds={facts['best']['rounds']}")
    run = json.loads(call(*facts["command"].split()[1:], "--json", "--out", str(tmp_path / "final"), "-q").stdout)
    assert run["bytes_total"] < 1.1 * 200_000


def test_if_no_rate_trains_the_command_says_so_in_one_line(tmp_path):
    words = ["tune", "fedavg", *WORDS, "--rates", "2", "--out", str(tmp_path), "-q"]
    done = call(*words, "--set", "method.client_opt.lr=1e20", code=1)
    assert done.stderr.count("\n") == 1
    assert "none of 3 settings of method.client_opt.lr trains fedavg on digits in 4 rounds (3 diverged)" in done.stderr
    assert "thinwire run" not in done.stdout


def test_a_comparison_searches_every_method_as_tune_does(tmp_path):
    page = tmp_path / "page.html"
    words = ["compare", "fedavg", "fedadam", *WORDS, "--seeds", "2", "--tune", "--tune-rates", "2"]
    words += ["--out", str(tmp_path / "runs"), "--html", str(page), "-q"]
    rows = json.loads(call(*words, "--json").stdout)
    searches = {row["method"]: row["search"] for row in rows}
    assert searches["fedavg"]["setting"] == "method.client_opt.lr"
    assert searches["fedadam"]["setting"] == "method.server_opt.lr"
    for row in rows:
        search = row["search"]
        assert (search["seed"], search["rungs"][0]) == (100, [3, 4]), "of two rates the best is at an end"
        assert search["rungs"][1][1] == 8
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
        for words_of_it in ("on seed 100", "10 % of each client", "method.server_opt.lr", "3 x 4 + "):
            assert words_of_it in shown
    assert page.read_text() == before
    call("report", str(tmp_path / "runs"), "--html", str(tmp_path / "later.html"))
    assert "Searches by successive halving" in (tmp_path / "later.html").read_text()


def test_the_seed_of_the_search_is_not_one_of_the_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "fedavg", *WORDS, "--tune", "--seed", "99", "--seeds", "3"]
    with pytest.raises(
        ConfigError, match=r"100, is among the seeds of the comparison, 99 to 101; write --tune-seed 102"
    ):
        call(*words)
    assert not list(Path().iterdir())
