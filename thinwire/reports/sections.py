"""Sections of a page: the runs of one task that have one objective, so that they fit on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.metrics.objective import Objective
from thinwire.reports.objectives import objective_name
from thinwire.reports.seed_groups import SeedGroup


class Section(NamedTuple):
    """Groups that are compared with each other, under the name of their task; notes come first."""

    name: str
    groups: list[SeedGroup]
    notes: list[str]


def sections(task: str, groups: Sequence[SeedGroup]) -> list[Section]:
    """One section for each objective of the runs of a task."""
    found: dict[Objective, list[SeedGroup]] = {}
    for group in groups:
        found.setdefault(group.objective, []).append(group)
    if len(found) == 1:
        return [Section(task, list(groups), [])]
    lists = [f"{objective_name(one)} ({', '.join(group.label for group in them)})" for one, them in found.items()]
    note = f"Note: the runs of {task} have different objectives, so they are not on one axis: {'; '.join(lists)}."
    return [Section(f"{task} by {objective_name(one)}", them, [note]) for one, them in found.items()]


def page_name(parts: Sequence[Section]) -> str:
    """What a page is about, for its subtitle: `Accuracy`, `R2`, `Test loss and accuracy`."""
    names = dict.fromkeys(objective_name(part.groups[0].objective).removeprefix("test ") for part in parts)
    text = " and ".join(names)
    return f"{text[:1].upper()}{text[1:]}"
