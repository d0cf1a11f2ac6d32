"""The forecast bytes of a whole run against the bytes that runs send."""

import json

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.experiments.build import build_job
from thinwire.experiments.check import check
from thinwire.experiments.config import resolve
from thinwire.experiments.loop import Stop, rounds

QUICK = {"rounds": 20, "local.steps": 1, "local.batch": 1, "engine.backend": "vmap", "eval.every": 200}


def sent(experiment):
    simulation = experiment.engine.prepare(build_job(experiment))
    records = [record for _, record in rounds(simulation, simulation.start(), Stop(experiment.rounds))]
    return tuple(sum(getattr(r, f"bytes_{way}") for r in records) for way in ("up", "down", "catchup"))


def forecast(facts):
    return tuple(facts[f"bytes_{way}_of_all_rounds"] for way in ("up", "down", "catchup"))


@pytest.mark.parametrize(
    "method", ["mapo", "fedavg", "scaffold", "hetlora", "slora", "fedper", "fedex-lora", "flora-stack"]
)
def test_the_forecast_is_exact_for_codecs_of_fixed_length(method):
    experiment = resolve(method, "digits", QUICK)
    facts = check(experiment)
    assert forecast(facts) == sent(experiment)
    assert facts["bytes_of_all_rounds"] == sum(forecast(facts))


def test_the_forecast_includes_catch_up():
    facts = check(resolve("mapo", "digits", QUICK))
    plain = 20 * facts["bytes_per_round"]
    assert facts["bytes_catchup_of_all_rounds"] > 0.3 * plain
    assert check(resolve("fedavg", "digits", QUICK))["bytes_catchup_of_all_rounds"] == 0


def test_the_forecast_is_exact_for_long_runs_and_redrawn_bases():
    for redraw_every, count in ((0, 20), (1, 20), (7, 135)):  # with 135 rounds a version takes two bytes
        changes = {"rounds": count, "method.space.redraw_every": redraw_every}
        experiment = resolve("mapo", "digits", {**QUICK, **changes})
        assert forecast(check(experiment)) == sent(experiment), redraw_every


@pytest.mark.parametrize("method", ["thin", "sparse", "topk"])
def test_the_forecast_is_within_5_percent_for_codecs_of_variable_length(method):
    first, second = (resolve(method, "digits", {**QUICK, "seed": seed}) for seed in (0, 1))
    facts = check(first)
    mean = (sum(sent(first)) + sum(sent(second))) / 2  # the length of levels that are rounded at random varies
    assert sum(forecast(facts)) == pytest.approx(mean, rel=0.05)
    assert facts["bytes_up_per_client"] is None or facts["bytes_down_per_client"] is None
    assert "Gaussian values" in facts["note"]


def test_the_forecast_of_fedlama_is_a_range_around_the_bytes_sent():
    experiment = resolve("fedlama", "digits", QUICK)
    facts = check(experiment)
    total = sum(sent(experiment))
    assert facts["bytes_of_all_rounds_at_least"] < total < facts["bytes_of_all_rounds"]
    assert "fraction of parameters that wait" in facts["layers_that_wait"]


def test_each_stage_has_its_own_facts():
    facts = check(resolve("slora", "digits", QUICK))
    assert (facts["first_stage"]["rounds"], facts["second_stage"]["rounds"]) == (15, 5)
    assert facts["first_stage"]["bytes up per client"] != facts["second_stage"]["bytes up per client"]
    text = (
        CliRunner().invoke(app, ["check", "slora", "--on", "digits", "--rounds", "20"], catch_exceptions=False).stdout
    )
    assert "second stage" in text
    assert "bytes of all rounds" in text
    output = CliRunner().invoke(app, ["check", "mapo", "--json"], catch_exceptions=False).stdout
    assert json.loads(output)["bytes_catchup_of_all_rounds"] > 0
