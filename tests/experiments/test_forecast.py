"""The bytes of a whole run, foretold, against what runs really send."""

import json

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.experiments.build import build_job
from thinwire.experiments.check import check
from thinwire.experiments.config import resolve

QUICK = {"rounds": 20, "local.steps": 1, "local.batch": 1, "engine.backend": "vmap", "eval.every": 200}


def sent(experiment):
    records = list(experiment.engine.run(build_job(experiment)))
    return tuple(sum(getattr(r, f"bytes_{way}") for r in records) for way in ("up", "down", "catchup"))


def foretold(facts):
    return tuple(facts[f"bytes_{way}_of_all_rounds"] for way in ("up", "down", "catchup"))


@pytest.mark.parametrize("method", ["mapo", "fedavg", "scaffold", "hetlora", "slora", "fedper"])
def test_what_a_run_will_send_is_known_to_the_byte(method):
    experiment = resolve(method, "digits", QUICK)
    facts = check(experiment)
    assert foretold(facts) == sent(experiment)
    assert facts["bytes_of_all_rounds"] == sum(foretold(facts))


def test_catching_up_is_counted():
    facts = check(resolve("mapo", "digits", QUICK))
    plain = 20 * facts["bytes_per_round"]
    assert facts["bytes_catchup_of_all_rounds"] > 0.3 * plain
    assert check(resolve("fedavg", "digits", QUICK))["bytes_catchup_of_all_rounds"] == 0


def test_long_runs_and_frames_of_every_kind():
    for fresh, rounds in ((0, 20), (1, 20), (7, 135)):  # a version of two bytes, too
        experiment = resolve("mapo", "digits", {**QUICK, "rounds": rounds, "method.space.redraw_every": fresh})
        assert foretold(check(experiment)) == sent(experiment), fresh


@pytest.mark.parametrize("method", ["thin", "sparse", "topk"])
def test_lengths_that_follow_the_contents_are_foretold_within_a_few_per_cent(method):
    experiment = resolve(method, "digits", QUICK)
    facts = check(experiment)
    assert sum(foretold(facts)) == pytest.approx(sum(sent(experiment)), rel=0.05)
    assert facts["bytes_up_per_client"] is None or facts["bytes_down_per_client"] is None
    assert "normal numbers" in facts["note"]


def test_layers_that_wait_give_a_range_that_holds_what_is_sent():
    experiment = resolve("fedlama", "digits", QUICK)
    facts = check(experiment)
    total = sum(sent(experiment))
    assert facts["bytes_of_all_rounds_at_least"] < total < facts["bytes_of_all_rounds"]
    assert "share of numbers that wait" in facts["layers_that_wait"]


def test_each_stage_has_its_figures():
    facts = check(resolve("slora", "digits", QUICK))
    assert (facts["first_stage"]["rounds"], facts["second_stage"]["rounds"]) == (15, 5)
    assert facts["first_stage"]["bytes up per client"] != facts["second_stage"]["bytes up per client"]
    said = (
        CliRunner().invoke(app, ["check", "slora", "--on", "digits", "--rounds", "20"], catch_exceptions=False).stdout
    )
    assert "second stage" in said
    assert "bytes of all rounds" in said
    told = CliRunner().invoke(app, ["check", "mapo", "--json"], catch_exceptions=False).stdout
    assert json.loads(told)["bytes_catchup_of_all_rounds"] > 0
