"""Chapter of a page about searched settings: which, on which seed, by what, and what the search cost."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.core.units import human_bytes
from thinwire.experiments.search_record import SearchRecord, read_search
from thinwire.reports.page import Chapter, Table
from thinwire.reports.seed_groups import SeedGroup

HEADS = (
    "method",
    "searched",
    "found",
    "tried",
    "runs",
    "rounds of the search",
    "bytes of the search",
    "bytes of a run",
)


def search_chapter(groups: Sequence[SeedGroup]) -> Chapter | None:
    """The searches of the methods; None if no run has one."""
    found = [(group, record) for group in groups if (record := read_search(group.runs[0].path))]
    if not found:
        return None
    rows = []
    for group, record in found:
        total = group.total("bytes_total_honest")
        rows.append(search_cells(group.label, record, total.mean if total else None))
    texts = how_searched([record for _, record in found])
    if without := [group.label for group in groups if group not in [one for one, _ in found]]:
        texts.append(f"Not searched, or not recorded: {', '.join(without)}.")
    return Chapter("Searched settings", [*texts, Table("Search of each method, and its cost", HEADS, rows)])


def search_cells(method: str, record: SearchRecord, run_bytes: float | None) -> tuple[str, ...]:
    """One row: a value at an end of what was tried has a mark."""
    runs = " + ".join(f"{count} x {rounds}" for count, rounds in record.rungs)
    return (
        method,
        record.setting,
        f"{record.value:g}{' (at an end)' if record.at_end else ''}",
        f"{min(record.tried):g} to {max(record.tried):g}",
        runs,
        f"{record.rounds:,}",
        human_bytes(record.bytes),
        "-" if run_bytes is None else human_bytes(run_bytes),
    )


def how_searched(records: Sequence[SearchRecord]) -> list[str]:
    """How the settings were searched, in sentences.

    >>> rungs = ((3, 5), (2, 10), (1, 20))
    >>> record = SearchRecord("method.client_opt.lr", 0.5, (0.25, 0.5, 1.0), rungs, 100, "accuracy", 55, 900)
    >>> print(how_searched([record])[0])
    Searched by successive halving (each rung keeps the better half and doubles the rounds) on seed 100, by accuracy.
    """
    texts = []
    for seed, by in dict.fromkeys((record.seed, record.chosen_by) for record in records):
        halving = "successive halving (each rung keeps the better half and doubles the rounds)"
        texts.append(f"Searched by {halving} on seed {seed}, by {by}.")
    if len({record.rungs[0] for record in records if record.rungs}) > 1:  # later rungs lack the runs that failed
        texts.append("Note: the methods were not searched with equal numbers of runs and rounds.")
    texts.append("Runs: number of runs x rounds of each rung. The bytes of a search are those of all its runs.")
    return texts
