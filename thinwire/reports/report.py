"""Compare runs on one page: their objective, such as accuracy, and its cost in bytes, rounds, seconds and joules.

The page is one HTML file without scripts or external resources; the tables are also available as Markdown. Equal runs
give equal pages, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.experiments.collapse import BROKEN
from thinwire.experiments.files import write_atomically
from thinwire.experiments.link_time import JOULES_PER_BYTE
from thinwire.experiments.records import find_runs, read_run
from thinwire.reports.chapter_layers import layers_chapter
from thinwire.reports.chapter_overview import overview_chapter
from thinwire.reports.chapter_samples import samples_chapter
from thinwire.reports.chapter_search import search_chapter
from thinwire.reports.chapter_settings import commands_chapter, definitions_chapter, settings_chapter
from thinwire.reports.chapter_sites import sites_chapter
from thinwire.reports.chapter_sweep import sweep_chapters
from thinwire.reports.chapter_targets import bytes_chapter, time_chapter
from thinwire.reports.objectives import ACCURACY
from thinwire.reports.page import Chapter, as_html, as_markdown
from thinwire.reports.sections import Section, page_name, sections
from thinwire.reports.seed_groups import SeedGroup, group
from thinwire.reports.targets import Costs, choose_targets
from thinwire.reports.yardstick import baseline_of


def report(
    runs: Sequence[Any],
    html: Path | str | None = None,
    md: Path | str | None = None,
    *,
    targets: Sequence[float] = (),
    compute: float | None = None,
    joules_per_megabyte: float | None = None,
) -> list[SeedGroup]:
    """Write a page that compares runs; returns the groups of runs that it compares.

    Args:
        runs: run directories, folders of run directories, or results of `tw.simulate(..., out=...)`.
        html: file of the page.
        md: file of its tables as Markdown.
        targets: values of the objective whose cost is compared, such as accuracies from 0 to 1; chosen from the data
            by default.
        compute: training seconds of a client per round; as measured on this machine by default.
        joules_per_megabyte: of the energy model.
    """
    check_files([file for file in (html, md) if file is not None])
    if compute is not None and not 0 <= compute < math.inf:
        raise ConfigError(f"compute must be 0 or more seconds, not {compute}")
    joules = JOULES_PER_BYTE if joules_per_megabyte is None else joules_per_megabyte / 1e6
    if not 0 < joules < math.inf:
        raise ConfigError(f"joules per megabyte must be more than 0, not {joules_per_megabyte}")
    recorded = [read_run(path) for path in find_runs([_path(run) for run in runs])]
    lost = [run for run in recorded if not run.records and run.verdict.status in BROKEN]
    recorded = [run for run in recorded if run.records]
    if not recorded:
        why = f"; {lost[0].name} {lost[0].verdict.status}: {lost[0].verdict.why}" if lost else ""
        raise ConfigError(f"nothing to report: these runs have no finished round{why or ' yet'}")
    tasks = list(dict.fromkeys(run.task for run in recorded))
    groups = {task: group([run for run in recorded if run.task == task]) for task in tasks}
    parts = [part for task in tasks for part in sections(task, groups[task])]
    check_targets(targets, accuracy=all(part.groups[0].objective == ACCURACY for part in parts))
    chapters = []
    for part in parts:
        prefix = f"{part.name}: " if len(parts) > 1 else ""
        chapters += [Chapter(prefix + heading, pieces) for heading, pieces in _chapters(part, targets, compute, joules)]
    if lost:
        texts = [f"{run.name} on {run.task}, seed {run.table.get('seed', 0)}: {run.verdict.why}." for run in lost]
        chapters.append(Chapter("Diverged in the first round", list(texts)))
    chapters.append(definitions_chapter(compute, joules))
    title = f"thinwire: {' and '.join(tasks)}"
    for file, text in ((html, as_html), (md, as_markdown)):
        if file is not None:
            write_atomically(Path(file), text(title, chapters, page_name(parts)).encode())
            Path(file).chmod(0o644)  # readable for other users
    return [one for task in tasks for one in groups[task]]


def _path(run: Any) -> Path:
    """The run directory of an argument of `report`."""
    if hasattr(run, "history") and run.path is None:
        raise ConfigError("this run was not written to a directory; write tw.simulate(..., out='runs/name')")
    return Path(getattr(run, "path", None) or run)


def _chapters(part: Section, targets: Sequence[float], compute: float | None, joules: float) -> list[Chapter]:
    """The chapters of one task."""
    task, groups = part.name, part.groups
    baseline = baseline_of(groups)
    goals = [goal for goal in targets if groups[0].objective != ACCURACY or 0 < goal <= 1]
    goals = goals or choose_targets(groups, baseline)
    costs: Costs = {goal: [one.cost_to_reach(goal, compute, joules) for one in groups] for goal in goals}
    first = overview_chapter(task, groups, baseline, costs)
    chapters = [first._replace(pieces=[*part.notes, *first.pieces])]
    chapters += sweep_chapters(task, groups)
    if costs:
        chapters.append(bytes_chapter(task, groups, baseline, costs))
        chapters.append(time_chapter(task, groups, costs, compute))
    if layers := layers_chapter(task, groups):
        chapters.append(layers)
    if sites := sites_chapter(groups):
        chapters.append(sites)
    if samples := samples_chapter(groups):
        chapters.append(samples)
    if searched := search_chapter(groups):
        chapters.append(searched)
    return [*chapters, settings_chapter(groups), commands_chapter(groups)]


def check_page(files: Sequence[Path | str], targets: Sequence[float], objective: str = "") -> None:
    """Raise an error for files that cannot be written and targets out of range, before anything is trained.

    Args:
        files: files of the page.
        targets: values of the objective.
        objective: its name; "" for accuracy.
    """
    check_files(files)
    check_targets(targets, accuracy=objective in ("", "accuracy"))


def check_targets(targets: Sequence[float], accuracy: bool) -> None:
    """Raise an error for targets that are no accuracies, or no numbers if runs have another objective."""
    for target in targets:
        if accuracy and not 0 < target <= 1:
            other = "for a run with another objective, state it with --set eval.objective=loss"
            raise ConfigError(f"a target is an accuracy above 0 and at most 1, such as 0.8, not {target}; {other}")
        if not math.isfinite(target):
            raise ConfigError(f"a target is a finite value of the objective, such as 0.8, not {target}")


def check_files(files: Sequence[Path | str]) -> None:
    """Raise an error for files that cannot be written."""
    for path in map(Path, files):
        if not path.parent.is_dir() or path.is_dir():
            reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ConfigError(f"{path} cannot be written: {reason}; name a file such as page.html")
