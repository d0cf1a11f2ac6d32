"""Reproduction of tables in papers: each is a preset with the grid to run and the published values.

A file of presets/repro is a grid (`grid.py`) in the shape of a printed table: `columns` are tasks with settings, `rows`
are methods with the paper's value in each column (`published`, and `traffic` as the paper counts it; 0 if the paper has
none). A column or a row may have a `share` of the rounds; with `searched = false` no values are tried for a column.
`over` applies to all rows without their own; `on = { cifar10 = {...} }` of a row has settings for columns of that task.
`measure` is the value to compare, of a column or a row if it has its own (`measures.py`), `cost` the paper's definition
of traffic. With `counted = true` nothing is trained (`counts.py`).

`scale.quick`, `scale.gpu` and `scale.paper` replace values of the file, of a column or of a row: they set the amount of
work. Columns and rows with `scales` are left out at other scales. `differs` lists the differences from the paper (that
of a scale is added), `verdict` the outcome. `presets/papers.toml` has a verdict on each paper, and the tables that are
not reproduced. `priority` orders the tables where time is limited (`--budget`).
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
LAST = 9  # the priority of tables without one


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
        scale: `quick` is a smoke test, `gpu` takes minutes on one GPU, `paper` is the size of the paper.
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
        if not content["tune"] or not cell["searched"]:  # the middle value
            cell["set"] |= {key: values[len(values) // 2] for key, values in cell.pop("over", {}).items()}
    return Reproduction(name, scale, content, Grid({**content, "rows": cells}, device, changes))


def by_value(tables: Sequence[Reproduction]) -> list[Reproduction]:
    """Tables in the order in which a budget is spent: by `priority` of their files (1 is the first), then as given."""
    return sorted(tables, key=lambda one: one.content.get("priority", LAST))


def _at(scale: str, table: Table) -> Table:
    """A table with its values for a scale.

    >>> _at("gpu", {"rounds": 9, "set": {"a": 1}, "scale": {"gpu": {"rounds": 3, "set": {"b": 2}}}})["set"]
    {'a': 1, 'b': 2}
    """
    changed = table.get("scale", {}).get(scale, {})
    return {**table, **changed, "set": {**table.get("set", {}), **changed.get("set", {})}}


def _cell(column: Table, row: Table, number: int, table: Table, scale: str) -> Table:
    """The row of a grid for one cell; later settings win: column, row, its task, then those of the scale."""
    out: Table = {key: row[key] for key in ("method", "over", "rounds", "seeds", "recipe") if key in row}
    out |= {"label": row.get("label", row["method"]), "column": column["name"]}
    at_scale = [part.get("scale", {}).get(scale, {}).get("set", {}) for part in (table, column, row)]
    on_task = row.get("on", {}).get(column.get("on", table.get("on")), {})
    settings = [column.get("set", {}), row.get("set", {}), on_task, *at_scale]
    out["set"] = functools.reduce(operator.or_, settings, {})
    out["searched"] = column.get("searched", True)
    if table.get("measure") != row.get("measure", table.get("measure")):
        out["by"] = row["measure"]  # the search uses the measure that the table shows
    out |= {"share": column.get("share", 1.0) * row.get("share", 1.0)}
    out |= {"measure": column.get("measure", row.get("measure", "best_accuracy"))}
    out |= {"on": column["on"]} if "on" in column else {}
    for key in ("published", "traffic"):
        printed = row.get(key, [])
        out[key] = printed[number] if number < len(printed) else 0
    return out
