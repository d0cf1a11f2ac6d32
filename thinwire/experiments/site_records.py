"""`sites.jsonl` of a deployment: one line per client and round.

A line is written when its round is closed, before the record of the round. If the run goes back, the lines of the
abandoned rounds stay: lines that follow have a higher `attempt`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from thinwire.core.text import visible
from thinwire.errors import CheckpointError
from thinwire.experiments.files import LONGEST_JSON, append, write_atomically
from thinwire.runtime.site_record import SiteRecord, Status

SITES = "sites.jsonl"
_COUNTS = ("round", "client", "bytes_up", "bytes_down", "attempt")
_NUMBERS = ("norm", "cosine", "loss", "seconds")


def append_sites(path: Path, records: Iterable[SiteRecord]) -> None:
    """Append the lines of a round to the file of a run directory."""
    lines = "".join(json.dumps(record._asdict()) + "\n" for record in records)
    append(path / SITES, lines.encode())


def read_sites(path: Path) -> list[SiteRecord]:
    """The lines of a run directory up to the first that is incomplete or not valid; empty if it has none."""
    file = path / SITES
    try:
        if (size := file.stat().st_size) > LONGEST_JSON:
            raise CheckpointError(f"{file} has {size:,} bytes, expected at most {LONGEST_JSON:,}")
        lines = file.read_bytes().split(b"\n")[:-1]  # the last one is empty, or incomplete
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
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
        value: Any = json.loads(line)
        record = SiteRecord(**value)
    except (ValueError, TypeError, RecursionError):
        return None
    counts = [getattr(record, name) for name in _COUNTS]
    numbers = [one for name in _NUMBERS if (one := getattr(record, name)) is not None]
    sound = all(type(one) is int and 0 <= one < 1 << 63 for one in counts)
    sound = sound and all(type(one) in (int, float) and math.isfinite(one) for one in numbers)
    sound = sound and record.status in get_args(Status) and isinstance(record.site, str) and isinstance(record.why, str)
    return record._replace(site=visible(record.site, 100), why=visible(record.why, 300)) if sound else None
