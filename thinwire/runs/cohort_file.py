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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.runs.files import append, parse_lines, unpack, write_atomically

COHORTS = "cohorts.jsonl"


class RoundCohort(NamedTuple):
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
    RoundCohort(available=(0, 2, 3), cohort=(3, 0), accepted=(0,), late=(3,), based=())
    """

    def __init__(self, run: Path | None = None) -> None:
        self.file = run / COHORTS if run else None
        self._whole: bytes | None = None  # the lines before the end of a file that cannot be read

    @cached_property
    def rounds(self) -> dict[int, RoundCohort]:
        """The rounds so far, by number from 1."""
        data = self.file.read_bytes() if self.file and self.file.is_file() else b""
        lines, rounds = parse_lines(data, _parsed), dict[int, RoundCohort]()
        for line in lines:
            _apply(rounds, line)
        if len(lines) < len(whole := data.splitlines(keepends=True)):
            self._whole = b"".join(whole[: len(lines)])
        return rounds

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
        _apply(self.rounds, line)
        if self.file is None:
            return
        if self._whole is not None:
            write_atomically(self.file, self._whole)
            self._whole = None
        append(self.file, (json.dumps(line) + "\n").encode())


def _apply(rounds: dict[int, RoundCohort], line: Mapping[str, Any]) -> None:
    number = line["round"]
    if "cohort" in line:
        for later in [one for one in rounds if one >= number]:
            del rounds[later]
        rounds[number] = RoundCohort(tuple(line["available"]), tuple(line["cohort"]))
    elif number in rounds:
        result = {name: tuple(line.get(name, ())) for name in ("accepted", "late", "based")}
        rounds[number] = rounds[number]._replace(**result)


def _parsed(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    lists = unpack(dict[str, tuple[int, ...]], {key: one for key, one in value.items() if key != "round"})
    known = {"available", "cohort"} <= lists.keys() or {"accepted", "late"} <= lists.keys()
    if not known or len(lists.get("based", ())) not in (0, len(lists.get("accepted", ()))):
        raise ValueError("not the line of a round")
    return {"round": unpack(int, value["round"]), **lists}
