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
from thinwire.runs.files import append, read_lines, unpack, write_atomically

SITES = "sites.jsonl"


def append_sites(path: Path, records: Iterable[SiteRecord]) -> None:
    """Append the lines of a round to the file of a run directory."""
    append(path / SITES, _lines(records))


def read_sites(path: Path) -> list[SiteRecord]:
    """The lines of a run directory up to the first that is incomplete or not valid; empty if it has none."""
    return read_lines(path / SITES, _parsed)


def cut_sites(path: Path, rounds: int, attempt: int) -> None:
    """Remove the lines after a round from which the run continues; those of earlier attempts stay."""
    if (path / SITES).is_file():
        kept = (one for one in read_sites(path) if one.round <= rounds or one.attempt < attempt)
        write_atomically(path / SITES, _lines(kept))


def _lines(records: Iterable[SiteRecord]) -> bytes:
    return "".join(json.dumps(record._asdict()) + "\n" for record in records).encode()


def _parsed(line: bytes) -> SiteRecord:
    record: SiteRecord = unpack(SiteRecord, json.loads(line))
    return record._replace(site=visible(record.site, 100), why=visible(record.why, 300))
