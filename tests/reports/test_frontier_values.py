"""The values of a frontier: the front, winners within a budget, and recommendations; without training."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from thinwire.reports.recommend import Wish, from_pilot, is_comparable, measured, nearest

from thinwire.errors import CheckpointError
from thinwire.experiments.config import resolve
from thinwire.experiments.experiment import to_table
from thinwire.reports.frontier import Row, SeedCurve, best_by_bytes, front, plain, read_rows, reference_of, winners
from thinwire.reports.frontier_page import _seeds, chart, row_cells, win_cells

CONFIG = {key: value for key, value in to_table(resolve("fedavg", "digits")).items() if key != "seed"}


def row(label, each, accuracies, seeds=(0, 1, 2), status="finished", noise=0.0):
    """A method that sends `each` bytes a round; seed s is better by s times the noise."""
    runs = []
    for seed in seeds:
        points = tuple((i + 1, each * (i + 1), a + noise * seed) for i, a in enumerate(accuracies))
        runs.append(SeedCurve(seed, f"{label}{seed}", status, points))
    return Row(label, "", CONFIG, tuple(runs))


FEDAVG = row("fedavg", 1000, [0.2, 0.4, 0.6, 0.8], noise=0.01)
THIN = row("thin", 10, [0.3, 0.5, 0.6, 0.7], noise=0.01)
WASTEFUL = row("wasteful", 500, [0.1, 0.2, 0.3, 0.4])
BROKEN = row("broken", 1, [0.9, 0.9, 0.9, 0.9], status="collapsed")
ROWS = [FEDAVG, THIN, WASTEFUL, BROKEN]


def test_the_front_has_the_rows_that_nothing_beats_and_no_failed_ones():
    assert [one.label for one in front(ROWS)] == ["thin", "fedavg"]
    assert reference_of(ROWS).label == "fedavg"
    assert reference_of([THIN, WASTEFUL]).label == "wasteful"
    steps = best_by_bytes(ROWS)
    assert [sent for sent, _ in steps] == [10, 20, 30, 40, 4000]
    assert all(later[1] > earlier[1] for earlier, later in itertools.pairwise(steps))


def test_winners_count_only_the_rounds_that_a_budget_pays():
    found = {one.share: one for one in winners(ROWS, (1, 2, 100, 1000))}
    assert found[1].first.label == "fedavg"
    assert found[1].second.label == "thin"
    assert found[1].ahead.mean == pytest.approx(0.1)
    assert found[1].clear, "the difference is the same on every seed"
    assert found[2].first.label == "thin", "FedAvg pays for two rounds only"
    assert found[100].second is None
    assert found[1000].first is None, "no round costs so little"
    cells = win_cells(ROWS)
    assert cells[0][:4] == ["4 kB", "all", "fedavg", "81.00 ± 1.00"]
    assert cells[-1] == ["4 B", "1/1000", "none"]


def test_a_difference_within_the_spread_of_seeds_is_not_clear():
    mixed = Row(
        "mixed", "", CONFIG, tuple(SeedCurve(s, "", "finished", ((1, 10, 0.69 + 0.02 * s),)) for s in (0, 1, 2))
    )
    steady = row("steady", 10, [0.705])
    (one,) = winners([mixed, steady], (1,))
    assert one.first.label == "mixed"
    assert not one.clear
    (single,) = winners([row("a", 1, [0.9], seeds=[0]), row("b", 1, [0.1], seeds=[0])], (1,))
    assert not single.clear, "one seed shows no spread"


def test_rows_with_fewer_seeds_are_named_and_compared_by_the_seeds_of_both():
    short = row("short", 1000, [0.2, 0.4, 0.6, 0.7], seeds=[1], noise=0.01)
    assert win_cells([FEDAVG, short])[0][2:] == ["fedavg", "81.00 ± 1.00", "short", "10.00", "1", "no"]
    assert _seeds([FEDAVG, short, Row("none", "", CONFIG, ())]).startswith(" Rows: 1 with 3 seeds, 1 with 1 seed. ")
    assert _seeds([FEDAVG, THIN]) == ""


def test_the_table_has_shares_and_failures():
    cells = {line[0]: line for line in row_cells(ROWS)}
    assert cells["thin"][5:8] == ["40 B", "1/100", "yes"]
    assert cells["broken"][4] == "3 of 3 collapsed"
    assert cells["broken"][7] == "no"
    assert cells["wasteful"][7] == "no"
    drawing = chart(ROWS, "digits")
    assert drawing.count('class="dot') == 2 * 3, "a mark and a legend for each row that did not fail"
    assert "broken" not in drawing


def test_rows_survive_their_json_file_and_damage_is_one_line(tmp_path):
    file = tmp_path / "frontier.json"
    runs = {run.run: {"seed": run.seed, "status": run.status, "curve": run.points} for one in ROWS for run in one.runs}
    file.write_text(json.dumps({"rows": plain(ROWS), "runs": runs}))
    assert read_rows(file) == ROWS
    good = plain(ROWS)[0]
    for damage in (
        {"rows": 3},
        {"rows": [{**good, "label": 3}]},
        {"rows": [{**good, "runs": ["another"]}]},
        {"rows": [{**good, "runs": [3]}]},
        {"rows": [good], "runs": 3},
        {"rows": [good], "runs": {name: {**run, "curve": [[1, -5, 0.5]]} for name, run in runs.items()}},
        {"rows": [good], "runs": {name: {**run, "curve": [[1, 5, math.nan]]} for name, run in runs.items()}},
        {"rows": [{"label": "x"}]},
    ):
        file.write_text(json.dumps({"runs": runs, **damage}))
        with pytest.raises(CheckpointError, match="is not the JSON file of a frontier"):
            read_rows(file)


def test_a_target_is_recommended_with_the_fewest_bytes_on_every_seed():
    found = measured(ROWS, Wish(0.6, None, 100))
    assert [one.row.label for one in found] == ["thin", "fedavg"]
    assert (found[0].rounds, found[0].bytes, found[0].spread) == (3, 30.0, (30.0, 30.0))
    assert measured(ROWS, Wish(0.95, None, 100)) == []
    assert measured(ROWS, Wish(0.6, None, 3)) == [], "these runs have more rounds than are allowed"
    assert nearest(ROWS).label == "fedavg"


def test_a_budget_is_spent_on_the_highest_accuracy():
    found = measured(ROWS, Wish(None, 2500, 100))
    assert [one.row.label for one in found] == ["thin", "fedavg", "wasteful"]
    assert found[1].rounds == 2
    assert measured(ROWS, Wish(None, 2, 100)) == []


def test_a_pilot_is_extrapolated_by_a_power_law_within_the_rounds_allowed():
    short, long = row("m", 10, [0.2] * 10, seeds=[0]), row("m", 10, [0.6] * 20, seeds=[0])
    (one,) = from_pilot([short], [long], Wish(0.8, None, 40))
    assert (one.rounds, one.bytes, one.measured, one.run_rounds) == (40, 400.0, False, 40)
    assert from_pilot([short], [long], Wish(0.8, None, 39)) == []
    (reached,) = from_pilot([short], [long], Wish(0.5, None, 40))
    assert reached.measured
    (budget,) = from_pilot([short], [long], Wish(None, 400, 1000))
    assert (budget.accuracy, budget.rounds) == (pytest.approx(0.8), 40)
    (small,) = from_pilot([short], [long], Wish(None, 100, 1000))
    assert (small.measured, small.rounds) == (True, 10)
    assert from_pilot([BROKEN], [BROKEN], Wish(0.5, None, 40)) == []


def test_only_runs_of_the_same_data_clients_and_cohort_are_comparable():
    wanted = to_table(resolve("fedavg", "digits"))
    for other, same in (
        ({"local.epochs": 5, "task.scale": "unit"}, True),
        ({"task.clients": 7, "cohort.size": 5}, False),
        ({"cohort.size": 5}, False),
        ({"task.validation_fraction": 0.1}, False),
        ({"attack.kind": "sign-flip"}, False),
    ):
        assert is_comparable(to_table(resolve("mapo", "digits", other)), wanted) == same, other
