"""Lines of a report: seeds together, targets, intervals, commands."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib

import pytest

from thinwire.cli.app import main
from thinwire.experiments.config import resolve, to_table
from thinwire.experiments.records import find_runs, read_run, totals
from thinwire.reports.rerun import rerun
from thinwire.reports.seed_groups import MeanInterval, choose_targets, group, yardstick


def test_runs_that_differ_by_seed_only_are_one_line(real_runs):
    lines = group([read_run(path) for path in find_runs([real_runs])])
    assert [(line.label, line.seeds) for line in lines] == [("fedavg", [0, 1]), ("mapo", [0, 1])]
    assert yardstick(lines).label == "fedavg"
    curve = lines[1].curve("accuracy")
    runs = lines[1].runs
    assert [p.round for p in curve] == [1, 2, 3, 4, 5]
    assert curve[-1].value == pytest.approx(sum(run.records[-1]["accuracy"] for run in runs) / 2)
    assert curve[-1].bytes == pytest.approx(sum(totals(run.records)["bytes_total"] for run in runs) / 2)
    assert curve[-1].low <= curve[-1].value <= curve[-1].high


def test_one_name_with_two_settings_is_two_lines_that_say_which(write_run):
    paths = [write_run("a", folder=str(k), k=k) for k in (1, 2)]
    assert [line.label for line in group([read_run(p) for p in paths])] == ["a (k 1)", "a (k 2)"]


def test_a_copy_of_a_run_counts_once_and_the_longer_one_counts(write_run):
    half, whole = write_run("a", folder="1", finished=False), write_run("a", folder="2")
    (line,) = group([read_run(half), read_run(whole), read_run(half)])
    assert [run.path for run in line.runs] == [whole]


def test_a_target_is_reached_in_the_first_round_at_or_above_it(write_run):
    (line,) = group([read_run(write_run("a", seed=seed, up=100, catchup=7, rounds=10)) for seed in (0, 1)])
    target = line.runs[0].records[3]["accuracy"]  # the fourth round of seed 0; seed 1 is a little lower
    cost = line.reached(target, compute=0.0)
    assert cost.seeds == 2
    assert cost.rounds.mean == 4.5
    assert cost.ideal == 4.5 * 200
    assert cost.bytes.mean == 4.5 * 200 + 3.5 * 7
    assert cost.seconds["2 Mbps"] == pytest.approx(8 * cost.bytes.mean / 10 / 2e6, abs=1e-3)
    assert line.reached(0.95) is None
    some = line.reached(line.runs[0].records[-1]["accuracy"])
    assert some.seeds == 1


def test_chosen_targets_are_reached_by_every_run_or_near_the_yardstick(write_run):
    lines = group([read_run(write_run("fedavg", best=0.9)), read_run(write_run("b", best=0.5))])
    targets = choose_targets(lines, lines[0])
    assert all(line.reached(targets[0]) for line in lines)
    assert targets == sorted(targets)
    assert lines[0].reached(targets[-1])


def test_the_interval_is_students():
    mean = MeanInterval.of([1.0, 3.0])
    assert (mean.mean, round(mean.half, 3)) == (2.0, 12.706)  # 12.706 * sqrt(2) / sqrt(2)


@pytest.mark.parametrize(
    ("method", "task", "changes"),
    [
        ("fedavg", "digits", {}),
        ("fedavg", "mnist", {"seed": 3, "rounds": 7, "task.clients": 50, "cohort.size": 5}),
        ("mapo", "digits", {"method.space.k": 64, "method.up": {"kind": "topk", "density": 0.25}}),
        ("fedpara+int8", "digits", {"method.schedule.private": ["*bias"], "task.partition": "iid"}),
        ("fedper", "digits", {"engine.device": "cuda", "method.download": "full"}),
    ],
)
def test_the_command_to_run_it_again_resolves_to_the_same_experiment(
    method, task, changes, tmp_path, monkeypatch, capsys
):
    wanted = to_table(resolve(method, task, changes))
    words = shlex.split(rerun(wanted, tmp_path))
    assert words[:3] == ["thinwire", "run", method]
    monkeypatch.setattr(sys, "argv", ["thinwire", "show", *words[2:]])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert tomllib.loads(capsys.readouterr().out) == json.loads(json.dumps(wanted))


def test_a_configuration_that_no_preset_leads_to_is_run_from_its_file(tmp_path):
    table = {**to_table(resolve("fedavg", "digits")), "name": "mine"}
    assert rerun(table, tmp_path / "x").startswith(f"thinwire run {tmp_path}/x/config.toml --out ")
