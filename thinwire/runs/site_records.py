"""`sites.jsonl` of a deployment: one line per client and round.

A line is written when its round is closed, before the record of the round. If the run goes back, the lines of the
abandoned rounds stay: lines that follow have a higher `attempt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from thinwire.core.text import visible
from thinwire.federation.site_record import SiteRecord
from thinwire.runs.files import INVALID, append, read_lines, unpack, write_atomically

SITES = "sites.jsonl"
_NUMBERS = ("norm", "cosine", "loss", "seconds")


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


def _parsed(line: bytes) -> SiteRecord | None:
    """The record of a line; None if it is not valid."""
    try:
        record: SiteRecord = unpack(SiteRecord, json.loads(line))
    except (*INVALID, RecursionError):
        return None
    return record._replace(site=visible(record.site, 100), why=visible(record.why, 300))
