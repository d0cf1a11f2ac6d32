"""Reproduced tables: every preset is valid, tables share runs, and rows have equal work."""

import itertools
import statistics

import pytest

from thinwire.errors import ConfigError, UnknownName
from thinwire.experiments.presets import papers, presets, tables
from thinwire.experiments.repro import SCALES, load

TABLES = {
    "mapa": (1, 3, 4, 5),
    "mapo": (3, 5),
    "fedlama": (1, 4),
    "pfedpara": (3,),
    "flasc": (1, 3),
    "fedpara": (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", presets("repro"))
def test_every_table_loads_at_every_scale(name, scale) -> None:
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
        seeds = [cell.get("seeds", found.content["seeds"]) for cell in cells]
        assert statistics.median(map(len, seeds)) >= 3, "a table has at least three seeds"
        if not found.grid.tune:
            assert "there is no search" in " ".join(found.content["differs"].split()), "a table without one says so"
            return
        searched = found.grid.tune["seeds"]
        assert len(searched) == 1
        assert not any(set(searched) & set(final) for final in seeds), "the search uses other seeds"


def test_all_tables_with_available_data_have_a_preset() -> None:
    assert {f"{paper}-{number}" for paper, numbers in TABLES.items() for number in numbers} <= set(presets("repro"))
    known = {paper["name"] for paper in papers()}
    assert {one.paper.split(",")[0] for one in presets("repro").values()} == known
    assert any("CIFAR-100" in row["about"] for row in tables() if row["name"] == "-")


def test_rows_of_fedlama_have_equal_steps_and_whole_windows() -> None:
    for name, scale in itertools.product(("fedlama-1", "fedlama-4"), SCALES):
        grid = load(name, scale).grid
        for share in (1.0, grid.tune.get("share", 1.0)):
            lines = grid.lines([0], share)
            steps = [line.runs[0].rounds * line.runs[0].local.steps for line in lines]
            assert max(steps) - min(steps) < 24, "up to rounding"
        phis = [(line.runs[0].rounds, getattr(line.runs[0].method.schedule, "phi", 1)) for line in grid.lines([0])]
        assert all(rounds % phi == 0 for rounds, phi in phis)


def test_a_schedule_scales_with_the_rounds() -> None:
    grid = load("fedlama-4", "paper", changes=["rounds=48"]).grid
    frequent, rare, _ = (line.runs[0] for line in grid.lines([0])[:12:4])
    schedule = frequent.method.lr_schedule
    assert (frequent.rounds, frequent.eval.every, schedule.rounds, schedule.inner.at) == (48, 4, 2, (24, 36))
    assert (rare.rounds, rare.eval.every, rare.method.lr_schedule.inner.at) == (12, 1, (6, 9))


def test_the_criterion_of_a_search_is_the_measure_of_its_row() -> None:
    grid = load("mapo-5", "gpu").grid
    by = {row["label"]: grid.by(i) for i, row in enumerate(grid.content["rows"])}
    assert (by["LoRA"], by["SA-LoRA"]) == ("best_accuracy", "best_client_accuracy")


@pytest.mark.slow
def test_tables_share_runs() -> None:
    one, *others = (
        {line.runs[0].digest() for line in load(f"mapa-{n}", "paper").grid.lines([0])} for n in (1, 3, 4, 5)
    )
    assert one <= set.union(*others)


def test_unknown_tables_and_scales_are_refused() -> None:
    with pytest.raises(UnknownName, match="mapo-3"):
        load("mapo-33")
    with pytest.raises(ConfigError, match="quick, gpu, paper"):
        load("mapo-3", "huge")
