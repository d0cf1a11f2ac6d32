"""The papers' tables as grids of runs: each is a preset that says what to run and what was published.

A file of presets/repro is a grid (`grid.py`) in the shape of a printed table: `columns` are tasks with settings, `rows`
methods with what the paper says of them in each column (`published`, and `traffic` as the paper counts it; 0 where it
says nothing). A column may have a `share` of the rounds, as a row may; with `searched = false` no values are tried for
it. `over` is for all rows that have none of their own. `measure` is what we compare, of a column or a row if it has its
own (`measures.py`), `cost` what the paper calls traffic. With `counted = true` nothing is trained (`counts.py`).

`scale.quick`, `scale.gpu` and `scale.paper` replace values of the file, of a column or of a row: how much of the work
of the paper is done. Columns and rows with `scales` are left out at others. `differs` is what is not as in the paper
(that of a scale is added), `verdict` what came out. `presets/papers.toml` has a verdict on each paper, and the tables
that are not made.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from thinwire.errors import ConfigError
from thinwire.experiments.grid import Grid
from thinwire.experiments.presets import preset
from thinwire.experiments.toml import Table

Scale = Literal["quick", "gpu", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)


class Reproduction(NamedTuple):
    """A table at a scale, and the grid that makes it."""

    name: str
    scale: str
    content: Table
    grid: Grid


def load(name: str, scale: str = "quick", device: str = "cpu", changes: Sequence[str] = ()) -> Reproduction:
    """A table at a scale.

    Args:
        name: as `thinwire repro` lists them.
        scale: `quick` shows that it runs, `gpu` is what one GPU does in minutes, `paper` as much as the paper did.
        device: `cpu` or `cuda`.
        changes: settings for all runs, as in `--set`.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    found = preset("repro", name)
    content = {**_at(scale, found.table), "about": found.about, "paper": found.paper}
    texts = (found.table.get("differs", ""), found.table.get("scale", {}).get(scale, {}).get("differs", ""))
    content["differs"] = " ".join(text.strip() for text in texts if text)
    columns = [(i, _at(scale, one)) for i, one in enumerate(content["columns"]) if scale in one.get("scales", SCALES)]
    common = {key: content[key] for key in ("over", "measure") if key in content}
    rows = [{**common, **_at(scale, row)} for row in content["rows"] if scale in row.get("scales", SCALES)]
    content |= {"columns": [column for _, column in columns], "rows": rows}
    if content.get("counted"):
        return Reproduction(name, scale, content, Grid({"rows": [], "rounds": 0}, device, changes))
    cells = [_cell(column, row, i, found.table, scale) for i, column in columns for row in rows]
    for cell in cells:
        if not content["tune"] or not cell["searched"]:  # the value in the middle of those to try
            cell["set"] |= {key: values[len(values) // 2] for key, values in cell.pop("over", {}).items()}
    return Reproduction(name, scale, content, Grid({**content, "rows": cells}, device, changes))


def _at(scale: str, table: Table) -> Table:
    """A table with what it says for a scale on top.

    >>> _at("gpu", {"rounds": 9, "set": {"a": 1}, "scale": {"gpu": {"rounds": 3, "set": {"b": 2}}}})["set"]
    {'a': 1, 'b': 2}
    """
    own = table.get("scale", {}).get(scale, {})
    return {**table, **own, "set": {**table.get("set", {}), **own.get("set", {})}}


def _cell(column: Table, row: Table, number: int, table: Table, scale: str) -> Table:
    """The row of a grid for one cell; settings of a scale win, and of those the ones of a column or row."""
    out: Table = {key: row[key] for key in ("method", "over", "rounds", "seeds") if key in row}
    out |= {"label": row.get("label", row["method"]), "column": column["name"]}
    at_scale = [part.get("scale", {}).get(scale, {}).get("set", {}) for part in (table, column, row)]
    out["set"] = functools.reduce(operator.or_, [column.get("set", {}), row.get("set", {}), *at_scale], {})
    out["searched"] = column.get("searched", True)
    if table.get("measure") != row.get("measure", table.get("measure")):
        out["by"] = row["measure"]  # a search by what the table does not show would choose at random
    out |= {"share": column.get("share", 1.0) * row.get("share", 1.0)}
    out |= {"measure": column.get("measure", row.get("measure", "best_accuracy"))}
    out |= {"on": column["on"]} if "on" in column else {}
    for word in ("published", "traffic"):
        printed = row.get(word, [])
        out[word] = printed[number] if number < len(printed) else 0
    return out
