"""Groups of runs that differ in their seed: curves, targets, intervals."""

from __future__ import annotations

import json

import pytest

from thinwire.reports.rows import MeanInterval, baseline_of, group
from thinwire.reports.targets import choose_targets, cost_to_reach, headline
from thinwire.runs.records import find_runs, read_run, totals


def test_runs_that_differ_only_in_seed_form_a_group(real_runs):
    groups = group([read_run(path) for path in find_runs([real_runs])])
    assert [(one.label, one.seeds) for one in groups] == [("fedavg", [0, 1]), ("mapo", [0, 1])]
    assert baseline_of(groups).label == "fedavg"
    curve = groups[1].curve("accuracy")
    runs = groups[1].runs
    assert [x for x, *_ in groups[1].curve("accuracy", by_bytes=False)] == [1, 2, 3, 4, 5]
    sent, mean, low, high = curve[-1]
    assert mean == pytest.approx(sum(run.records[-1]["accuracy"] for run in runs) / 2)
    assert sent == pytest.approx(sum(totals(run.records)["bytes_total"] for run in runs) / 2)
    assert low <= mean <= high


def test_groups_of_one_name_are_labeled_by_their_settings(write_run):
    paths = [write_run("a", folder=str(k), k=k) for k in (1, 2)]
    assert [one.label for one in group([read_run(p) for p in paths])] == ["a (k 1)", "a (k 2)"]


def test_of_two_copies_of_a_run_the_longer_counts(write_run):
    half, whole = write_run("a", folder="1", finished=False), write_run("a", folder="2")
    (only,) = group([read_run(half), read_run(whole), read_run(half)])
    assert [run.path for run in only.runs] == [whole]


def test_target_is_reached_in_the_first_round_at_or_above_it(write_run):
    (only,) = group([read_run(write_run("a", seed=seed, up=100, catchup=7, rounds=10)) for seed in (0, 1)])
    target = only.runs[0].records[3]["accuracy"]  # the fourth round of seed 0; seed 1 is a little lower
    cost = cost_to_reach(only, target)
    assert list(cost.by_seed) == [0, 1]
    assert cost.mean("rounds") == 4.5
    assert cost.mean("bytes_total_ideal") == 4.5 * 200
    assert cost.mean("bytes_total") == 4.5 * 200 + 3.5 * 7
    compute = only.runs[0].records[0]["seconds"] / 10
    assert cost.mean("seconds") == pytest.approx(8 * cost.mean("bytes_total") / 10 / 2e6 + 4.5 * compute, abs=1e-3)
    assert cost_to_reach(only, 0.95) is None
    some = cost_to_reach(only, only.runs[0].records[-1]["accuracy"])
    assert list(some.by_seed) == [0]


def curve(write_run, name, *accuracies, examples=10_000, up=1000, seed=0):
    """A run directory with these accuracies, measured on so many test examples."""
    path = write_run(name, rounds=len(accuracies), up=up, seed=seed)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    changed = [json.dumps({**line, "accuracy": one}) for line, one in zip(lines, accuracies, strict=True)]
    (path / "metrics.jsonl").write_text("\n".join(changed) + "\n")
    (path / "environment.json").write_text(json.dumps({"test_examples": examples}))
    return read_run(path)


def rounds_to(run, target):
    cost = cost_to_reach(*group([run]), target)
    return cost and cost.mean("rounds")


def test_a_target_that_is_touched_once_is_not_reached_until_it_is_kept(write_run):
    assert rounds_to(curve(write_run, "falls", 0.5, 0.91, 0.7, 0.8), 0.9) is None
    assert rounds_to(curve(write_run, "returns", 0.5, 0.91, 0.7, 0.92, 0.91), 0.9) == 4
    assert rounds_to(curve(write_run, "wavers", 0.5, 0.91, 0.896, 0.92), 0.9) == 2, (
        "0.896 is within two standard errors"
    )


@pytest.mark.parametrize(("examples", "reached"), [(10_000, None), (359, 2), ("many", None)])
def test_a_target_that_is_missed_by_less_than_the_noise_of_the_test_set_is_reached(write_run, examples, reached):
    """Two standard errors of 0.9 are 0.006 on 10,000 test examples, and 0.032 on 359."""
    assert rounds_to(curve(write_run, "near", 0.5, 0.88, 0.885, examples=examples), 0.9) == reached


def test_the_headline_never_names_the_method_that_ends_worst(write_run):
    fedavg = curve(write_run, "fedavg", 0.8, 0.95, 0.97, up=4000)
    thin = curve(write_run, "thin", 0.8, 0.94, 0.968, up=1000)
    worst = curve(write_run, "worst", 0.85, 0.85, 0.84, up=10)

    def named(*runs):
        rows = group(runs)
        baseline = baseline_of(rows)
        targets = choose_targets(rows, baseline)
        return headline(rows, baseline, {one: [cost_to_reach(row, one) for row in rows] for one in targets})

    assert ": thin, " in named(fedavg, thin, worst)
    assert named(fedavg, worst) == "", "it has the fewest bytes, so no other method may be named either"
    assert ": thin, " in named(fedavg, thin), "0.002 below the best is noise"


def test_chosen_targets_are_reached_by_every_run_or_near_the_baseline(write_run):
    groups = group([read_run(write_run("fedavg", best=0.9)), read_run(write_run("b", best=0.5))])
    targets = choose_targets(groups, groups[0])
    assert all(cost_to_reach(one, targets[0]) for one in groups)
    assert targets == sorted(targets)
    assert cost_to_reach(groups[0], targets[-1])


def test_interval_uses_students_t():
    mean = MeanInterval.of([1.0, 3.0])
    assert (mean.mean, round(mean.half, 3)) == (2.0, 12.706)  # 12.706 * sqrt(2) / sqrt(2)
