"""What a search recommends is run in full, beside the setting that it started from."""

import pytest

import thinwire as tw
from thinwire.errors import ConfigError
from thinwire.experiments.confirm import confirm
from thinwire.experiments.successive_halving import Measured, halving
from thinwire.experiments.trials import Spent
from thinwire.experiments.tune_settings import NothingTrains


def measure_of(results):
    calls = []

    def measure(value, rounds):
        calls.append((value, rounds))
        if results[value] is Spent:
            raise Spent(7)
        accuracy, status = results[value]
        return Measured(accuracy, 0.5, 10, rounds, status)

    return measure, calls


@pytest.mark.parametrize(
    ("found", "start", "value", "words"),
    [
        ((0.9, "finished"), (0.8, "finished"), "a", "confirmed over 60 rounds: 90.00 %"),
        ((0.7, "finished"), (0.8, "finished"), "b", "the result is worse than the start setting over 60 rounds"),
        (
            (0.9, "collapsed"),
            (0.8, "finished"),
            "b",
            "the result fails over 60 rounds: collapsed, the start setting 80",
        ),
        ((0.9, "finished"), (0.1, "diverged"), "a", "confirmed over 60 rounds: 90.00 % (10 B), the start setting div"),
        ((0.1, "at chance so far"), (0.1, "at chance"), None, "neither trains over 60 rounds: at chance, the start"),
        (Spent, (0.8, "finished"), "a", "not confirmed over 60 rounds: the budget was spent"),
        ((0.9, "finished"), Spent, "a", "the start setting was not run"),
    ],
)
def test_the_better_of_the_two_full_runs_is_recommended(found, start, value, words):
    measure, calls = measure_of({"a": found, "b": start})
    result = confirm(measure, "a", "b", 60)
    assert result.value == value
    assert words in result.text
    assert all(rounds == 60 for _, rounds in calls)


def test_if_the_result_is_the_start_setting_there_is_one_run():
    measure, calls = measure_of({"a": (0.9, "finished")})
    assert confirm(measure, "a", "a", 60).text == "confirmed over 60 rounds: 90.00 % (10 B), which is the start setting"
    assert len(calls) == 1
    failed, _ = measure_of({"a": (0.9, "collapsed")})
    assert confirm(failed, "a", "a", 60).value is None


def test_halving_takes_candidates_of_any_kind():
    points = [(rate, k) for rate in (0.1, 0.3, 1.0) for k in (64, 128)]

    def measure(point, rounds):
        status = "diverged" if point[0] == 1.0 else "finished"
        return Measured(None, abs(point[0] - 0.3) + 1 / point[1], 10, rounds, status, "loss")

    found = halving(measure, points, 16, key=points.index)
    assert found.value == (0.3, 128)
    assert [(len(rung.trials), rung.rounds) for rung in found.rungs] == [(6, 2), (3, 4), (2, 8), (1, 16)]
    assert [trial.value for trial in found.rungs[0].trials] == points
    failing = halving(lambda point, rounds: Measured(0.9, 0.1, 1, rounds, "at chance"), points, 16, key=points.index)
    assert failing.value is None


def test_several_settings_on_real_runs(tmp_path):
    more = {"rounds": 4, "clients": 10, "cohort": 2, "out": tmp_path}
    more["overrides"] = {"method.client_opt.lr": 0.02, "local.steps": 12}
    trials = []
    tuned = tw.tune("fedavg", "digits", over={"lr": [0.1, 0.3], "batch": [16, 32]}, on_trial=trials.append, **more)
    assert tuned.experiment.seed == 0 != tuned.seed
    assert tuned.experiment.task.validation_fraction == 0
    assert tuned.method.client_opt.lr == tuned.settings["method.client_opt.lr"]
    assert [(len(rung.trials), rung.rounds) for rung in tuned.rungs] == [(4, 1), (2, 2), (1, 4)]
    assert tuned.rounds == 12
    assert trials[-1].measured == tuned.confirmation.start, "the start setting is no candidate: it is run last"
    assert len(trials) == 8
    assert tuned.bytes == sum(trial.measured.bytes for trial in trials[:7])
    assert repr(tuned).count("\n") == 3
    lines = repr(tuned).splitlines()
    assert lines[0].startswith("Tuned fedavg on digits: lr ")
    part = tw.tune("fedavg", "digits", over={"lr": [0.1, 0.3], "batch": [16, 32]}, budget=tuned.bytes // 2, **more)
    assert part.found.stopped
    assert part.confirmation.text == "not confirmed over 4 rounds: the budget was spent before"
    with pytest.raises(NothingTrains, match=r"none of 2 settings trains fedavg on digits in 2 rounds \(2 diverged\)"):
        tw.tune("fedavg", "digits", over={"lr": [1e20, 1e30]}, **more)


def test_what_cannot_be_searched_is_refused(tmp_path):
    for over, message in (
        ({"rounds": [4, 8]}, "runs of different lengths on one seed, so rounds is not searched"),
        ({"method.up": [{"kind": "raw"}]}, "a search takes numbers and words as values of method.up"),
        ({"lr": [0.1 * i for i in range(1, 66)]}, "at most 64 settings, not 65"),
        ({"lr": [0.1, 0.2, 0.3]}, "3 settings are searched in 3 rungs"),
    ):
        with pytest.raises(ConfigError, match=message):
            tw.tune("fedavg", "digits", over=over, rounds=3, out=tmp_path)
    assert not list(tmp_path.iterdir())
