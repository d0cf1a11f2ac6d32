"""The papers' tables: every preset is sound, and one is really made."""

import json
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, UnknownName
from thinwire.run.grid import run_grids
from thinwire.run.presets import presets
from thinwire.run.repro import SCALES, load, section, write_page

SMALL = ["task.kind=digits", "task.model=mlp", "task.clients=4", "cohort.size=2", "rounds=1", "seed=0"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", presets("repro"))
def test_every_table_can_be_asked_for_at_every_scale(name, scale) -> None:
    found = load(name, scale)
    cells = found.grid.content["rows"]
    assert len(cells) == len(found.content["columns"]) * len(found.content["rows"])
    assert all(row.get("published", [0]) for row in cells if isinstance(row["published"], list))
    lines = found.grid.lines()
    assert all(line.runs for line in lines)
    if scale != "quick":
        assert len(lines[0].runs) >= 3, "a table has three seeds at least"


def test_a_table_is_made_and_traced(tmp_path: Path) -> None:
    found = load("pfedpara-3", "quick", changes=[*SMALL, "task.keep=4", "local.epochs=1"])
    assert section(found, tmp_path).missing == 4
    run_grids([found.grid], tmp_path)
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
