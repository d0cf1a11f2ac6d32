"""The experiments behind the tables of docs/results, without the settings that were added since.

    python -m tests.experiments.old_tables tests/experiments/old_tables.json    # only for a new table

A line of a table is a row with the first of its values to try. Its digest is that of the settings which existed when
the results were made: `ADDED` lists later ones with the value that the runs had. Tables of papers are not here: the
archive of their page has the digest of every run (`thinwire/experiments/archive.py`).
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from thinwire.experiments.experiment import digest, to_table
from thinwire.experiments.grid import Grid

ROOT = Path(__file__).parent.parent.parent
ADDED: dict[str, Any] = {"method.space.scale": "unit"}


def tables() -> dict[str, Grid]:
    """Every grid of benchmarks, if all rows have the recipe `paper`."""
    files = sorted((ROOT / "benchmarks/grids").glob("*.toml"))
    found = {file.stem: Grid(tomllib.loads(file.read_text())) for file in files}
    return {name: grid for name, grid in found.items() if recipes(grid) == {"paper"}}


def recipes(grid: Grid) -> set[str | None]:
    """The recipes that a grid or its rows name; None for the default one."""
    return {row.get("recipe", grid.content.get("recipe")) for row in grid.content["rows"]}


def lines(grid: Grid) -> list[str]:
    """The label and the digest of every row."""
    out = []
    for number, row in enumerate(grid.content["rows"]):
        row["seeds"] = [0]
        line = grid.line(number, {key: values[0] for key, values in row.get("over", {}).items()})
        label = f"{row['column']}: {line.label}" if "column" in row else line.label
        out.append(f"{label}: {old_digest(to_table(line.runs[0]))}")
    return out


def old_digest(table: dict[str, Any]) -> str:
    """The digest of a resolved experiment without the settings that were added since."""
    for path, value in ADDED.items():
        *parents, last = path.split(".")
        inner = table
        for key in parents:
            inner = inner.get(key, {})
        if inner.get(last) == value:
            del inner[last]
    return digest(table)


if __name__ == "__main__":
    known = {name: lines(grid) for name, grid in tables().items()}
    Path(sys.argv[1]).write_text(json.dumps(known, indent=0) + "\n")
