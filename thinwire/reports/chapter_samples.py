"""Chapter of a page about a language model: answers to test questions before and after training."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.text import visible
from thinwire.experiments.samples import read_samples
from thinwire.reports.page import Chapter, Table
from thinwire.reports.seed_groups import SeedGroup

SHOWN = 240  # characters of a text


def samples_chapter(groups: Sequence[SeedGroup]) -> Chapter | None:
    """The samples of the first seed of each method, one table for each question; None if no run has any."""
    found = {group.label: read_samples(group.runs[0].path) for group in groups}
    found = {label: samples for label, samples in found.items() if samples}
    if not found:
        return None
    tables = []
    first = next(iter(found.values()))
    for one in first:
        rows = [["right answer", _short(one.answer)], ["before training", _short(one.before)]]
        for label, samples in found.items():
            rows += [[f"after training, {label}", _short(own.after)] for own in samples if own.prompt == one.prompt]
        tables.append(Table(_short(one.prompt), ("", "answer"), rows))
    note = "Answers are generated greedily; of each method, those of its first seed."
    return Chapter("Answers before and after training", [note, *tables])


def _short(text: str) -> str:
    plain = visible(" ".join(text.split()), SHOWN)
    return plain or "(nothing)"
