"""The papers' tables: every preset is sound, they share runs, and rows do equal work."""

import itertools
import statistics

import pytest

from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.presets import papers, presets, tables
from thinwire.experiments.repro import SCALES, load

ASKED = {
    "mapa": (1, 3, 4, 5),
    "mapo": (3, 5),
    "fedlama": (1, 4),
    "pfedpara": (3,),
    "flasc": (1, 3),
    "fedpara": (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", presets("repro"))
def test_every_table_can_be_asked_for_at_every_scale(name, scale) -> None:
    found = load(name, scale)
    cells = found.grid.content["rows"]
    if found.content.get("counted"):
        assert not cells
        return
    assert len(cells) == len(found.content["columns"]) * len(found.content["rows"]) > 0
    assert all(isinstance(cell["published"], int | float) for cell in cells)
    firsts = [{key: values[0] for key, values in row.get("over", {}).items()} for row in cells]
    lines = [found.grid.line(number, chosen, [0]) for number, chosen in enumerate(firsts)]
    assert all(line.runs for line in lines)
    if scale != "quick":
        asked = [cell.get("seeds", found.content["seeds"]) for cell in cells]
        assert statistics.median(map(len, asked)) >= 3, "a table has three seeds at least"
        assert found.grid.tune["seeds"] == [100]
        assert all(100 not in seeds for seeds in asked), "the search has seeds of its own"


def test_the_tables_that_the_data_allow_are_there() -> None:
    assert {f"{paper}-{number}" for paper, numbers in ASKED.items() for number in numbers} <= set(presets("repro"))
    known = {paper["name"] for paper in papers()}
    assert {one.paper.split(",")[0] for one in presets("repro").values()} == known
    assert any("CIFAR-100" in row["about"] for row in tables() if row["name"] == "-")


def test_equal_steps_in_windows_that_are_whole() -> None:
    for name, scale in itertools.product(("fedlama-1", "fedlama-4"), SCALES):
        grid = load(name, scale).grid
        for share in (1.0, grid.tune.get("share", 1.0)):
            lines = grid.lines([0], share)
            steps = [line.runs[0].rounds * line.runs[0].local.steps for line in lines]
            assert max(steps) - min(steps) < 24, "of rounding at most"
        phis = [(line.runs[0].rounds, getattr(line.runs[0].method.schedule, "phi", 1)) for line in grid.lines([0])]
        assert all(rounds % phi == 0 for rounds, phi in phis)


def test_a_schedule_is_stretched_with_the_rounds() -> None:
    grid = load("fedlama-4", "paper", changes=["rounds=48"]).grid
    often, seldom, _ = (line.runs[0] for line in grid.lines([0])[:12:4])
    assert (often.rounds, often.eval.every, often.method.lr_schedule.rounds, often.method.lr_schedule.inner.at) == (
        48,
        4,
        5,
        (24, 36),
    )
    assert (seldom.rounds, seldom.eval.every, seldom.method.lr_schedule.inner.at) == (12, 1, (6, 9))


def test_a_search_goes_by_what_the_row_shows() -> None:
    grid = load("mapo-5", "gpu").grid
    by = {row["label"]: grid.by(i) for i, row in enumerate(grid.content["rows"])}
    assert (by["LoRA"], by["SA-LoRA"]) == ("best_accuracy", "best_client_accuracy")


def test_tables_share_runs() -> None:
    one, *others = (
        {line.runs[0].digest() for line in load(f"mapa-{n}", "paper").grid.lines([0])} for n in (1, 3, 4, 5)
    )
    assert one <= set.union(*others)


def test_what_is_unknown_is_refused_in_one_line() -> None:
    with pytest.raises(UnknownName, match="mapo-3"):
        load("mapo-33")
    with pytest.raises(ConfigError, match="quick, gpu, paper"):
        load("mapo-3", "huge")
