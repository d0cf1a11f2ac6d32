"""Measures of papers' tables, computed from a run: an accuracy, rounds, seconds, bytes; and counts without training.

    best_accuracy, final_accuracy, best_client_accuracy, final_client_accuracy       in percent
    rounds to 0.8                      until that accuracy was first reached
    rounds to 0.8 of clients           the same by the accuracy of clients, which may have private parts
    MB up a client to 0.8              uploads of a client that takes part in all rounds until then
    minutes to 0.8 at 2 Mbps           the same in time, by `link_time.py` with the bytes and training times of the run
    seconds a round at 2 Mbps          mean over all rounds but the first, in which there is nothing to download
    MB a round                         uploads and downloads of one client in such a round, without catch-up

and the cost of a method as papers define it, computed by `cost`:

    bytes_up        all uploaded bytes, in percent of those of the first row
    to_worst        bytes without catch-up until the best accuracy of the worst run of the column, in percent likewise
    gigabytes       bytes of all messages without catch-up
    numbers         trainable parameters, in percent of the model's parameters
    MB to 80 % of the first      bytes without catch-up until that share of the final accuracy of the first row
    MB up to 80 % of the first   the same, of uploads only

An archived run (`archive.py`) has the values of the measures that its tables showed. Early ones have no
bytes by direction, but the cost of their row as it was printed (`printed_cost`), which is shown while all runs of the
column are such.

Tables with `counted = true` have the number of parameters of a weight or model in a space, or the rank of a weight.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from papers.archive import Runs
from papers.grid import Line, metrics, summary, to_target
from thinwire.core.key import Key
from thinwire.core.registry import lookup
from thinwire.core.tree import Spec, Tree
from thinwire.errors import ConfigError
from thinwire.federation.settings import Settings
from thinwire.runs.link_time import seconds
from thinwire.runs.parts import build, named
from thinwire.runs.toml import Table

Cost = Literal["bytes_up", "to_worst", "gigabytes", "numbers"]
_TO = re.compile(r"(rounds|minutes|MB up a client) to (0\.\d+)(?: at (.+?))?( of clients)?")
_SHARE = re.compile(r"MB (up )?to (\d+) % of the first")


def heading(measure: str) -> str:
    """The column head of a measure.

    >>> heading("best_accuracy"), heading("rounds to 0.8")
    ('best accuracy %', 'rounds to 0.8')
    """
    return measure.replace("_", " ") + " %" if measure.endswith("_accuracy") else measure


def measured(measure: str, experiment: Settings, out: Path | Runs) -> float | None:
    """The value of a measure for a finished run; None if it has none, such as rounds to an accuracy never reached."""
    found, kept = summary(experiment, out), Runs.at(out).kept(experiment)
    if found is None:
        return None
    if measure.endswith("_accuracy") and measure in found:
        return None if found[measure] is None else 100 * float(found[measure])
    goal = _TO.fullmatch(measure)
    if kept is not None and not (goal and goal[1] == "rounds"):  # its records are incomplete
        value: float | None = kept["values"].get(measure)
        return value
    records = metrics(experiment, out)[1:]
    if measure == "MB a round":
        clients = sum(record["clients"] for record in records)
        return sum(record["bytes_up"] + record["bytes_down"] for record in records) / clients / 1e6 if clients else None
    if measure.startswith("seconds a round at "):
        speed = measure.removeprefix("seconds a round at ")
        return seconds(records, speed) / len(records) if records else None
    if goal:
        reached = to_target(experiment, out, float(goal[2]), "client_accuracy" if goal[4] else "accuracy")
        if reached is None or goal[1] == "rounds":
            return float(reached[0]) if reached else None
        done = metrics(experiment, out)[: reached[0]]
        if goal[1] == "MB up a client":
            return float(sum(record["bytes_up"] / record["clients"] for record in done if record["clients"])) / 1e6
        return seconds(done, goal[3]) / 60
    raise ConfigError(f"unknown measure {measure!r}; write for example best_accuracy, or rounds to 0.8")


def cost(kind: str, line: Line, column: Sequence[Line], out: Path | Runs) -> float | None:
    """The cost of a line of a table as papers define it; None before its runs are finished.

    Args:
        kind: one of `Cost`, or `MB to N % of the first`.
        line: the line.
        column: all lines of its column, the baseline first.
        out: folder of the run directories, or runs with an archive.
    """
    share = _SHARE.fullmatch(kind)
    if kind not in get_args(Cost) and not share:
        known = ", ".join((*get_args(Cost), "MB to 80 % of the first"))
        raise ConfigError(f"cost must be one of {known}, not {kind!r}")
    finished = _finished(line, out)
    if not finished:
        return None
    if share:
        return _megabytes(finished, _finished(column[0], out), int(share[2]) / 100, bool(share[1]), out)
    if kind == "gigabytes":
        return statistics.fmean(s["bytes_total_ideal"] for _, s in finished) / 1e9
    if kind == "numbers":
        return statistics.fmean(100 * s["trainable"] / s["parameters"] for _, s in finished)
    everything = [s for other in column for _, s in _finished(other, out)]
    if any("printed_cost" in s for s in everything):
        return finished[0][1]["printed_cost"] if all("printed_cost" in s for s in everything) else None
    worst = min((s["best_accuracy"] or 0.0 for s in everything), default=0.0)
    spent, first = (_spent(kind, one, worst, out) for one in (line, column[0]))
    return 100 * spent / first if spent is not None and first else None


def _spent(kind: str, line: Line, worst: float, out: Path | Runs) -> float | None:
    """Mean uploaded bytes, or mean bytes in both directions until an accuracy."""
    finished = _finished(line, out)
    if kind == "bytes_up":
        spent = [s["bytes_up"] for _, s in finished]
    else:
        spent = [reached[2] for e, _ in finished if (reached := to_target(e, out, worst))]
    return statistics.fmean(spent) if spent else None


_Runs = list[tuple[Settings, dict[str, Any]]]


def _finished(line: Line, out: Path | Runs) -> _Runs:
    return [(e, s) for e in line.runs if (s := summary(e, out))]


def _megabytes(finished: _Runs, of_first: _Runs, share: float, only_up: bool, out: Path | Runs) -> float | None:
    """Mean megabytes until a share of the mean final accuracy of the first row; None if a run never gets there."""
    finals = [s["final_accuracy"] for _, s in of_first if s["final_accuracy"] is not None]
    if not finals:
        return None
    target, spent = share * statistics.fmean(finals), []
    for experiment, _ in finished:
        reached = to_target(experiment, out, target)
        if reached is None:
            return None
        done = [record for record in metrics(experiment, out) if record["round"] <= reached[0]]
        spent.append(sum(r["bytes_up"] + (0 if only_up else r["bytes_down"]) for r in done) / 1e6)
    return statistics.fmean(spent)


def count(row: Table, what: str, options: Table) -> int:
    """One cell of such a table.

    Args:
        row: a `space`, and the `shape` of a weight or a `model`.
        what: `numbers` (parameters), or the `rank` of a weight as a matrix of its first axis against the others.
        options: of the model, such as `classes`.

    >>> row = {"space": {"kind": "fedpara", "rank": 16}, "shape": [256, 256]}
    >>> count(row, "numbers", {}), count(row, "rank", {})
    (16384, 256)
    """
    if "shape" in row:
        base: Tree = {"layer.weight": Key(0).normal(*row["shape"])}
    else:
        kind, model_options = named(row["model"], "model")
        with torch.device("meta"):  # shapes only
            base = dict(lookup("model", kind).make(**model_options, **options).named_parameters())
    with torch.no_grad():
        space = build("space", row["space"], "space")
        basis = space.basis_from(base, Key(0), "cpu")
        coords = space.init(base, basis, Key(0))
        if what == "numbers":
            return Spec.of(coords).size
        exact = [{name: block.double() for name, block in tree.items()} for tree in (base, basis, coords)]
        weight = space.expand(*exact)["layer.weight"]
    return int(torch.linalg.matrix_rank(weight.flatten(1)))


def rounded(number: float) -> str:
    """A number as papers print it.

    >>> rounded(66_000), rounded(15_250_000), rounded(256)
    ('66 K', '15.25 M', '256')
    """
    for size, unit in ((1e6, " M"), (1e3, " K")):
        if number >= size:
            return f"{number / size:.10g}{unit}"
    return f"{number:g}"


def counted_rows(content: Table) -> list[list[str]]:
    """The rows of such a table: for each column our value, the published value, and their difference in percent."""
    rows = []
    for row in content["rows"]:
        cells: list[str] = [row["label"]]
        for i, column in enumerate(content["columns"]):
            ours, published = count(row, column["what"], column.get("options", {})), _published(row["published"], i)
            cells.append(f"{ours:,}")
            cells += [rounded(published), f"{100 * (ours / published - 1):+.1f}"] if published else ["-", "-"]
        rows.append(cells)
    return rows


def counted_heads(content: Table) -> list[str]:
    """The column heads of these rows."""
    heads = [[f"our {column['name']}", "paper's", "difference %"] for column in content["columns"]]
    return ["", *(head for three in heads for head in three)]


def _published(values: Sequence[Any], i: int) -> float:
    """The published value of a column; 0 if the paper has none."""
    value = float(values[i]) if i < len(values) else 0.0
    return 0.0 if math.isnan(value) else value
