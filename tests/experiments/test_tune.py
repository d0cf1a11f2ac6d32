"""The search over two settings, such as rank and density."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.errors import ConfigError
from thinwire.experiments.build import build_job
from thinwire.experiments.config import resolve
from thinwire.experiments.loop import Stop, rounds
from thinwire.experiments.tune import Knob, Spent, flasc_knobs, numbers, search, tune

SMALL = {"rounds": 2, "cohort.size": 2, "local.steps": 2}


def counted(accuracy):
    calls = []

    def measure(rank, density):
        calls.append((rank, density))
        return accuracy(rank, density), int(1000 * rank * density)

    return measure, calls


def test_stops_at_the_first_density_at_which_the_larger_rank_wins():
    # below a density of 1/4 a larger rank is worse
    measure, calls = counted(lambda r, d: r if d >= 0.25 or r == 1 else 0)
    found = search(measure, (1, 4, 16), (0.0625, 0.25, 1.0))
    assert calls == [(1, 0.25), (4, 0.0625), (1, 1.0), (4, 0.25), (16, 0.25)]
    assert (found.size, found.share) == (16, 0.25)
    assert found.bytes == sum(int(1000 * r * d) for r, d in calls)
    assert not any(one.clipped for one in found.tried)
    assert not found.stopped


def test_if_the_larger_rank_never_wins_the_share_is_1_and_the_best_run_is_returned():
    measure, calls = counted(lambda r, d: -r)
    found = search(measure, (1, 4, 16), (0.25, 0.5))
    assert (found.size, found.share) == (1, 1.0), "the first run is the best"
    assert len(set(calls)) == len(calls)  # rank 1 without a mask is measured once
    assert search(measure, (1, 4), (0.5,)).tried[0].clipped  # 0.5 * 4 / 1 is above 1
    assert found.tried[0] == (1, 1.0, -1, 1000, None, True)  # of equal cost at density 0.25, clipped at 0.5


def test_the_best_run_is_returned_and_of_equal_runs_the_cheaper_one():
    # the first run is better than all runs of the second stage
    measure, _ = counted(
        lambda r, d: {(1, 0.25): 0.9, (4, 0.0625): 0.2, (1, 1.0): 0.3, (4, 0.25): 0.5}.get((r, d), 0.4)
    )
    found = search(measure, (1, 4, 16), (0.0625, 0.25, 1.0))
    assert (found.size, found.share) == (1, 0.25)
    assert max(one.accuracy for one in found.tried) == 0.9
    same = search(counted(lambda r, d: 0.5)[0], (1, 4), (0.25, 1.0))
    assert (same.size, same.share) == min((one for one in same.tried), key=lambda one: one.bytes)[:2]
    assert [(low[:2], high[:2]) for low, high in same.compared] == [((1, 1.0), (4, 0.25)), ((1, 1.0), (4, 1.0))]


def test_the_criterion_is_the_accuracy_on_validation_examples(tmp_path):
    experiment = resolve("flasc", "digits", {**SMALL, "local.epochs": 1, "local.steps": 0, "rounds": 3})
    found = tune(experiment, *flasc_knobs((1, 4), (0.5,)), out=tmp_path)
    totals = [json.loads(file.read_text()) for file in tmp_path.glob("*/summary.json")]
    own = {one["bytes_total_honest"]: one for one in totals}
    for one in found.tried:
        assert one.accuracy == own[one.bytes]["final_client_accuracy"]
        assert one.test_accuracy == own[one.bytes]["final_accuracy"]
        assert one.accuracy != one.test_accuracy
    assert found.chosen_by.startswith("accuracy on the 10 % of each client's examples")
    plain = tune(experiment, *flasc_knobs((1, 4), (0.5,)), validation_fraction=0)
    assert plain.chosen_by == "accuracy on the test set"
    assert all(one.accuracy == one.test_accuracy for one in plain.tried)
    with pytest.raises(ConfigError, match="too few to hold out"):
        tune(experiment, *flasc_knobs((1, 4), (0.5,)), validation_fraction=0.001)


def test_a_run_that_diverges_has_accuracy_0(tmp_path):
    experiment = resolve("flasc", "digits", {**SMALL, "method.client_opt.lr": 1e30})
    found = tune(experiment, *flasc_knobs((1, 4), (1.0,)), out=tmp_path)
    assert [one.accuracy for one in found.tried] == [0.0] * len(found.tried)


def test_integer_settings_stay_integers():
    measure, calls = counted(lambda k, bits: k * bits)
    found = search(measure, (2, 3, 8), (3, 8), top=8)
    assert calls == [(2, 4), (3, 3), (8, 3)]  # 3 * 3 / 2 bits is no whole number
    assert found.tried[0].clipped
    assert not found.tried[1].clipped


def test_a_spent_budget_returns_the_best_so_far():
    def measure(rank, density):
        if rank == 16:
            raise Spent(7)
        return rank * density, 100

    found = search(measure, (1, 4, 16), (0.25, 1.0))
    assert found.stopped
    assert found.bytes == 100 * len(found.tried) + 7
    assert (found.size, found.share) == (4, 1.0)
    with pytest.raises(ConfigError, match="before one run finished"):
        search(lambda rank, density: (_ for _ in ()).throw(Spent(1)), (1, 4), (1.0,))


def test_real_runs_and_the_estimated_bytes_of_a_grid():
    experiment = resolve("flasc", "digits", SMALL)
    found = tune(experiment, *flasc_knobs((1, 2, 4), (0.5,)))
    assert {one.size for one in found.tried} == {1, 2, 4}
    best = max(found.tried, key=lambda one: one.accuracy)
    assert best.accuracy == next(one.accuracy for one in found.tried if one[:2] == (found.size, found.share))
    assert found.bytes > 0
    (low, high), *_ = found.compared
    assert high.bytes != low.bytes, "compared runs have their actual bytes"
    all_runs = 0
    for rank in (1, 2, 4):
        for density in (0.5, 1.0):
            given = {"method.space.rank": rank, "method.up.density": density, "method.down.density": density}
            chosen = resolve("flasc", "digits", {**SMALL, **given})
            simulation = chosen.engine.prepare(build_job(chosen))
            records = [record for _, record in rounds(simulation, simulation.start(), Stop(chosen.rounds))]
            all_runs += sum(one.bytes_up + one.bytes_down + one.bytes_catchup for one in records)
    assert found.grid == pytest.approx(all_runs, rel=0.02)  # lengths of messages depend little on training


def test_any_two_settings_of_any_method():
    knobs = Knob.parse("method.space.k=16,32"), Knob.parse("method.up.bits=2,4,8")
    found = tune(resolve("mapo+int8", "digits", SMALL), *knobs)
    first, second = found.tried[:2]
    assert (first.size, first.share, second.size, second.share) == (16, 4, 32, 2)
    assert isinstance(found.share, int)
    assert [knob.label for knob in knobs] == ["k", "bits"]
    staged = tune(
        resolve("slora", "digits", {**SMALL, "method.next_stage.at": 1}),
        Knob.parse("method.next_stage.space.rank=1,2"),
        Knob.parse("method.mask.density=1/4,1/2"),
    )
    assert len(staged.tried) >= 2


def test_a_stopped_search_continues(tmp_path):
    experiment, knobs = resolve("flasc", "digits", SMALL), flasc_knobs((1, 2, 4), (0.5,))
    whole = tune(experiment, *knobs, out=tmp_path / "whole")
    assert not whole.stopped
    first = whole.tried[0].bytes
    part = tune(experiment, *knobs, budget=first + 10, out=tmp_path / "part")
    assert part.stopped
    assert part.tried[0][:5] == whole.tried[0][:5]
    assert len(part.tried) == 1
    assert first < part.bytes < first + whole.tried[1].bytes + 1  # it ends with the round that spent it
    done = (tmp_path / "part").glob("*/summary.json")
    before = {file: file.stat().st_mtime_ns for file in done}
    assert len(before) == 1
    again = tune(experiment, *knobs, budget=whole.bytes, out=tmp_path / "part")
    assert again == whole
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())  # not run again


def test_the_command_prints_the_search_and_the_bytes_of_a_grid(tmp_path):
    words = ["tune", "flasc", "--on", "digits", "--rounds", "2", "--cohort", "2", "--ranks", "1,2", "--densities"]
    words += ["1/2,1", "--set", "local.steps=2", "--out", str(tmp_path), "--budget", "10MB"]
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    best = max(facts["tried"], key=lambda one: (one["accuracy"], -one["bytes"]))
    assert (facts["rank"], facts["density"]) == (best["size"], best["share"])
    assert 0 < facts["bytes_total"] <= 10_000_000
    assert facts["bytes_of_a_grid"] >= facts["bytes_total"] // 2
    assert facts["stopped"] is False
    text = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "bytes of a grid" in text
    assert "times its bytes" in text
    assert "test accuracy" in text
    assert len(list(Path(tmp_path).glob("flasc-digits-*"))) == len(facts["tried"])


def test_invalid_arguments_are_refused():
    for ranks, densities in (((4,), (1.0,)), ((4, 1), (1.0,)), ((1, 4), ()), ((1, 4), (0.5, 0.25)), ((1, 4), (2.0,))):
        with pytest.raises(ConfigError, match="ascend"):
            search(lambda r, d: (0.0, 0), ranks, densities)
    with pytest.raises(ConfigError, match=r"no setting 'method\.up\.density'"):
        tune(resolve("lora", "digits"), *flasc_knobs((1, 4), (1.0,)))
    with pytest.raises(ConfigError, match="is a whole number"):
        tune(resolve("flasc", "digits"), *flasc_knobs((1, 1.5, 2), (1.0,)))
    with pytest.raises(ConfigError, match="numbers separated by commas"):
        numbers("1,x", "ranks")
    with pytest.raises(ConfigError, match="--knob takes"):
        Knob.parse("rank")
