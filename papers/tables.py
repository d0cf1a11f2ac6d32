"""Reproduction of tables in papers: each is a file with the grid to run and the published values.

A file of papers/repro is a grid (`grid.py`) in the shape of a printed table: `columns` are tasks with settings, `rows`
are methods with the paper's value in each column (`published`, and `traffic` as the paper counts it; 0 if the paper has
none). A column or a row may have a `share` of the rounds; with `searched = false` no values are tried for a column.
`over` applies to all rows without their own; `on = { cifar10 = {...} }` of a row has settings for columns of that task.
`measure` is the value to compare, of a column or a row if it has its own (`measures.py`); `measures` of a row has those
of single columns. `cost` is the paper's definition of traffic. With `counted = true` nothing is trained (`count`).

`scale.quick`, `scale.gpu` and `scale.paper` replace values of the file, of a column or of a row: they set the amount of
work. Columns and rows with `scales` are left out at other scales. `differs` lists the differences from the paper; that
of a scale is added, and at scale `gpu` every setting that is not the one of `paper` (`scale_text`). `priority` orders
the tables where time is limited (`--budget`). `papers/papers.toml` has the claims of each paper, and the tables that
are not reproduced.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from papers.grid import Grid
from thinwire.errors import ConfigError, UnknownName
from thinwire.runs.toml import Table, loads

Scale = Literal["quick", "gpu", "paper"]
FOLDER = Path(__file__).parent
SCALES: tuple[str, ...] = get_args(Scale)
LAST = 9  # the priority of tables without one


class Reproduction(NamedTuple):
    """A table at a scale, and the grid that makes it."""

    name: str
    scale: str
    content: Table
    grid: Grid


def names() -> list[str]:
    """The tables that can be reproduced."""
    return sorted(file.stem for file in (FOLDER / "repro").glob("*.toml"))


def table_of(name: str) -> Table:
    """The contents of the file of a table."""
    if name not in names():
        raise UnknownName("table", name, names())
    return copy.deepcopy(read(f"repro/{name}.toml"))


@functools.cache
def read(file: str) -> Table:
    """A TOML file of this folder."""
    return loads((FOLDER / file).read_text("utf-8"), file)


def papers() -> list[Table]:
    """The papers whose tables are reproduced: the claims of each, and the tables that are not reproduced."""
    found: list[Table] = read("papers.toml")["papers"]
    return found


def listed() -> list[dict[str, str]]:
    """Every table that `python -m papers repro` reproduces, and those that it does not, with the reason."""
    tables = {name: table_of(name) for name in names()}
    made = [{"name": name, "paper": one["paper"], "about": one["about"]} for name, one in tables.items()]
    return made + [
        {"name": "-", "paper": f"{paper['name']}, {table}", "about": f"not made: {why}"}
        for paper in papers()
        for table, why in paper.get("not_made", {}).items()
    ]


def load(name: str, scale: str = "quick", device: str = "cpu", changes: Sequence[str] = ()) -> Reproduction:
    """A table at a scale.

    Args:
        name: as `python -m papers list` shows them.
        scale: `quick` is a smoke test, `gpu` takes minutes on one GPU, `paper` is the size of the paper.
        device: `cpu` or `cuda`.
        changes: settings for all runs, as in `--set`.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    table = table_of(name)
    content = _at(scale, table)
    texts = [table.get("differs", ""), table.get("scale", {}).get(scale, {}).get("differs", "")]
    columns, rows, cells = _cells(table, scale)
    content |= {"columns": columns, "rows": rows}
    counted = content.get("counted")
    if content.get("tune"):
        content["tune"] = {"extend": 8, **content["tune"]}  # no chosen value at an edge
    texts += [scale_text(table)] if scale == "gpu" and not counted else []
    content["differs"] = " ".join(text.strip() for text in texts if text)
    if counted:
        return Reproduction(name, scale, content, Grid({"rows": [], "rounds": 0}, device, changes))
    for cell in cells:
        if not content["tune"] or not cell["searched"]:  # the middle value
            cell["set"] |= {key: values[len(values) // 2] for key, values in cell.pop("over", {}).items()}
    return Reproduction(name, scale, content, Grid({**content, "rows": cells}, device, changes))


def by_value(tables: Sequence[Reproduction]) -> list[Reproduction]:
    """Tables in the order in which a budget is spent: by `priority` of their files (1 is the first), then as given."""
    return sorted(tables, key=lambda one: one.content.get("priority", LAST))


def scale_text(table: Table) -> str:
    """The settings of scale `gpu` that are not those of `paper`, and what is left out, as sentences.

    >>> table = {"rounds": 9, "columns": [{"name": "IID"}], "rows": [{"method": "fedavg"}]}
    >>> scale_text(table | {"scale": {"gpu": {"rounds": 3, "set": {"local.epochs": 2}}}})
    'Settings of scale `gpu`, in parentheses those of `paper`: epochs 2 (default), rounds 3 (9).'
    """
    (*_, small), (*_, whole) = (_cells(table, scale) for scale in ("gpu", "paper"))
    paper = {(cell["column"], cell["label"]): _values(table, cell, "paper") for cell in whole}
    pairs: dict[str, tuple[set[str], set[str]]] = {}
    for cell in small:
        ours, theirs = _values(table, cell, "gpu"), paper.get((cell["column"], cell["label"]), {})
        for key in (ours | theirs) if theirs else ():
            if ours.get(key) != theirs.get(key) and key not in _UNIMPORTANT:
                here, there = pairs.setdefault(key, (set(), set()))
                here.add(_shown(ours.get(key)))
                there.add(_shown(theirs.get(key)))
    named = sorted((_NAMES.get(key, key.rsplit(".", 1)[-1]), *sides) for key, sides in pairs.items())
    changed = [f"{name} {' or '.join(sorted(here))} ({' or '.join(sorted(there))})" for name, here, there in named]
    text = f"Settings of scale `gpu`, in parentheses those of `paper`: {', '.join(changed)}." if changed else ""
    named_parts = [*((one, one["name"]) for one in table["columns"]), *((one, _label(one)) for one in table["rows"])]
    left = [name for one, name in named_parts if "gpu" not in one.get("scales", SCALES)]
    return text + (f"{' ' if text else ''}Only at scale `paper`: {'; '.join(dict.fromkeys(left))}." if left else "")


_NAMES = {"cohort.size": "clients per round", "task.scale": "inputs"}
_UNIMPORTANT = ("eval.every", "checkpoint.every", "engine.backend")  # for results


def _values(table: Table, cell: Table, scale: str) -> Table:
    """All settings of a cell at a scale, and its rounds."""
    content = _at(scale, table)
    rounds = max(1, round(cell.get("share", 1.0) * cell.get("rounds", content["rounds"])))
    return {**content["set"], **cell["set"], "rounds": rounds}


def _label(row: Table) -> str:
    return str(row.get("label", row["method"]))


def _shown(value: Any) -> str:
    """A setting in a few words.

    >>> _shown(None), _shown({"kind": "warmup", "rounds": 5}), _shown(["a", "b"])
    ('default', 'warmup (rounds 5)', 'a, b')
    """
    if isinstance(value, dict) and value.keys() == {"of_rounds"}:
        return f"{value['of_rounds']:g} of the rounds"
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {_shown(one)}" for key, one in value.items() if key != "kind")
        kind = str(value.get("kind", ""))
        return f"{kind} ({inner})" if kind and inner else kind or inner
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _cells(table: Table, scale: str) -> tuple[list[Table], list[Table], list[Table]]:
    """The columns, the rows and the cells of a table at a scale."""
    content = _at(scale, table)
    columns = [(i, _at(scale, one)) for i, one in enumerate(content["columns"]) if scale in one.get("scales", SCALES)]
    common = {key: content[key] for key in ("over", "measure") if key in content}
    rows = [{**common, **_at(scale, row)} for row in content["rows"] if scale in row.get("scales", SCALES)]
    counted = content.get("counted")
    cells = [] if counted else [_cell(column, row, i, table, scale) for i, column in columns for row in rows]
    return [column for _, column in columns], rows, cells


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
    out |= {"label": _label(row), "column": column["name"]}
    at_scale = [part.get("scale", {}).get(scale, {}).get("set", {}) for part in (table, column, row)]
    on_task = row.get("on", {}).get(column.get("on", table.get("on")), {})
    settings = [column.get("set", {}), row.get("set", {}), on_task, *at_scale]
    out["set"] = functools.reduce(operator.or_, settings, {})
    out["searched"] = column.get("searched", True)
    if table.get("measure") != row.get("measure", table.get("measure")):
        out["by"] = row["measure"]  # the search uses the measure that the table shows
    out |= {"share": column.get("share", 1.0) * row.get("share", 1.0)}
    in_column = column.get("measure", row.get("measure", "best_accuracy"))
    out |= {"measure": row.get("measures", {}).get(column["name"], in_column)}
    out |= {"on": column["on"]} if "on" in column else {}
    for key in ("published", "traffic"):
        printed = row.get(key, [])
        out[key] = printed[number] if number < len(printed) else 0
    return out
