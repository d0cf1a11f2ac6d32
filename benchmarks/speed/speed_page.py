"""The tables of `speed.py` in docs/benchmarks.md, from the files that it writes with --json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# required speedup over the plain loop on a GPU: model, clients, speedup
REQUIRED = (
    ("cnn2", 10, 45),
    ("cnn2", 100, 110),
    ("cnn-cifar", 10, 20),
    ("cnn-cifar", 100, 32),
    ("vgg16-gn", 10, 8),
    ("resnet20-gn", 10, 15),
    ("lstm-shakespeare", 10, 8),
)
# largest seconds on a GPU: field of a row that is there only in such rows, the seconds, what, limit
LIMITS = (
    ("whole", "warm_s", "complete run, after warm-up", 3.0),
    ("evaluation", "seconds", "one evaluation on Shakespeare", 0.7),
    ("startup", "seconds", "process start to the end of the first round", 4.0),
)


def page(files: list[str]) -> str:
    """Tables of the results of several runs with --json."""
    facts = [json.loads(Path(name).read_text()) for name in files]
    rows = [row for fact in facts for row in fact["rows"]]
    text = [" / ".join(dict.fromkeys(f"{fact['device']}, torch {fact['torch']}" for fact in facts)), ""]
    if variants := [row for row in rows if "variant" in row]:
        text += _table(
            ["model", "clients", "backend", "ms per client", "plain loop", "speedup", "difference", "peak GiB"],
            variants,
            _variant,
        )
        found = [_check(model, cohort, least, variants) for model, cohort, least in REQUIRED]
        text += ["| check | required speedup over the loop | best | |", "|---|---|---|---|", *found, ""]
    if others := [row for row in rows if "method" in row]:
        head = ["method", "model", "clients", "ms per client", "% of the speed of the first", "backend"]
        text += _table(head, others, _method)
    if runs := [row for row in rows if "whole" in row]:
        head = [
            "run, rounds after warm-up",
            "images",
            "precision",
            "seconds in all",
            "seconds of the warm-up",
            "seconds after warm-up",
            "seconds from the third round on, the first evaluation included",
            "ms per round",
            "peak GiB",
        ]
        text += _table(head, runs, _whole)
    for kind, head in (("evaluation", _EVALUATION), ("startup", _STARTUP)):
        if found_rows := [row for row in rows if kind in row]:
            text += _table(
                list(head), found_rows, lambda row, head=head: [_cell(row.get(name)) for name in head.values()]
            )
    limits = []
    for kind, field, what, most in LIMITS:
        times = [row[field] for row in rows if kind in row]
        verdict = "not measured" if not times else "pass" if min(times) <= most else "**FAIL**"
        limits.append(f"| {what} | {most} | {f'{min(times):.2f}' if times else '-'} | {verdict} |")
    text += ["| check | limit, seconds | best | |", "|---|---|---|---|", *limits, ""]
    return "\n".join(text)


def _check(model: str, cohort: int, least: float, variants: list[dict]) -> str:
    """A line that compares the fastest backend that did the same steps with what is required."""
    start = f"| {model}, {cohort} clients | {least} |"
    mine = [row for row in variants if (row["model"], row["cohort"]) == (model, cohort)]
    same = [row for row in mine if row.get("same_steps")]
    if not same:
        return f"{start} - | {'**FAIL**: too far from the loop' if mine else 'not measured'} |"
    best = max(same, key=lambda row: row["times"])
    return f"{start} {best['times']:.1f} ({best['variant']}) | {'pass' if best['times'] >= least else '**FAIL**'} |"


_EVALUATION = {
    "evaluation": "evaluation",
    "precision": "precision",
    "examples": "examples",
    "first, seconds": "first_s",
    "seconds": "seconds",
    "peak GiB": "peak_gib",
}
_STARTUP = {
    "start to the first round": "startup",
    "precision": "precision",
    "seconds, new machine": "new_machine_s",
    "bytecode": "bytecode",
    "seconds": "seconds",
    "import torch": "import_torch_s",
    "ours": "ours_s",
    "import thinwire": "import_thinwire_s",
    "device": "device_s",
    "data": "data_s",
    "prepare": "prepare_s",
    "first round": "first_round_s",
}


def _cell(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def _table(head: list[str], rows: list[dict], cells: Callable[[dict], list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        made = (
            cells(row)
            if "error" not in row
            else [str(row.get("model", "")), row.get("variant", row.get("method", "")), row["error"]]
        )
        lines.append("| " + " | ".join([*made, *["-"] * (len(head) - len(made))]) + " |")
    return [*lines, ""]


def _variant(row: dict) -> list[str]:
    difference = f"{row['difference']:.4f}" + (f", loop {row['rounding']:.4f}" if "rounding" in row else "")
    difference += "" if row["same_steps"] else " (too far)"
    peak = f"{row['peak_gib']:.1f}" if "peak_gib" in row else "-"
    times = [f"{row['ms']:.2f}", f"{row['plain_ms']:.1f}", f"{row['times']:.1f}"]
    return [row["model"], str(row["cohort"]), row["variant"], *times, difference, peak]


def _method(row: dict) -> list[str]:
    share = f"{100 * row['share_of_first']:.0f}"
    return [row["method"], row["model"], str(row["cohort"]), f"{row['ms']:.2f}", share, row["backend"]]


def _whole(row: dict) -> list[str]:
    return [
        str(row["whole"]),
        row.get("images", "random"),
        row["precision"],
        f"{row['seconds']:.2f}",
        f"{row['warm_up_s']:.2f}",
        f"{row['warm_s']:.2f}",
        f"{row['with_loading_s']:.2f}",
        f"{row['ms_round']:.2f}",
        _cell(row.get("peak_gib")),
    ]
