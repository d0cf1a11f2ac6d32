"""Which clients were there, were asked, and were accepted in each round: `cohorts.jsonl` of a run directory.

    {"round": 5, "available": [0, 1, 4, 7], "cohort": [4, 0, 7]}     before the requests are sent
    {"round": 5, "accepted": [0, 4], "late": [7]}                    after the round

In asynchronous rounds the second line also has the versions that the accepted uploads were trained from (`based`).
A round that was resumed may have several lines of the first kind: the last counts, and removes later rounds, since the
run went back. An incomplete last line of a killed process is removed. `thinwire check --replay` simulates a run
with these cohorts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.runs.files import INVALID, append, unpack, write_atomically

COHORTS = "cohorts.jsonl"


class RecordedRound(NamedTuple):
    """Who took part in a round.

    Args:
        available: the clients that were there when the cohort was drawn.
        cohort: the clients that were asked.
        accepted: those whose upload is in the next version; None while the round is open.
        late: those that had not responded when the round was closed.
        based: of asynchronous rounds, the version that each accepted upload was trained from.
    """

    available: tuple[int, ...]
    cohort: tuple[int, ...]
    accepted: tuple[int, ...] | None = None
    late: tuple[int, ...] = ()
    based: tuple[int, ...] = ()


class CohortLog:
    """The cohorts of a run by round.

    Args:
        run: the run directory, whose file is read when it is first needed; by default they are kept in memory.

    >>> log = CohortLog()
    >>> log.drawn(1, [0, 2, 3], [3, 0])
    >>> log.closed(1, [0], [3])
    >>> log.rounds[1]
    RecordedRound(available=(0, 2, 3), cohort=(3, 0), accepted=(0,), late=(3,), based=())
    """

    def __init__(self, run: Path | None = None) -> None:
        self.file = run / COHORTS if run else None
        self._rounds: dict[int, RecordedRound] | None = None
        self._rest: bytes | None = None  # the lines before the end of a file that cannot be read

    @property
    def rounds(self) -> Mapping[int, RecordedRound]:
        """The rounds so far, by number from 1."""
        if self._rounds is None:
            self._rounds = {}
            data, kept = self.file.read_bytes() if self.file and self.file.is_file() else b"", 0
            for line in data.splitlines(keepends=True):
                if (value := _parsed(line)) is None:
                    self._rest = data[:kept]
                    break
                self._read(value)
                kept += len(line)
        return self._rounds

    def drawn(self, number: int, available: Sequence[int], cohort: Sequence[int]) -> None:
        """Record a cohort before it is asked."""
        self._add({"round": number, "available": [*available], "cohort": [*cohort]})

    def closed(
        self, number: int, accepted: Sequence[int], late: Sequence[int], based: Sequence[int] | None = None
    ) -> None:
        """Record whose uploads are in the next version, and in asynchronous rounds the versions they are based on."""
        versions = {} if based is None else {"based": [*based]}
        self._add({"round": number, "accepted": [*accepted], "late": [*late], **versions})

    def extremes(self) -> tuple[int, int]:
        """The most clients that were asked in a round, and the fewest that a cohort was drawn from; 0 if unknown."""
        rounds = [one for one in self.rounds.values() if one.cohort]
        most = max((len(one.cohort) for one in rounds), default=0)
        return most, min((len(one.available) for one in rounds), default=0)

    def _add(self, line: dict[str, Any]) -> None:
        assert self.rounds is not None  # the file is read before it is changed
        self._read(line)
        if self.file is None:
            return
        if self._rest is not None:
            write_atomically(self.file, self._rest)
            self._rest = None
        append(self.file, (json.dumps(line) + "\n").encode())

    def _read(self, line: Mapping[str, Any]) -> None:
        """Apply a line."""
        number, known = line["round"], self._rounds or {}
        if "cohort" in line:
            kept = {one: found for one, found in known.items() if one < number}
            self._rounds = {**kept, number: RecordedRound(tuple(line["available"]), tuple(line["cohort"]))}
        elif number in known:
            result = {name: tuple(line.get(name, ())) for name in ("accepted", "late", "based")}
            known[number] = known[number]._replace(**result)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None if it is incomplete or not valid."""
    try:
        value: Any = json.loads(line) if line.endswith(b"\n") else None
        number = unpack(int, value["round"])
        lists = unpack(dict[str, tuple[int, ...]], {key: one for key, one in value.items() if key != "round"})
        accepted, based = (lists.get(name, ()) for name in ("accepted", "based"))
    except (*INVALID, RecursionError):
        return None
    known = {"available", "cohort"} <= lists.keys() or {"accepted", "late"} <= lists.keys()
    return {"round": number, **lists} if known and len(based) in (0, len(accepted)) else None
