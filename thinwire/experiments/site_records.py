"""`sites.jsonl` of a deployment: one line per client and round, and totals by site.

A line is written when its round is closed, before the record of the round. If the run goes back, the lines of the
abandoned rounds stay: lines that follow have a higher `attempt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

from thinwire.core.text import visible
from thinwire.experiments.files import INVALID, append, read_lines, unpack, write_atomically
from thinwire.runtime.site_record import SiteRecord, Status

SITES = "sites.jsonl"
_NUMBERS = ("norm", "cosine", "loss", "seconds")


class SiteTotals(NamedTuple):
    """Totals of one site: how often its clients had each status, medians of its uploads, and its bytes."""

    site: str
    counts: dict[str, int]
    norm: float | None
    cosine: float | None
    loss: float | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    why: str  # the newest reason


def append_sites(path: Path, records: Iterable[SiteRecord]) -> None:
    """Append the lines of a round to the file of a run directory."""
    lines = "".join(json.dumps(record._asdict()) + "\n" for record in records)
    append(path / SITES, lines.encode())


def read_sites(path: Path) -> list[SiteRecord]:
    """The lines of a run directory up to the first that is incomplete or not valid; empty if it has none."""
    records = []
    for line in read_lines(path / SITES):
        if (record := _parsed(line)) is None:
            break
        records.append(record)
    return records


def cut_sites(path: Path, rounds: int, attempt: int) -> None:
    """Remove the lines after a round from which the run continues; those of earlier attempts stay."""
    if not (path / SITES).is_file():
        return
    kept = [one for one in read_sites(path) if one.round <= rounds or one.attempt < attempt]
    write_atomically(path / SITES, "".join(json.dumps(one._asdict()) + "\n" for one in kept).encode())


def totals_by_site(records: Sequence[SiteRecord]) -> list[SiteTotals]:
    """Totals of every site, sorted by the smallest number of its clients; abandoned rounds are included.

    >>> lines = [SiteRecord(i, "north", 0, "accepted", 2.0 + i, 0.5, bytes_up=10) for i in (1, 2, 3)]
    >>> found = totals_by_site([*lines, SiteRecord(4, "north", 0, "refused", why="its loss is inf")])[0]
    >>> found.counts["accepted"], found.counts["refused"], found.norm, found.bytes_up, found.why
    (3, 1, 4.0, 30, 'its loss is inf')
    """
    by_site: dict[str, list[SiteRecord]] = {}
    for record in sorted(records, key=lambda one: one.client):
        by_site.setdefault(record.site, []).append(record)
    return [_totals(site, own) for site, own in by_site.items()]


def _totals(site: str, own: Sequence[SiteRecord]) -> SiteTotals:
    reasons = [(one.round, one.attempt, one.why) for one in own if one.why]
    known = {name: [value for one in own if (value := getattr(one, name)) is not None] for name in _NUMBERS}
    medians: dict[str, Any] = {name: median(values) if values else None for name, values in known.items()}
    return SiteTotals(
        site,
        {status: sum(one.status == status for one in own) for status in get_args(Status)},
        **medians,
        bytes_up=sum(one.bytes_up for one in own),
        bytes_down=sum(one.bytes_down for one in own),
        why=max(reasons)[2] if reasons else "",
    )


def _parsed(line: bytes) -> SiteRecord | None:
    """The record of a line; None if it is not valid."""
    try:
        record: SiteRecord = unpack(SiteRecord, json.loads(line))
    except (*INVALID, RecursionError):
        return None
    return record._replace(site=visible(record.site, 100), why=visible(record.why, 300))
