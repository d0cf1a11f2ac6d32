"""The papers' tables beside our own numbers: each is a preset that says what to run and what was published.

A file of presets/repro is a grid (`grid.py`) in the shape of a printed table: `columns` are tasks with settings, `rows`
methods with what the paper says of them in each column (`published`, and `traffic` as the paper counts it; 0 where it
says nothing). `over` is for all rows that have none of their own. `scale.quick`, `scale.gpu` and `scale.paper` replace
values of the file: how much of the paper's work is done; columns and rows with `scales` are left out at others.
`measure` is what we compare, `differs` what is not as in the paper (that of a scale is added), `verdict` what came out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from thinwire.errors import ConfigError
from thinwire.run.grid import Grid, Line, markdown, spread, summary
from thinwire.run.presets import preset
from thinwire.run.toml import Table
from thinwire.run.units import human_bytes

Scale = Literal["quick", "gpu", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)


class Reproduction(NamedTuple):
    """A table at a scale, and the grid that makes it."""

    name: str
    scale: str
    content: Table
    grid: Grid


class Section(NamedTuple):
    """A table as it stands: a part of a page, and the few numbers of each run behind it, by its short digest."""

    text: str
    runs: dict[str, dict[str, Any]]
    missing: int  # runs that did not finish


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
    at = found.table["scale"][scale]
    content = {**found.table, **at, "about": found.about, "paper": found.paper}
    content["set"] = {**found.table.get("set", {}), **at.get("set", {})}
    content["differs"] = " ".join(text.strip() for text in (found.table.get("differs", ""), at.get("differs", "")))
    columns = [(i, column) for i, column in enumerate(content["columns"]) if scale in column.get("scales", SCALES)]
    common = {"over": content["over"]} if "over" in content else {}
    rows = [{**common, **row} for row in content["rows"] if scale in row.get("scales", SCALES)]
    cells = [_cell(column, row, i, at.get("set", {})) for i, column in columns for row in rows]
    if not content["tune"]:  # without a search, the value in the middle of those to try
        for row in cells:
            row["set"] |= {key: values[len(values) // 2] for key, values in row.pop("over", {}).items()}
    grid = Grid({**content, "rows": cells}, device, changes)
    return Reproduction(name, scale, {**content, "columns": [column for _, column in columns], "rows": rows}, grid)


def _cell(column: Table, row: Table, number: int, scaled: Table) -> Table:
    """The row of a grid for one cell of a table; settings of a scale win over those of its column and row."""
    out: Table = {key: row[key] for key in ("method", "over", "rounds", "share", "seeds") if key in row}
    out |= {"label": row.get("label", row["method"]), "column": column["name"]}
    out |= {"set": {**column.get("set", {}), **row.get("set", {}), **scaled}}
    out |= {"on": column["on"]} if "on" in column else {}
    for word in ("published", "traffic"):
        printed = row.get(word, [])
        out[word] = printed[number] if number < len(printed) else 0
    return out


def section(repro: Reproduction, out: Path) -> Section:
    """The table from run directories, with what is missing left open."""
    content, lines = repro.content, repro.grid.final(out)
    measure = content.get("measure", "best_accuracy")
    text = f"## {content['paper']}: {content['about']}\n\n"
    text += f"{content['differs'].strip()}\n\n" if content.get("differs") else ""
    runs: dict[str, dict[str, Any]] = {}
    for column in content["columns"]:
        mine = [line for line in lines if repro.grid.content["rows"][line.row]["column"] == column["name"]]
        if mine:
            text += f"**{column['name']}** ({_work(mine[0])})\n\n" + _table(repro, mine, out, measure) + "\n"
    everything = [*repro.grid.trials(), *lines]
    for line in everything:
        for e in line.runs:
            if s := summary(e, out):
                kept = ("best_accuracy", "final_accuracy", "final_own_accuracy", "bytes_total", "bytes_catchup")
                about = {"table": repro.name, "method": line.label, "settings": line.settings, "seed": e.seed}
                runs[e.digest()[:8]] = {**about, "rounds": s["rounds"], **{key: s.get(key) for key in kept}}
    missing = len({e.digest() for line in everything for e in line.runs if not summary(e, out)})
    if verdict := content.get("verdict", "").strip():
        text += f"{verdict}\n\n"
    text += f"Scale `{repro.scale}`" + (f"; {missing} runs did not finish" if missing else "")
    return Section(text + f". `thinwire repro {repro.name} --scale {repro.scale}` makes this table.\n", runs, missing)


def write_page(path: Path, sections: Sequence[Section]) -> None:
    """A page of tables, and beside it a .json file with the numbers of every run that it names."""
    text = "# The papers' tables, and ours\n\nWritten by `thinwire repro` from run directories.\n\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n".join(part.text for part in sections))
    runs = {name: values for part in sections for name, values in sorted(part.runs.items())}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in runs.items())
    path.with_suffix(".json").write_text("{\n" + lines + "\n}\n")


def _work(line: Line) -> str:
    """How much one run of a line does."""
    e = line.runs[0]
    steps = f"{e.local.steps} steps" if e.local.steps else f"{e.local.epochs} epoch(s)"
    size = f"{e.task.clients} clients, {e.cohort.size} a round"
    return f"{e.rounds} rounds, {size}, {steps} of batch {e.local.batch}, device {e.engine.device}"


def _table(repro: Reproduction, lines: list[Line], out: Path, measure: str) -> str:
    """One column of a printed table, with more columns of our own."""
    first = _mean(lines[0], out, "bytes_total")
    rows = []
    for line in lines:
        cell = repro.grid.content["rows"][line.row]
        found = [s for e in line.runs if (s := summary(e, out))]
        values = [s[measure] for s in found]
        paper = f"{cell['published']:g}" if cell["published"] else "-"
        apart = "-"
        if values and cell["published"] and None not in values:
            apart = f"{100 * statistics.fmean(values) - cell['published']:+.1f}"
        total = _mean(line, out, "bytes_total")
        share = f"{100 * total / first:.2f}" if total and first else "-"
        printed = f"{cell['traffic']:g}" if cell["traffic"] else "-"
        chosen = ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in line.chosen.items())
        seeds = " ".join(str(s["seed"]) for s in found) or "none"
        digests = " ".join(e.digest()[:8] for e in line.runs if summary(e, out))
        numbers = [spread(values), paper, apart, seeds, human_bytes(total) if total else "-", share, printed]
        rows.append([line.label, chosen or "-", *numbers, digests or "-"])
    what = measure.replace("_", " ")
    head = ["method", "tuned", f"our {what} %", "paper's", "difference", "seeds", "honest bytes", "% of the first"]
    return markdown([*head, "paper's %", "runs"], rows)


def _mean(line: Line, out: Path, key: str) -> float | None:
    known = [s[key] for e in line.runs if (s := summary(e, out))]
    return statistics.fmean(known) if known else None
