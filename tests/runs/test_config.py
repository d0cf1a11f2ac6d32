"""Experiments as values and as files: layers, overrides, errors."""

from __future__ import annotations

import pytest

from thinwire.core.registry import KINDS, entries
from thinwire.errors import ConfigError, UnknownName
from thinwire.federation.simulation import make_simulation
from thinwire.runs.config import digest, from_table, resolve, to_table
from thinwire.runs.parts import build, describe
from thinwire.runs.presets import presets
from thinwire.runs.toml import dumps, loads, parse_overrides


@pytest.mark.parametrize("task", sorted(presets("tasks")))
def test_every_task_preset_round_trips_through_a_file(task):
    experiment = resolve("fedavg", on=task)
    again = from_table(loads(dumps(to_table(experiment)), "test"))
    assert again == experiment
    assert digest(again) == digest(experiment)


def test_every_dataset_has_a_preset_and_every_preset_a_description():
    assert set(presets("tasks")) == set(entries("dataset"))
    for kind in ("methods", "tasks"):
        for preset in presets(kind).values():
            assert preset.about.endswith(".")
            assert "\n" not in preset.about


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.slots])
def test_every_part_round_trips_through_a_table(kind):
    for name in entries(kind):
        part = build(kind, name, "test")
        assert build(kind, describe(kind, part), "test") == part


def test_the_command_line_overrides_the_method_and_the_method_the_task():
    assert resolve("fedavg", on="digits").method.client_opt.lr == 0.3
    assert resolve("fedavgm", on="digits").method.server_opt.momentum == 0.9
    assert resolve("fedavgm", overrides={"method.server_opt.momentum": 0.5}).method.server_opt.momentum == 0.5
    assert resolve("fedsgd", on="digits").local.batch == 0


def test_an_override_of_a_kind_removes_the_options_of_the_other_kind():
    experiment = resolve("fedavg", overrides={"task.partition.kind": "iid"})
    assert describe("partition", experiment.task.partition) == {"kind": "iid"}


@pytest.mark.parametrize(
    ("overrides", "near"),
    [
        ({"round": 3}, "'rounds'"),
        ({"method.spce": "full"}, "'space'"),
        ({"method.client_opt.lrr": 0.1}, "'lr'"),
        ({"task.model.clases": 3}, "'classes'"),
        ({"task.partition.alfa": 3}, "'alpha'"),
        ({"engine.devise": "cpu"}, "'device'"),
        ({"method.up": "row"}, "'raw'"),
        ({"task.kind": "digit"}, "'digits'"),
        ({"engine.backend": "vamp"}, "'vmap'"),
    ],
)
def test_a_misspelled_name_is_refused_with_the_most_similar_one(overrides, near):
    with pytest.raises(UnknownName, match="did you mean") as error:
        resolve("fedavg", overrides=overrides)
    assert near in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rounds": "many"}, "rounds must be of type int"),
        ({"method.client_opt.lr": "fast"}, "lr must be of type float"),
        ({"method.client_opt.lr": -1}, "lr must be above 0"),
        ({"method.client_opt": 3}, "must be a name or a table"),
        ({"cohort": 3}, "cohort must be a table"),
        ({"method.download": "carrier-pigeon"}, "Known: full, incremental"),
        ({"engine.device": "tpu9"}, "device must be cpu or cuda"),
        ({"checkpoint.every": 0}, "checkpoint.every must be 1 or more"),
        ({"local.epochs": -1}, "epochs must be 0 or more"),
        ({"rounds": True}, "rounds must be of type int"),
    ],
)
def test_a_wrong_value_is_refused_with_the_expected_one(overrides, message):
    with pytest.raises(ConfigError) as error:
        resolve("fedavg", overrides=overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_resolves_to_an_experiment(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('rounds = 7\n[method]\nclient_opt = "sgd"\n[local]\nbatch = 4\n')
    experiment = resolve(str(file))
    assert (experiment.name, experiment.rounds, experiment.local.batch) == ("mine", 7, 4)
    assert experiment.task.kind == "digits"


def test_invalid_and_missing_files_are_refused(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("rounds = = 7\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve(str(file))
    with pytest.raises(ConfigError, match="no such experiment file"):
        resolve(str(tmp_path / "absent.toml"))


def test_an_override_without_an_equals_sign_is_refused():
    with pytest.raises(ConfigError, match="key=value"):
        parse_overrides(["rounds"])


def test_strings_with_quotes_and_unusual_keys_round_trip_through_toml():
    table = {"a b": {"x": 'say "hi"\n', "y": [1.5, float("inf")], "z": {"é": True}}}
    assert loads(dumps(table), "test") == table


def test_a_method_may_have_other_settings_on_a_task():
    assert resolve("mapo", on="digits").method.space.redraw_every == 1
    assert resolve("mapo", on="fashion-mnist").method.space.redraw_every == 10
    assert resolve("mapo", on="fashion-mnist").method.space.k == 0
    assert resolve("mapo-paper", on="fashion-mnist").method.space.k == 128
    assert resolve("mapo-paper", on="cifar10").method.space.k == 1024


def test_every_method_preset_can_be_run_on_the_default_task():
    from thinwire.runs.build import build_job

    for method in presets("methods"):
        experiment = resolve(method)
        assert make_simulation(experiment.engine, build_job(experiment)).contract.coords.size > 0, method
