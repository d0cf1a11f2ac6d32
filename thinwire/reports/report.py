"""Pages that compare runs: one HTML file without scripts or external resources, or Markdown.

Equal runs give equal pages, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.reports.chapters import chapters_of, definitions
from thinwire.reports.page import as_html, as_markdown
from thinwire.reports.rows import ACCURACY, group, objective_name
from thinwire.reports.table import Table, capital
from thinwire.reports.targets import choose_targets
from thinwire.runs.collapse import BROKEN
from thinwire.runs.files import write_atomically
from thinwire.runs.records import SavedRun, find_runs, read_run


def report(
    runs: Sequence[Any] | Table,
    html: Path | str | None = None,
    md: Path | str | None = None,
    *,
    targets: Sequence[float] = (),
) -> Table:
    """Write a page that compares runs; returns their table.

    Args:
        runs: run directories, folders of run directories, results of `tw.simulate(..., out=...)`, or a table.
        html: file of the page.
        md: file of its tables as Markdown.
        targets: values of the objective whose cost is compared, such as accuracies from 0 to 1; chosen from the data
            by default.
    """
    check_page([file for file in (html, md) if file is not None])
    if not isinstance(runs, Table):
        rows = group(read_runs(runs))
        runs = Table(f"{', '.join(dict.fromkeys(row.task for row in rows))}, all rounds", rows)
    table = replace(runs, targets=targets)
    if not any(run.records for run in table.runs):
        broken = (
            f"; {run.name} {run.verdict.status}: {run.verdict.why}"
            for run in table.runs
            if run.verdict.status in BROKEN
        )
        raise ConfigError(f"nothing to report: these runs have no finished round{next(broken, ' yet')}")
    check_page([], targets, next((row.objective.name for row in table.rows if row.objective != ACCURACY), ""))
    if html is None and md is None:
        return table
    chapters = []
    for name, part in table.parts.items():
        part = replace(part, title=name, targets=targets or choose_targets(part.rows, part.baseline))
        chapters += chapters_of(part, f"{name}: " if len(table.parts) > 1 else "")
    chapters.append(definitions())
    tasks = " and ".join(dict.fromkeys(row.task for row in table.rows))
    names = dict.fromkeys(objective_name(row.objective).removeprefix("test ") for row in table.rows)
    for file, text in ((html, as_html), (md, as_markdown)):
        if file is not None:
            write_atomically(Path(file), text(f"thinwire: {tasks}", chapters, capital(" and ".join(names))).encode())
            Path(file).chmod(0o644)  # readable for other users
    return table


def read_runs(runs: Iterable[Any]) -> list[SavedRun]:
    """Read run directories, those in folders, and those of results of `tw.simulate(..., out=...)`."""
    paths = [run.path if hasattr(run, "history") else run for run in runs]
    if None in paths:
        raise ConfigError("this run was not written to a directory; write tw.simulate(..., out='runs/name')")
    return [read_run(path) for path in find_runs(map(Path, paths))]


def check_page(files: Sequence[Path | str], targets: Sequence[float] = (), objective: str = "") -> None:
    """Raise an error for files that cannot be written and targets out of range, before anything is trained.

    Args:
        files: files of the page.
        targets: values of the objective.
        objective: its name; "" for accuracy.
    """
    for path in map(Path, files):
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"{path} cannot be written: {reason}; name a file such as page.html")
    of_accuracy = objective in ("", "accuracy")
    for target in targets:
        if not math.isfinite(target) or (of_accuracy and not 0 < target <= 1):
            kind = (
                "an accuracy above 0 and at most 1, such as 0.8" if of_accuracy else "a finite value of the objective"
            )
            other = "; for a run with another objective, state it with --set eval.objective=loss" if of_accuracy else ""
            raise ConfigError(f"a target is {kind}, not {target}{other}")
