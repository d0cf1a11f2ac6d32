"""What `check` says before a run against what runs send."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.federation.simulation import make_simulation
from thinwire.runs.build import build_job
from thinwire.runs.check import check
from thinwire.runs.config import resolve

QUICK = {"rounds": 20, "local.steps": 1, "local.batch": 1, "engine.backend": "vmap", "eval.every": 200}


def sent(experiment):
    federation = make_simulation(experiment.engine, build_job(experiment))
    state, records = federation.start(), []
    for _ in range(experiment.rounds):
        state, record = federation.round(state)
        records.append(record)
    return tuple(sum(getattr(r, f"bytes_{way}") for r in records) for way in ("up", "down", "catchup"))


def forecast(facts):
    return tuple(facts[f"bytes_{way}_of_all_rounds"] for way in ("up", "down", "catchup"))


@pytest.mark.parametrize("method", ["mapo", "scaffold", "slora", "fedper", "flora-stack"])
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


def test_the_forecast_holds_for_long_runs_and_redrawn_bases():
    for redraw_every, count in ((1, 20), (7, 135)):  # with 135 rounds a version takes two bytes
        changes = {"rounds": count, "method.space.redraw_every": redraw_every}
        experiment = resolve("mapo", "digits", {**QUICK, **changes})
        assert sum(forecast(check(experiment))) == pytest.approx(sum(sent(experiment)), rel=1e-3), redraw_every


# a lattice's step is a power of two: in one round another one than in the next
@pytest.mark.parametrize(("method", "off"), [("thin", 0.2), ("sparse", 0.02), ("ddg", 0.01)])
def test_the_bytes_of_codecs_of_variable_length_are_near_those_sent(method, off):
    experiment = resolve(method, "digits", QUICK)
    facts = check(experiment)
    assert sum(forecast(facts)) == pytest.approx(sum(sent(experiment)), rel=off)
    assert ("Lengths depend on values" in facts["note"]) is (method != "ddg")


def test_the_bytes_of_fedlama_are_an_upper_bound():
    experiment = resolve("fedlama", "digits", QUICK)
    assert sum(sent(experiment)) < sum(forecast(check(experiment)))


def test_memory_is_measured_while_a_client_trains():
    wide = {**QUICK, "task.model.hidden": 30_000, "local.batch": 8}
    command = [sys.executable, "-m", "thinwire", "check", "fedavg", "--on", "digits", "--json"]
    command += [word for key, value in wide.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # with fresh memory
    assert facts["memory_before"] is None or facts["memory_of_a_client"] > 4 * facts["parameters"]


def test_the_command_prints_the_bytes_of_all_rounds():
    text = CliRunner().invoke(app, ["check", "slora", "--on", "digits"], catch_exceptions=False).stdout
    assert "bytes of all rounds" in text
    output = CliRunner().invoke(app, ["check", "mapo", "--json"], catch_exceptions=False).stdout
    assert json.loads(output)["bytes_catchup_of_all_rounds"] > 0
