"""`cohorts.jsonl` of a run directory: which clients were there, were asked, and were accepted in each round.

    {"round": 5, "available": [0, 1, 4, 7], "cohort": [4, 0, 7]}     before the requests are sent
    {"round": 5, "accepted": [0, 4], "late": [7]}                    after the round

In asynchronous rounds the second line also has the versions that the accepted uploads were trained from (`based`).
A round that was resumed may have several lines of the first kind: the last counts. An incomplete last line of a killed
process is removed. `thinwire replay` simulates a run with these cohorts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.experiments.files import append, write_atomically
from thinwire.flower.cohorts import CohortLog, RecordedRound

COHORTS = "cohorts.jsonl"


class CohortFile(CohortLog):
    """The cohorts of a run in the file of its directory, which is read when it is first needed.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.file, self._loaded = run / COHORTS, False
        self._rest: bytes | None = None

    @property
    def rounds(self) -> Mapping[int, RecordedRound]:
        """The rounds so far, by number from 1."""
        if not self._loaded:
            self._load()
        return self._rounds

    def _load(self) -> None:
        data, kept = self.file.read_bytes() if self.file.is_file() else b"", 0
        for line in data.splitlines(keepends=True):
            value = _parsed(line)
            if value is None:
                break
            self._read(value)
            kept += len(line)
        self._loaded, self._rest = True, data[:kept] if kept < len(data) else None

    def _add(self, line: dict[str, Any]) -> None:
        if not self._loaded:
            self._load()
        if self._rest is not None:  # the end of the file cannot be read
            write_atomically(self.file, self._rest)
            self._rest = None
        super()._add(line)

    def _write(self, line: dict[str, Any]) -> None:
        append(self.file, (json.dumps(line) + "\n").encode())


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None if it is incomplete or not valid."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not _count(value.get("round")):
        return None
    names: tuple[str, ...] = ("available", "cohort") if "cohort" in value else ("accepted", "late")
    names += ("based",) if "based" in value else ()
    lists = [value.get(name) for name in names]
    if not all(isinstance(one, list) and all(map(_count, one)) for one in lists):
        return None
    return value if len(value.get("based", ())) in (0, len(value.get("accepted", ()))) else None


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 40
