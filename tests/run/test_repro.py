"""The papers' tables: every preset is sound, and one is really made."""

import itertools
import json
import os
import statistics
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, UnknownName
from thinwire.run.grid import run_grids
from thinwire.run.presets import presets
from thinwire.run.repro import SCALES, load, section, write_page

DATA = Path(os.environ.get("THINWIRE_DATA", "no data"))
SMALL = ["task.clients=400", "task.keep=2", "cohort.size=2", "rounds=1", "local.steps=1", "task.hold_out=0.1"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", presets("repro"))
def test_every_table_can_be_asked_for_at_every_scale(name, scale) -> None:
    found = load(name, scale)
    cells = found.grid.content["rows"]
    assert len(cells) == len(found.content["columns"]) * len(found.content["rows"])
    assert all(row.get("published", [0]) for row in cells if isinstance(row["published"], list))
    firsts = [{key: values[0] for key, values in row.get("over", {}).items()} for row in cells]
    lines = [found.grid.line(number, chosen, None if number == 0 else [0]) for number, chosen in enumerate(firsts)]
    assert all(line.runs for line in lines)
    if scale != "quick":
        seeds = [len(found.grid.line(number, chosen).runs) for number, chosen in enumerate(firsts)]
        assert statistics.median(seeds) >= 3, "a table has three seeds at least"


def test_equal_steps_in_windows_that_are_whole() -> None:
    for name, scale in itertools.product(("fedlama-1", "fedlama-4"), SCALES):
        grid = load(name, scale).grid
        for share in (1.0, grid.tune.get("share", 1.0)):
            lines = grid.lines([0], share)
            steps = [line.runs[0].rounds * line.runs[0].local.steps for line in lines]
            assert max(steps) - min(steps) <= 24 * share * 2, "of rounding at most"
            phis = [(line.runs[0].rounds, getattr(line.runs[0].method.schedule, "phi", 1)) for line in lines]
            assert all(rounds % phi == 0 for rounds, phi in phis)


def test_tables_share_runs() -> None:
    one, *others = ({line.runs[0].digest() for line in load(f"mapa-{n}", "gpu").grid.lines([0])} for n in (1, 3, 4, 5))
    assert one <= set.union(*others)


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="THINWIRE_DATA names no folder with MNIST")
def test_a_table_is_made_and_traced(tmp_path: Path) -> None:
    found = load("pfedpara-3", "quick", changes=SMALL)
    assert section(found, tmp_path).missing == 4
    run_grids([found.grid], tmp_path, data_dir=DATA)
    made = section(found, tmp_path)
    assert made.missing == 0
    page = tmp_path / "page.md"
    write_page(page, [made])
    runs = json.loads(page.with_suffix(".json").read_text())
    text = page.read_text()
    assert len(runs) == 4
    for digest, numbers in runs.items():
        assert f"{100 * numbers['final_own_accuracy']:.2f}" in text
        assert digest in text


def test_what_is_unknown_is_refused_in_one_line() -> None:
    with pytest.raises(UnknownName, match="mapo-3"):
        load("mapo-33")
    with pytest.raises(ConfigError, match="quick, gpu, paper"):
        load("mapo-3", "huge")
