"""Compare runs on one page: their objective, such as accuracy, and its cost in bytes, rounds and seconds.

The page is one HTML file without scripts or external resources; the tables are also available as Markdown. Equal runs
give equal pages, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError
from thinwire.metrics.objective import Objective
from thinwire.reports.chapters import CHAPTERS, Section, curve_drawing, definitions
from thinwire.reports.page import Chapter, as_html, as_markdown
from thinwire.reports.seed_groups import (
    ACCURACY,
    Costs,
    SeedGroup,
    baseline_of,
    choose_targets,
    group,
    objective_key,
    objective_name,
)
from thinwire.runs.collapse import BROKEN
from thinwire.runs.files import write_atomically
from thinwire.runs.records import SavedRun, find_runs, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report(
    runs: Sequence[Any],
    html: Path | str | None = None,
    md: Path | str | None = None,
    *,
    targets: Sequence[float] = (),
    compute: float | None = None,
) -> list[SeedGroup]:
    """Write a page that compares runs; returns the groups of runs that it compares.

    Args:
        runs: run directories, folders of run directories, or results of `tw.simulate(..., out=...)`.
        html: file of the page.
        md: file of its tables as Markdown.
        targets: values of the objective whose cost is compared, such as accuracies from 0 to 1; chosen from the data
            by default.
        compute: training seconds of a client per round; as measured on this machine by default.
    """
    check_page([file for file in (html, md) if file is not None])
    if compute is not None and not 0 <= compute < math.inf:
        raise ConfigError(f"compute must be 0 or more seconds, not {compute}")
    recorded, lost = _read(runs)
    tasks = list(dict.fromkeys(run.task for run in recorded))
    groups = {task: group([run for run in recorded if run.task == task]) for task in tasks}
    others = [one.objective.name for task in tasks for one in groups[task] if one.objective != ACCURACY]
    check_page([], targets, *others[:1])
    sections = [part for task in tasks for part in _sections(task, groups[task], targets, compute)]
    chapters = []
    for section in sections:
        prefix = f"{section.name}: " if len(sections) > 1 else ""
        found = [chapter for make in CHAPTERS if (chapter := make(section))]
        chapters += [Chapter(prefix + heading, pieces) for heading, pieces in found]
    if lost:
        texts = [f"{run.name} on {run.task}, seed {run.table.get('seed', 0)}: {run.verdict.why}." for run in lost]
        chapters.append(Chapter("Diverged in the first round", texts))
    chapters.append(definitions(compute))
    title = f"thinwire: {' and '.join(tasks)}"
    names = dict.fromkeys(objective_name(section.objective).removeprefix("test ") for section in sections)
    about = " and ".join(names)
    for file, text in ((html, as_html), (md, as_markdown)):
        if file is not None:
            write_atomically(Path(file), text(title, chapters, f"{about[:1].upper()}{about[1:]}").encode())
            Path(file).chmod(0o644)  # readable for other users
    return [one for task in tasks for one in groups[task]]


def plot(runs: Sequence[Any]) -> Figure:
    """The objective of runs of one task against bytes, as a matplotlib figure; `runs` as for `report`."""
    groups = group(_read(runs)[0])
    return curve_drawing(groups[0].task, groups, objective_key(groups[0].objective)).draw()


def _read(runs: Sequence[Any]) -> tuple[list[SavedRun], list[SavedRun]]:
    """The runs that have a finished round, and those that failed before; an error if none has one."""
    if any(hasattr(run, "history") and run.path is None for run in runs):
        raise ConfigError("this run was not written to a directory; write tw.simulate(..., out='runs/name')")
    recorded = [read_run(path) for path in find_runs(Path(getattr(run, "path", run)) for run in runs)]
    lost = [run for run in recorded if not run.records and run.verdict.status in BROKEN]
    found = [run for run in recorded if run.records]
    if not found:
        why = f"; {lost[0].name} {lost[0].verdict.status}: {lost[0].verdict.why}" if lost else " yet"
        raise ConfigError(f"nothing to report: these runs have no finished round{why}")
    return found, lost


def _sections(task: str, groups: Sequence[SeedGroup], targets: Sequence[float], compute: float | None) -> list[Section]:
    """One section for each objective of the runs of a task, so that the runs of a section fit on one axis."""
    by_objective: dict[Objective, list[SeedGroup]] = {}
    for one in groups:
        by_objective.setdefault(one.objective, []).append(one)
    several, sections = len(by_objective) > 1, []
    lists = "; ".join(f"{objective_name(k)} ({', '.join(one.label for one in own)})" for k, own in by_objective.items())
    note = f"Note: the runs of {task} have different objectives, so they are not on one axis: {lists}."
    for objective, own in by_objective.items():
        baseline = baseline_of(own)
        goals = [goal for goal in targets if objective != ACCURACY or 0 < goal <= 1]
        goals = goals or choose_targets(own, baseline)
        costs: Costs = {goal: [one.cost_to_reach(goal, compute) for one in own] for goal in goals}
        name = f"{task} by {objective_name(objective)}" if several else task
        sections.append(Section(name, own, baseline, costs, [note] if several else []))
    return sections


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
    for target in targets:
        if objective in ("", "accuracy") and not 0 < target <= 1:
            other = "for a run with another objective, state it with --set eval.objective=loss"
            raise ConfigError(f"a target is an accuracy above 0 and at most 1, such as 0.8, not {target}; {other}")
        if not math.isfinite(target):
            raise ConfigError(f"a target is a finite value of the objective, such as 0.8, not {target}")
